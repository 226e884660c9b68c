"""What belongs to a world that ends with a loss: what lives on, and what says that it cannot."""

import json
import re

import pytest

from tests.support import jobs

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import os, signal
import numpy as np
import ringreduce as rr

together, lost = rr.ProcessSet([0, 2]), rr.ProcessSet([0, 1])
rr.init(process_sets=[together, lost])
state = rr.elastic.ObjectState(step=0)
channels = []

def refused(function):
    try:
        function()
    except ValueError as error:
        return str(error)

@rr.elastic.run
def train(state):
    channels.append(rr.ordered())
    while state.step < 6:
        channels[-1].allreduce(np.ones(3))
        if together.included():
            assert rr.allreduce(np.ones(2), op=rr.Sum, process_set=together)[0] == 2
        state.step += 1
        state.commit()
        if state.step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
print("together", together.included(), together.rank(), together.size())
print("lost", refused(lambda: rr.allreduce(np.ones(2), process_set=lost)))
if len(channels) == 2:
    print("channel", refused(lambda: channels[0].allreduce(np.ones(2))))
"""


@pytest.mark.timeout(120)
def test_what_lives_on_and_what_says_that_it_cannot(python, tmp_path):
    script, timeline = tmp_path / "train.py", tmp_path / "times.json"
    script.write_text(PROGRAM)
    flags = ["--elastic", "-np", 3, "--spares", 1, "--timeline", timeline]
    done = jobs.run([jobs.ringrun(python), *flags, python, script], timeout_s=60)
    assert done.returncode == 0, done.stderr
    said = set(done.stdout.splitlines())
    assert {line for line in said if "together" in line} == {
        "[0] together True 0 2",
        "[2] together True 1 2",
        "[3] together False None 2",
    }
    gone = "allreduce: there is no process set 2 any more: it had ranks 0-1 of the job's start, and rank 1 was killed"
    assert sum(f"lost {gone} by SIGKILL" in line for line in said) == 3
    ended = "channel allreduce: ordered(ranks=[0, 1, 2]) ended with the world of 3 ranks in which it was made"
    assert sorted(line[:3] for line in said if ended in line) == ["[0]", "[2]"]
    events = json.loads((tmp_path / "times.1.json").read_text())
    assert "rank 1 of 3 was killed by SIGKILL" in [each["name"] for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in events if "ALLREDUCE" in each["name"]} == {0, 1, 2}


LEAVES = """
import os, signal, time
import ringreduce as rr

rr.init()
if rr.rank() == 1:
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
rr.shutdown()
print("went on")
"""


def test_a_death_does_not_hold_up_those_that_call_shutdown(python, tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(LEAVES)
    done = jobs.run([jobs.ringrun(python), "--elastic", "-np", 3, python, script], timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] went on", "[2] went on"]


ORPHANED = """
import os, signal, time
import numpy as np
import ringreduce as rr

def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])

rr.init()
daemon = parent(parent(os.getppid()))  # of the MPI; it has started the parent, the anchor, of this rank's agent
rr.barrier()
if rr.rank() == 0:
    os.kill(daemon, signal.SIGKILL)
for step in range(50):
    assert rr.allreduce(np.full(3, rr.rank() + step), op=rr.Sum, name="step")[0] == 3 + 3 * step
    time.sleep(0.02)
print("ended with", rr.size())
"""


def test_ranks_outlive_the_daemon_that_has_started_them(python, tmp_path):
    """It ends, as mpirun does, when another host is lost."""
    script = tmp_path / "train.py"
    script.write_text(ORPHANED)
    done = jobs.run([jobs.ringrun(python), "--elastic", "-np", 3, python, script], timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] ended with 3" for rank in range(3)]


ABORTS = """
import os, sys, time
import numpy as np
from mpi4py import MPI
import ringreduce as rr

def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])

daemon = parent(parent(os.getppid()))  # as above
rr.init()
state = rr.elastic.ObjectState(step=0)

@rr.elastic.run
def train(state):
    if rr.rank() == 1 and rr.size() == 3:
        MPI.COMM_WORLD.Abort(5)
        time.sleep(1000)
    # under MPICH the rank may be killed before the daemon has heard from it
    awaits_end = not MPI.Get_library_version().startswith("MPICH") and os.path.exists(f"/proc/{daemon}")
    while rr.allreduce(float(rr.size() == 2 and not awaits_end)) < 1:
        awaits_end = awaits_end and os.path.exists(f"/proc/{daemon}")
        time.sleep(0.05)

train(state)
time.sleep(0.5)
print("ended with", rr.size())
"""


@pytest.mark.extended
def test_mpi_abort_ends_one_rank_and_it_is_said_who_called_it(python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ABORTS)
    flags = ["--elastic", "--stall-abort-s", 100, "-np", 3]
    done = jobs.run([jobs.ringrun(python), *flags, python, script], timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] ended with 2" for rank in (0, 2)]
    told = " ".join(done.stderr.split())
    assert "-- ringrun: rank 1 of 3 failed --" in told
    by_mpirun = (
        "mpirun has ended with exit code 5: rank 1 called MPI_Abort, which ends only that rank here; to end one,"
    )
    by_mpich = "ringrun killed it, since it called MPI_Abort: MPICH itself ends no rank of an elastic job; to end one,"
    assert by_mpirun in told or by_mpich in told


STOPPED = """
import os, signal, threading, time
import ringreduce as rr
from ringreduce import runtime

