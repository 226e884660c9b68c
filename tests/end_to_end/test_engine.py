"""The engine in real processes: how it ends, what it does beside other threads, forks and MPI calls, and stalls."""

import re
import sys
from pathlib import Path

import pytest

from ringreduce.runtime import lifecycle
from tests.end_to_end.conftest import ringrun
from tests.support.jobs import ROOT
from tests.support.tiers import extended, parted

pytestmark = pytest.mark.timeout(600)  # the first use makes the environment for MPICH
HEAD = (
    "import _socket, os, signal, socket, sys, threading, time\nimport numpy as np\nimport ringreduce as rr\nrr.init()\n"
)
TOTAL = "print('total', rr.allreduce(1.0, op=rr.Sum))\n"


@pytest.fixture
def finished(script):
    """Runs a script on ranks; returns the finished ringrun."""

    def run(body, python=None, ranks=3, **variables):
        return ringrun(python or Path(sys.executable), ranks, script(HEAD + body), timeout_s=60, **variables)

    return run


def test_a_world_can_be_left_and_entered_while_others_wait(finished, python):
    done = finished(
        "for turn in range(3):\n"
        "    if rr.rank() != turn:\n"
        "        try:\n"
        "            rr.allreduce(np.ones(3), name='w')\n"
        "        except rr.PeerLostError as error:\n"
        "            assert error.lost_ranks == (turn,), error\n"
        "        else:\n"
        "            sys.exit('nobody noticed')\n"
        "    rr.shutdown()\n"
        "    rr.init()\n" + TOTAL,
        python,
    )
    assert (done.returncode, done.stdout.count("total 3.0")) == (0, 3), done.stdout


@pytest.mark.adapters
def test_what_was_handed_in_and_never_waited_for_hangs_nobody_at_exit(finished, python):
    # the pause: a rank that hands something in after another has left is told so, which is not tested here
    handed_in = "for k in range(20):\n    rr.allreduce_async(np.ones(1000), name=f'{rr.rank()}.{k}')\ntime.sleep(1)\n"
    done = finished(handed_in, python)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


CHILDREN = parted(
    ["print('child:', tell())", "raise ValueError('in the child')", "sys.exit(5)"], lambda child: "raise" in child
)


@pytest.mark.adapters
@pytest.mark.parametrize("child", CHILDREN)
def test_a_forked_child_is_no_rank_and_ends_alone(finished, child):
    done = finished(
        "def tell():\n"
        "    try:\n"
        "        rr.allreduce(1.0)\n"
        "    except ValueError as error:\n"
        "        return error\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    {child}\n"
        "    sys.exit(0)\n"
        "print('child ended with', os.waitpid(pid, 0)[1] >> 8)\n" + TOTAL
    )
    assert (done.returncode, done.stdout.count("total 3.0")) == (0, 3), done.stdout
    code = {"p": 0, "r": 1, "s": 5}[child[0]]
    assert done.stdout.count(f"child ended with {code}") == 3
    if code == 0:
        assert "child: allreduce(): ringreduce has not been initialized; this process was forked from rank 1" in (
            done.stdout
        )


def test_data_loaders_of_torch_that_fork(finished):
    done = finished(
        "import torch\n"
        "import subprocess; subprocess.run(['true']); print('no fork')\n"
        "loader = torch.utils.data.DataLoader(torch.arange(20.0) * (1 + rr.rank()), batch_size=5, num_workers=2)\n"
        "print('sum', sum(float(rr.allreduce(batch.sum(), op=rr.Sum)) for batch in loader))\n",
        ranks=2,
    )
    assert (done.returncode, done.stdout.count("sum 570.0")) == (0, 2), done.stdout
    registers = any(map(lifecycle._has_entries, lifecycle._REGISTERING_CARDS))
    assert done.stdout.count(lifecycle.FORK_WARNING) == registers, "once, and only where a card registers memory"


def test_beside_the_users_own_mpi_and_threads(finished, python):
    done = finished(
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "def work(thread):\n"
        "    for step in range(100):\n"
        "        total = rr.allreduce(np.full(10, thread + step + rr.rank()), name=f'thread {thread}', op=rr.Sum)\n"
        "        assert total[0] == 3 * (thread + step) + 3, total\n"
        "threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "for step in range(100):\n"
        "    assert world.allreduce(world.rank + step) == 3 * step + 3\n"
        "[thread.join() for thread in threads]\n" + TOTAL,
        python,
    )
    assert (done.returncode, done.stdout.count("total 3.0")) == (0, 3), done.stdout
    assert "Traceback" not in done.stdout


BREAK = """
from ringreduce.execution import operations
def broken(requests, context):
    raise MemoryError('no room')
    yield
if rr.rank() == 1:
    operations.OPERATIONS['allreduce'] = broken
"""


def test_a_traceback_of_the_engine_comes_once_and_in_the_report(finished):
    done = finished(f"{BREAK}rr.allreduce(np.ones(1000), name='w')\n", ranks=2)
    own, report = done.stdout.split("-- ringrun: rank 1 of 2 failed first ")
    for each in own, report:
        assert each.count("    raise MemoryError('no room')\n") == 1, done.stdout


