"""Child processes of a rank: none of them joins the job in its place, whoever started it."""

import pytest

from tests.end_to_end.conftest import PROGRAMS, run
from tests.support import tiers

SIZE = 2


@pytest.mark.parametrize(
    ("launcher", "python"),
    [("mpirun", "openmpi"), pytest.param("ringrun", "mpich", marks=tiers.extended)],
    indirect=["python"],
)
def test_no_child_of_a_rank_joins_in_its_place(tmp_path, python, launcher):
    wrapped = tmp_path / "start.sh"
    # a rank is no child of the launcher's, either
    wrapped.write_text(f"env OMP_NUM_THREADS=1 {python} {PROGRAMS / 'children.py'}\n")
    flags = ["--allow-run-as-root", "--oversubscribe"] if launcher == "mpirun" else []
    told = run([python.parent / launcher, *flags, "-np", str(SIZE), "bash", wrapped], returncode=0).stdout
    assert told.count("spawn BrokenProcessPool forkserver BrokenProcessPool") == SIZE, told
    for rank in range(SIZE):
        text = f"this process was started by rank {rank} and is not a rank itself; put init() under `if __name__"
        assert told.count(text) >= 4, told  # spawn, forkserver, a script of its own, a forked child
        assert f"child 1 ringreduce.errors.StartupError: init(): {text}" in told, told
        assert (
            f"forked {rank} {SIZE} {rank} 1 True allreduce(): ringreduce has not been initialized; this process "
            in told
        )
    assert told.count("total 2.0") == SIZE, told
    assert told.count("inside 0 ['2.0', '2.0', '[0]', '[1]', 'sum', 'sum']") == 1, told
    assert "OSC UCX" not in told, "two lines of Open MPI's that say nothing to anybody"
