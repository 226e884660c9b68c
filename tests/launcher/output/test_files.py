"""Files that keep the ranks' output: their names, their bytes, and what is said when they cannot be written."""

import os
import resource

import pytest

from ringrun.errors import MachineError, UsageError
from ringrun.output.files import OutputFiles


@pytest.mark.parametrize(
    ("size", "name"), [(1, "rank.0"), (10, "rank.9"), (11, "rank.10"), (11, "rank.03"), (101, "rank.007")]
)
def test_names_have_as_many_digits_as_the_largest_rank(size, name, tmp_path):
    files = OutputFiles(str(tmp_path / "a" / "b"), size)
    files.close()
    assert (tmp_path / "a" / "b" / name / "stdout").read_bytes() == b""
    assert len(list((tmp_path / "a" / "b").iterdir())) == size


def test_bytes_come_as_they_were_and_at_once(tmp_path):
    (tmp_path / "rank.1").mkdir()
    (tmp_path / "rank.1" / "stderr").write_text("of an earlier run, and longer")
    files = OutputFiles(str(tmp_path), 2)
    assert files.write(1, "stderr", b"\r 10%\r") is None
    assert files.write(1, "stderr", b"\r 20%\xff") is None
    assert (tmp_path / "rank.1" / "stderr").read_bytes() == b"\r 10%\r\r 20%\xff"
    files.close()
    assert files.write(1, "stderr", b"too late") is None


def test_a_rank_that_comes_later_gets_files_at_its_first_byte(tmp_path):
    files = OutputFiles(str(tmp_path), 2, most=11)
    assert files.write(10, "stderr", b"late") is None
    files.close()
    assert files.write(5, "stdout", b"too late") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.00", "rank.01", "rank.10"]
    assert [(tmp_path / "rank.10" / each).read_bytes() for each in ("stdout", "stderr")] == [b"", b"late"]


def test_a_rank_that_comes_later_and_can_have_no_file_is_told_of_once(tmp_path):
    files = OutputFiles(str(tmp_path), 1)
    (tmp_path / "rank.1").write_text("")
    assert files.write(1, "stdout", b"x") == (
        f"{tmp_path}/rank.1 cannot be written any more: File exists; it ends here, but the job continues"
    )
    assert files.write(1, "stdout", b"x") is None
    files.close()


def full(folder, rank):
    (folder / f"rank.{rank}").mkdir()
    for name in ("stdout", "stderr"):
        (folder / f"rank.{rank}" / name).symlink_to("/dev/full")


def test_a_disk_that_gets_full_is_told_once(tmp_path):
    full(tmp_path, 1)
    files = OutputFiles(str(tmp_path), 2)
    said = files.write(1, "stdout", b"x")
    where = tmp_path / "rank.1" / "stdout"
    assert said == f"{where} cannot be written any more: No space left on device; it ends here, but the job continues"
    assert files.write(1, "stdout", b"y") is None
    assert files.write(1, "stderr", b"y") is None
    assert files.write(0, "stdout", b"kept") is None
    files.close()
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"kept"


def test_a_disk_that_is_full_is_told_before_the_job_starts(tmp_path):
    full(tmp_path, 0)
    with pytest.raises(MachineError) as error:
        OutputFiles(str(tmp_path), 2)
    where = f"{tmp_path} cannot be made or written: No space left on device"
    assert str(error.value) == f"--output-filename {tmp_path}: {where}; make room there, or give another folder"


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "rank.1" / "stdout").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"rank\.1/stdout cannot be made or written: Is a directory"):
        OutputFiles(str(tmp_path), 2)


def test_a_pipe_that_nobody_reads_is_refused_and_not_waited_for(tmp_path):
    (tmp_path / "rank.1").mkdir()
    os.mkfifo(tmp_path / "rank.1" / "stdout")
    with pytest.raises(UsageError, match=r"rank\.1/stdout cannot be made or written: No such device or address"):
        OutputFiles(str(tmp_path), 2)


def test_no_folder_at_all():
    with pytest.raises(UsageError, match="--output-filename '': expected a folder for the ranks' output"):
        OutputFiles("", 2)


def test_too_many_files_are_the_machine_s_fault(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(MachineError, match="cannot be made or written: Too many open files"):
            OutputFiles(str(tmp_path), 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_ends_where_the_disk_was_full_and_hides_no_gap(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = OutputFiles(str(tmp_path), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        said = files.write(0, "stdout", b"0123456789and more")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said
    assert "stdout cannot be written any more: File too large" in said
    files.write(0, "stdout", b"there is room again")
    files.close()
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"0123456789"
