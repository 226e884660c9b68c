"""What of the ranks' lines real jobs show: some ranks, equal lines once, with the time, and kept in files."""

import os
import re
import time
from datetime import datetime, timedelta

import pytest

from tests.launcher.job.test_run import by_rank
from tests.support.patience import patient

pytestmark = pytest.mark.without_mpi


BOTH = """
    import os, sys
    rank = os.environ["RANK"]
    print("out", rank)
    print("err", rank, file=sys.stderr)
"""


TOGETHER = """
    import os, pathlib, sys, time
    pathlib.Path("here." + os.environ["RANK"]).touch()
    while len(list(pathlib.Path().glob("here.*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    for count in range(20):
        print("same", count)
        print("bad", count, file=sys.stderr)
        time.sleep(0.05)
"""


def unfold(text):
    """Return the lines of each rank, folded or not."""
    lines = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\[ *([0-9,-]+)\](?: (.*))?", line)
        assert match, f"no prefix: {line!r}"
        for item in match[1].split(","):
            first, _, last = item.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                lines.setdefault(rank, []).append(match[2] or "")
    return lines


@pytest.mark.parametrize(("flags", "shown"), [(["--ranks", "0,2-3"], {0, 2, 3}), (["--ranks", "1"], {1})])
def test_only_some_ranks_are_shown(flags, shown, ringrun, script):
    done = ringrun("-np", 4, *flags, *script(BOTH), returncode=0)
    assert by_rank(done.stdout) == {rank: [f"out {rank}"] for rank in shown}
    assert by_rank(done.stderr) == {rank: [f"err {rank}"] for rank in shown}


def test_the_report_shows_what_a_hidden_rank_wrote(ringrun, script):
    source = """
        import os, sys, time
        print("fine", file=sys.stderr)
        if os.environ["RANK"] == "1":
            sys.exit("out of coffee")
        time.sleep(30)
    """
    done = ringrun("-np", 2, "--ranks", 0, *script(source), returncode=1)
    assert "[1]" not in done.stderr
    assert "ringrun: rank 1 of 2 failed first" in done.stderr
    assert done.stderr.splitlines()[-4:-1] == ["its last lines on stderr:", "fine", "out of coffee"]


def test_a_line_of_all_ranks_is_shown_once(ringrun, script):
    done = ringrun("-np", 3, "--fold", *script(TOGETHER), returncode=0)
    for text, word in ((done.stdout, "same"), (done.stderr, "bad")):
        assert unfold(text) == {rank: [f"{word} {count}" for count in range(20)] for rank in range(3)}
        folded = [line for line in text.splitlines() if line.startswith(f"[0-2] {word} ")]
        assert len(folded) > 5  # all 20 where the machine has nothing else to do


def test_folded_lines_are_not_lost_when_the_job_is_killed(ringrun, program):
    done = ringrun("-np", 3, "--fold", *program("last_words"), returncode=137)
    assert unfold(done.stdout) == {0: ["begin", "ended", "by 0"], 1: ["begin", "ended", "by 1"], 2: ["begin", "dies"]}
    assert "-- ringrun: rank 2 of 3 failed first" in done.stderr
    assert done.stderr.splitlines()[-2] == "it wrote nothing to stderr"


def test_folding_the_lines_of_one_shown_rank_changes_nothing(ringrun, python):
    done = ringrun("-np", 2, "--fold", "--ranks", 1, python, "-c", "print('same'); print('same')")
    assert done.stdout == "[1] same\n[1] same\n"


@pytest.mark.parametrize("flag", ["--timestamps", "--prefix-output-with-timestamp"])
def test_the_time_stands_before_each_line(flag, ringrun, python):
    begin = datetime.now()
    done = ringrun("-np", 2, flag, python, "-c", "import time; print('one'); time.sleep(1); print(); print('two')")
    assert done.returncode == 0
    times = {0: [], 1: []}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) \[([01])\](?: one| two)?", line)
        assert match, line
        times[int(match[2])].append(datetime.fromisoformat(match[1]))
    for first, second, third in times.values():
        assert begin - timedelta(seconds=0.001) <= first < second <= third <= datetime.now()
        assert timedelta(seconds=0.2) < second - first