def stop():
    while not engine.negotiation.leaving:
        time.sleep(0.01)
    time.sleep(0.3)
    open("stopping", "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)

rr.init()
engine = runtime.current("this test").engine
rr.barrier()
if rr.rank() == 0:
    threading.Thread(target=stop, daemon=True).start()
if rr.rank() == 2:
    while not os.path.exists("stopping"):
        time.sleep(0.01)
    time.sleep(0.5)
rr.shutdown()
print("left")
"""


@pytest.mark.extended
def test_a_rank_that_is_stopped_in_shutdown_is_woken(python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STOPPED)
    command = [jobs.ringrun(python), "--elastic", "--stall-abort-s", 3, "--wdir", tmp_path, "-np", 3, python, script]
    done = jobs.run(command, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] left" for rank in range(3)]


LATE = """
import os, signal, sys, time
import ringreduce as rr

rr.init()
rr.barrier()
if rr.rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
elif rr.rank() == 1 - int(sys.argv[1]):
    time.sleep(7.0)  # as one that saves a checkpoint
if "ends" not in sys.argv:
    rr.shutdown()
print("left")
"""


@pytest.mark.parametrize(
    "arguments",
    [["0"], pytest.param(["1"], marks=pytest.mark.extended), pytest.param(["0", "ends"], marks=pytest.mark.extended)],
    ids=" ".join,
)
def test_of_those_that_others_await_in_shutdown_the_stopped_are_woken_and_the_busy_are_left_alone(
    python, tmp_path, arguments
):
    script = tmp_path / "train.py"
    script.write_text(LATE)
    command = [jobs.ringrun(python), "--elastic", "--stall-abort-s", 3, "-np", 3, python, script, *arguments]
    done = jobs.run(command, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] left" for rank in range(3)]
    woken = re.findall(r"ringrun: rank (\d) of 3 on host \S+, pid \d+, was stopped while", done.stderr)
    assert woken == [arguments[0]], done.stderr
    assert "-- ringrun" not in done.stderr


JOINS = """
import os, signal, sys
import numpy as np
import ringreduce as rr

rr.init()
rank, sums = int(os.environ["RANK"]), {}  # of each rank, so no part of the state

@rr.elastic.run
def train(state):
    while state.step < 6:  # rank 0 has one batch less than the others, and joins while they use their last one
        if rank == 1 and state.step == 3 and rr.size() == 4:
            if sys.argv[1] == "joined":
                rr.join()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank:
            sums[state.step] = float(rr.allreduce(np.ones(1), op=rr.Sum, name="batch")[0])
        last = rr.join()
        state.step += 1
        state.commit()
    print("last", last > 0, "sums", list(sums.values()))

train(rr.elastic.ObjectState(step=0))
"""


@pytest.mark.parametrize("when", ["joined", "before"])
def test_join_goes_on_with_those_that_are_left(python, tmp_path, when):
    script = tmp_path / "train.py"
    script.write_text(JOINS)
    done = jobs.run([jobs.ringrun(python), "--elastic", "-np", 4, python, script, when], timeout_s=60)
    assert done.returncode == 0, done.stderr
    trained = "last True sums [3.0, 3.0, 3.0, 2.0, 2.0, 2.0]"
    assert sorted(done.stdout.splitlines()) == ["[0] last True sums []", f"[2] {trained}", f"[3] {trained}"]


SWEEPS = """
import os, signal, sys, time
import numpy as np
import ringreduce as rr

tried = []

def objective(trial):
    rate, team = trial.suggest_float("rate", 0.1, 1), trial.process_set
    tried.append(trial.number)
    for step in range(10):
        found = rr.allreduce(np.full(3, rate), name="w", process_set=team)
        if len(tried) == 2 and step == 5 and os.environ["RANK"] == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    return float(found[0])

rr.init()
search = rr.elastic.run(lambda state: rr.sweep(objective, trials=9, ranks=int(sys.argv[3]), storage=sys.argv[1]))
found = search(rr.elastic.ObjectState())
print("ranks", rr.size(), "trials", [each.number for each in found.trials], {each.state for each in found.trials})
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_sweep_goes_on_with_the_teams_that_are_left(python, tmp_path, victim):
    script = tmp_path / "search.py"
    script.write_text(SWEEPS)
    rank = [python, script, tmp_path / "study.journal", victim, 1]
    done = jobs.run([jobs.ringrun(python), "--elastic", "-np", 3, *rank], timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:3] for line in lines] == [f"[{rank}]" for rank in range(3) if rank != victim]
    assert all(line.endswith("{'complete'}") and line[3:].startswith(" ranks 2 trials [0, 1, 2, ") for line in lines)


def test_a_sweep_says_that_no_teams_can_be_made_of_the_ranks_that_are_left(python, tmp_path):
    script = tmp_path / "search.py"
    script.write_text(SWEEPS)
    rank = [python, script, tmp_path / "study.journal", 3, 2]
    done = jobs.run([jobs.ringrun(python), "--elastic", "-np", 4, *rank], timeout_s=90)
    assert done.returncode != 0
    assert "sweep: teams of ranks=2 ranks cannot be made of 3; expected a divisor of 3" in done.stderr
