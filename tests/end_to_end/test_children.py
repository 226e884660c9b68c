"""Child processes of a rank: none of them joins the job in its place, whoever started it."""

import pytest

from tests.end_to_end.conftest import run
from tests.support import tiers

SIZE = 2
SCRIPT = """
import multiprocessing, os, pickle, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
import ringreduce as rr

rr.init()

def square(x):
    return x * x

def refused(how):
    with ProcessPoolExecutor(1, multiprocessing.get_context(how)) as pool:
        try:
            pool.submit(square, 3).result()
        except Exception as error:
            return type(error).__name__

if __name__ == "__main__":
    print("spawn", refused("spawn"), "forkserver", refused("forkserver"))
    own = "import ringreduce as rr; rr.init(); print('sum', rr.allreduce(1.0, op=rr.Sum))"
    child = subprocess.run([sys.executable, "-c", own], capture_output=True, text=True)
    print("child", child.returncode, child.stderr.splitlines()[-1])
    if rr.rank() == 1:
        ringrun = os.path.join(os.path.dirname(sys.executable), "ringrun")
        inside = subprocess.run([ringrun, "-np", "2", sys.executable, "-c", own], capture_output=True, text=True)
        print("inside", inside.returncode, sorted(inside.stdout.split()))
    pid = os.fork()
    if pid == 0:
        try:
            rr.allreduce(1.0)
        except rr.NotInitializedError as error:
            again = type(error)(str(pickle.loads(pickle.dumps(error))))  # as torch's DataLoader makes it again
            place = rr.rank(), rr.size(), rr.local_rank(), rr.cross_size(), rr.global_process_set.included()
            print("forked", *place, again)
        try:
            rr.init()
        except rr.StartupError as error:
            print("forked", error)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    print("total", rr.allreduce(1.0, op=rr.Sum))
"""


@pytest.mark.parametrize(
    ("launcher", "python"),
    [("mpirun", "openmpi"), pytest.param("ringrun", "mpich", marks=tiers.extended)],
    indirect=["python"],
)
def test_no_child_of_a_rank_joins_in_its_place(tmp_path, script, python, launcher):
    wrapped = tmp_path / "start.sh"
    wrapped.write_text(
        f"env OMP_NUM_THREADS=1 {python} {script(SCRIPT)}\n"
    )  # a rank is no child of the launcher's, either
    flags = ["--allow-run-as-root", "--oversubscribe"] if launcher == "mpirun" else []
    done = run([python.parent / launcher, *flags, "-np", str(SIZE), "bash", wrapped])
    told = done.stdout
    assert done.returncode == 0, told
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