def test_an_engine_that_fails_is_told_on_all_ranks(finished, python):
    done = finished(
        f"{BREAK}try:\n"
        "    rr.allreduce(np.ones(1000), name='w')\n"
        "except rr.HorovodInternalError as error:\n"
        "    print(type(error).__name__, error, flush=True)\n"
        "    time.sleep(1)\n"
        "    sys.exit(3)\n",
        python,
        returncode=3,
    )
    told = r"rank 1 of 3 failed inside an operation: MemoryError: no room"
    assert len(re.findall(f"PeerLostError {told}", done.stdout)) == 2, done.stdout
    assert re.search(f"CollectiveError {told}", done.stdout), done.stdout


STALL = """
def sendto(own, *args):
    if own.family != socket.AF_UNIX:
        raise PermissionError("a firewall lets no UDP pass")
    return _socket.socket.sendto(own, *args)
socket.socket.sendto = sendto
def load_data():
    {how}
if rr.rank() == {rank}:
    load_data()
rr.allreduce(np.ones((3, 4), np.float32), name='layer3.w')
"""
SLEEP = "time.sleep(4)"
STOP = "os.system(f'(sleep 5; kill -CONT {os.getpid()}) > /dev/null 2>&1 &')\n    os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.adapters
@pytest.mark.parametrize("rank", [pytest.param(0, marks=extended), 2])
def test_a_rank_that_does_something_else_is_named_with_its_stack(finished, python, rank):
    done = finished(STALL.format(how=SLEEP, rank=rank), python, RINGREDUCE_STALL_CHECK_S="1", returncode=0)
    others = "1-2" if rank == 0 else "0-1"
    assert re.search(
        r"ringrun: the job is stalled; rank 0 says: allreduce 'layer3.w' \(float32\[3, 4\]\): waiting for \d s; "
        rf"submitted by ranks {others} \(train.py:15\); missing: rank {rank}\. All ranks must submit it\n"
        rf"rank {rank} has submitted nothing yet\n",
        done.stdout,
    ), done.stdout
    for line in (
        rf"\nrank {rank} of 3 on \S+: train.py:12, in load_data: time.sleep\(4\)\n",
        r"line 12, in load_data\n    time.sleep\(4\)",
        rf"\nranks {others} of 3 on \S+: allreduce 'layer3.w' \(train.py:15\)\n",
    ):
        assert re.search(line, done.stdout), done.stdout


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (1, r"\nrank 1 does not answer: it is stopped, or in C code that holds the GIL"),
        (0, r"stalled; rank [12] says: rank [12] has waited for \d s; rank 0, the coordinator, does not answer"),
    ],
)
def test_a_rank_that_is_stopped_is_told(finished, rank, message):
    done = finished(STALL.format(how=STOP, rank=rank), RINGREDUCE_STALL_CHECK_S="0.5", returncode=0)
    assert re.search(message, done.stdout), done.stdout
    assert re.search(rf"\nrank {rank} of 3 on \S+: it is stopped \(by SIGSTOP, Ctrl-Z or a debugger\)", done.stdout)


STOPPED = ROOT / "tests" / "elastic" / "programs" / "stopped.py"
MUTE = "stopped, or in C code that holds the GIL"


MUTE_IN_LEAVING = rf"has waited in shutdown\(\) for \d+ s; a rank that has called it, too, is {MUTE}"
MUTE_BEFORE = rf"rank 0 has waited in shutdown\(\) for \d+ s for rank 1\nrank 1 does not answer: it is {MUTE}"


@pytest.mark.parametrize(
    ("rank", "early", "message"),
    [
        (1, [], MUTE_IN_LEAVING),
        (0, [], r"rank 0, the coordinator, does not answer"),
        (1, ["early"], MUTE_BEFORE),
    ],
)
def test_a_rank_that_is_stopped_does_not_keep_those_that_leave(tmp_path, rank, early, message):
    variables = {"RINGREDUCE_STALL_CHECK_S": "1", "RINGREDUCE_STALL_ABORT_S": "4"}
    done = ringrun(Path(sys.executable), 3, STOPPED, rank, *early, cwd=tmp_path, returncode=1, **variables)
    assert re.search(message, done.stdout), done.stdout
    assert re.search(rf"\nrank {rank} of 3 on \S+: it is stopped \(by SIGSTOP, Ctrl-Z or a debugger\)", done.stdout)


def test_a_stop_in_the_middle_of_an_operation_is_told(finished):
    done = finished(
        "big = np.ones(20_000_000)\n"
        "if rr.rank() == 1:\n"
        "    def stop():\n"
        f"        {STOP.replace(chr(10), chr(10) + '    ')}\n"
        "    threading.Timer(0.15, stop).start()\n"
        "for step in range(5):\n"
        "    rr.allreduce_(big, name='big{0}', op=rr.Max)\n",
        RINGREDUCE_STALL_CHECK_S="0.5",
        returncode=0,
    )
    assert re.search(
        r"rank 0 says: allreduce 'big\{0\}' \(\S+:\d+\) is under way, but has not moved for \d s; "
        r"rank 0 waits for rank [12]\n(.*\n)*rank 1 does not answer: it is stopped",
        done.stdout,
    ), done.stdout