def test_output_is_kept_complete_and_without_prefixes(ringrun, tmp_path, script):
    source = r"""
        import os
        rank = os.environ["RANK"].encode()
        os.write(1, b"out " + rank + b" \xff\n" + rank * 300_000)
        os.write(2, b"\r 10%\r 20%\n")
    """
    done = ringrun("-np", 3, "--output-filename", "kept/here", "--ranks", "0-1", "--fold", *script(source))
    assert done.returncode == 0
    assert set(unfold(done.stdout)) == {0, 1}
    assert unfold(done.stderr) == {rank: [" 20%"] for rank in range(2)}
    for rank in range(3):  # rank 2 is hidden, but kept
        folder = tmp_path / "kept" / "here" / f"rank.{rank}"
        assert (folder / "stdout").read_bytes() == b"out %d \xff\n" % rank + b"%d" % rank * 300_000
        assert (folder / "stderr").read_bytes() == b"\r 10%\r 20%\n"


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(ringrun, tmp_path):
    (tmp_path / "file").write_text("")
    done = ringrun("-np", 2, "--output-filename", "file/x", "touch", "made here", returncode=2)
    where = "file/x/rank.0 cannot be made or written: Not a directory"
    assert done.stderr == (
        f"ringrun: error: --output-filename file/x: {where}; give a folder that this user can write to\n"
    )
    assert not (tmp_path / "made here").exists()


def test_a_disk_that_is_full_does_not_end_the_job(ringrun, tmp_path, script):
    (tmp_path / "rank.1").mkdir()
    (tmp_path / "rank.1" / "stdout").symlink_to("/dev/full")
    done = ringrun("-np", 2, "--output-filename", tmp_path, *script("for count in range(5): print(count)"))
    assert done.returncode == 0
    assert by_rank(done.stdout) == {rank: list("01234") for rank in range(2)}
    where = tmp_path / "rank.1" / "stdout"
    assert done.stderr == (
        f"ringrun: {where} cannot be written any more: No space left on device; it ends here, but the job continues\n"
    )
    assert (tmp_path / "rank.0" / "stdout").read_text() == "0\n1\n2\n3\n4\n"


def test_a_job_that_takes_too_long_is_ended_and_a_rank_may_save_its_state(ringrun, grace, wait_until_gone, script):
    source = """
        import os, signal, sys, time
        rank = int(os.environ["RANK"])
        if rank == 2:
            signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(5)))
        if rank == 3:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up")
        time.sleep(0 if rank == 1 else 60)
    """
    begin_s = time.monotonic()
    limit_s = round(patient(2))
    done = ringrun("-np", 4, "--timeout", limit_s, *grace, *script(source), returncode=124)
    assert limit_s <= time.monotonic() - begin_s < limit_s + patient(6.0)
    assert by_rank(done.stdout) == {0: ["up"], 1: ["up"], 2: ["up", "saved"], 3: ["up"]}
    here = f"on {os.uname().nodename}: script.py:9, in <module>: time.sleep(0 if rank == 1 else 60)"
    assert done.stderr.splitlines()[0] == f"ranks 0,2-3 of 4 {here}"
    assert done.stderr.endswith(
        f"\nringrun: the job ran longer than --timeout {limit_s} s and was ended; ranks 0,2-3 of 4 were still running\n"
    )
    assert "Traceback" not in done.stderr
    wait_until_gone()


@pytest.mark.parametrize("timeout", ["30", "1e300"])
def test_a_job_in_time_is_left_alone(timeout, ringrun, python):
    done = ringrun("-np", 2, "--timeout", timeout, python, "-c", "raise SystemExit(7)", returncode=7)
    assert "--timeout" not in done.stderr


def test_the_time_may_be_over_before_any_rank_has_started(ringrun, wait_until_gone, tmp_path):
    done = ringrun("-np", 2, "--timeout", "0.001", "touch", tmp_path / "made here", returncode=124)
    assert "ranks 0-1 of 2 had not started\n" in done.stderr
    wait_until_gone()
