"""ringrun join on four hosts that nobody can log in to: on each platform's variables, on both MPIs, and what fails."""

import contextlib
import os
import re
import signal
import subprocess

import pytest

from tests.support.cluster.hosts import PROGRAMS
from tests.support.patience import wait_until
from tests.support.tiers import extended

STEPS, WHERE, TRAINS = (PROGRAMS / f"{name}.py" for name in ("steps", "where", "trains"))
ADDRESSES = "\n".join(f"10.77.0.{k}" for k in range(1, 5))

PLATFORMS = {
    "torchrun": lambda k: {"NNODES": "4", "NODE_RANK": str(k), "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
    "by hand": lambda _: {},
    "trainer": lambda k: {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(k),
        "JOB_COMPLETION_INDEX": str(k),
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
    },
    "jobset": lambda k: {"JOB_COMPLETION_INDEX": str(k), "NNODES": "4", "MASTER_ADDR": "a-workers-0-0.a"},
    "batch": lambda k: {
        "AWS_BATCH_JOB_NODE_INDEX": str(k),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        "AWS_BATCH_JOB_NUM_NODES": "4",
        **({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.77.0.1"} if k else {}),
    },
    "sagemaker": lambda k: {"SM_HOSTS": '["algo-1","algo-2","algo-3","algo-4"]', "SM_CURRENT_HOST": f"algo-{k + 1}"},
    "skypilot": lambda k: {
        "SKYPILOT_NODE_IPS": ADDRESSES,
        "SKYPILOT_NODE_RANK": str(k),
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    },
    "slurm": lambda k: {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[0-3]",
        "SLURM_NNODES": "4",
        "SLURM_NODEID": str(k),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "node[0-3]",
        "SLURM_PROCID": str(k),
        "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "1(x4)",
        "SLURM_JOBID": "4711",
        "SLURM_NODELIST": "node[0-3]",
    },
}


OWN = {
    "trainer": "JOB_COMPLETION_INDEX",
    "jobset": "JOB_COMPLETION_INDEX",
    "batch": "AWS_BATCH_JOB_NODE_INDEX",
    "sagemaker": "SM_CURRENT_HOST",
    "skypilot": "SKYPILOT_NODE_RANK",
}
"""What a rank still finds of its node's number; no rank is a node of torchrun's or a task of Slurm's."""


@pytest.fixture
def join(nodes, python):
    """join(ARGUMENTS): the same command on each node, as a platform starts it; returns the processes."""
    key = nodes.folder / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)

    def start(*arguments, platform="torchrun", only=range(4), python=python):
        head = ["10.77.0.1:1234", "--nodes", 4] if platform == "by hand" else []
        command = [python.parent / "ringrun", "join", *head, "--key-file", key, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return [nodes.start(k, command, env=PLATFORMS[platform](k), **pipes) for k in only]

    return start


def ends(jobs):
    """How each node has ended; what the head has written."""
    written = [job.communicate(timeout=90) for job in jobs]
    return [job.returncode for job in jobs], *written[0], "\n".join(err for _, err in written[1:])


@pytest.mark.parametrize(
    "platform", [each if each == "torchrun" else pytest.param(each, marks=extended) for each in PLATFORMS]
)
@pytest.mark.adapters
def test_a_platform_s_nodes_are_one_job(platform, join, nodes, python):
    shown = [WHERE, "MASTER_ADDR", OWN.get(platform, "NODE_RANK")]
    codes, out, err, _ = ends(join("-np", 4, "--slots-per-host", 1, python, *shown, platform=platform))
    assert codes == [0] * 4, err
    places = sorted(out.splitlines())
    own = [PLATFORMS[platform](k).get(OWN.get(platform)) for k in range(4)]
    assert places == [f"[{k}] {k} h{k} 0 1 {k} 4 4 9990.0 10.77.0.1 {own[k]}" for k in range(4)]
    nodes.assert_nothing_is_left()


def test_a_rank_that_fails_ends_all_nodes_with_its_code(join, nodes, python):
    codes, _, err, others = ends(join("-np", 4, "--slots-per-host", 1, python, STEPS, 0, "exit"))
    assert codes == [7] * 4
    assert "-- ringrun: rank 2 of 4 failed" in err
    assert re.search(r"where +host h2, pid", err)
    assert "error" not in others
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_head_ends_all_nodes(number, join, nodes, python):
    jobs = join("-np", 4, "--slots-per-host", 1, python, STEPS, 0, "go on")
    wait_until(lambda: (nodes.folder / "training").exists(), within_s=60)
    jobs[0].send_signal(number)
    codes, _, err, _ = ends(jobs)
    assert codes == [128 + number] * 4, err
    nodes.assert_nothing_is_left()


def test_a_head_that_is_killed(join, nodes, python):
    jobs = join("-np", 4, "--slots-per-host", 1, python, STEPS, 0, "go on")
    wait_until(lambda: (nodes.folder / "training").exists(), within_s=60)
    jobs[0].send_signal(signal.SIGKILL)
    codes, _, _, others = ends(jobs)
    assert codes[1:] == [1] * 3
    assert others.count("ringrun: error: ringrun on the head ended without a message") == 3
    nodes.wait_until_gone(within_s=30)


def test_a_signal_while_nodes_are_awaited(join, nodes, python):
    jobs = join(python, WHERE, only=[0, 1])
    wait_until(lambda: len(nodes.processes(0)) == 2 and nodes.processes(1))
    said = jobs[1].stderr.readline()
    assert said == "ringrun: h1 has joined the job of node0\n"
    jobs[0].send_signal(signal.SIGTERM)
    codes, _, err, _ = ends(jobs)
    assert codes == [143, 143], err
    nodes.assert_nothing_is_left()


def test_a_node_that_does_not_come(join, nodes, python):
    codes, _, err, _ = ends(join("--join-timeout", 4, python, WHERE, only=[0, 1, 3]))
    assert codes == [3] * 3
    assert "ringrun: 3 of 4 nodes have joined, waiting for node 2\n" in err
    assert "3 of 4 nodes have joined within 4 s; see what ringrun has written on the others" in err
    nodes.assert_nothing_is_left()


def trains(nodes, jobs):
    def look():
        assert jobs[0].poll() is None, jobs[0].communicate()
        return (nodes.folder / "trains").exists()

    wait_until(look, within_s=60)


ELASTIC = ["--elastic", "--slots-per-host", 1, "--lost-after", 4, "--stall-abort-s", 20]


def test_a_node_that_goes_is_a_loss(join, nodes, python):
    jobs = join(*ELASTIC, python, TRAINS)
    trains(nodes, jobs)
    for pid in nodes.processes(3):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    codes, out, err, _ = ends(jobs)
    assert codes == [0, 0, 0, -signal.SIGKILL], err
    assert sorted(out.splitlines()) == [f"[{rank}] ended with 3 True" for rank in range(3)]
    assert "-- ringrun: rank 3 of 4 failed --" in err
    nodes.wait_until_gone()


def test_a_node_that_is_told_to_go_ends_what_runs_there(join, nodes, python):
    """As a pod that is evicted: its first process gets SIGTERM, and the ranks there do not."""
    jobs = join(*ELASTIC, python, TRAINS)
    trains(nodes, jobs)
    jobs[3].send_signal(signal.SIGTERM)
    codes, out, err, _ = ends(jobs)
    assert codes == [0, 0, 0, 128 + signal.SIGTERM], err
    assert sorted(out.splitlines()) == [f"[{rank}] ended with 3 True" for rank in range(3)]
    nodes.wait_until_gone()


@pytest.mark.parametrize("first", [1, 3])
def test_a_node_that_joins_later_is_a_new_host(first, join, nodes, python):
    """Also where the head has begun alone, and knows only then at which of its addresses others reach it."""
    script = nodes.folder / "grows.py"
    script.write_text(GROWS.replace("SIZE", str(first + 1)))
    flags = ["--elastic", "--join-timeout", 2, "--slots-per-host", 1]
    jobs = join(*flags, python, script, only=range(first))
    wait_until(lambda: (nodes.folder / "trains").exists(), within_s=60)
    jobs += join(*flags, python, script, only=[first])
    codes, out, err, _ = ends(jobs)
    assert codes == [0] * (first + 1), err
    assert sorted(out.splitlines()) == [f"[{rank}] of {first + 1}" for rank in range(first + 1)]
    came = f"ringrun: h{first}:1 joined; after its next commit the job starts again"
    assert f"{came}, with {first + 1} ranks instead of {first}\n" in err
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("elastic", [True, False])
def test_a_node_whose_ringrun_is_killed_takes_its_ranks_with_it(elastic, join, nodes, python):
    """`kill -9` of `ringrun join` alone: the agents there still reach the head, and would train on."""
    jobs = join(*(ELASTIC if elastic else ["-np", 4, "--slots-per-host", 1]), python, TRAINS)
    trains(nodes, jobs)
    jobs[3].send_signal(signal.SIGKILL)
    codes, out, err, _ = ends(jobs)
    assert codes == [1 - elastic] * 3 + [-signal.SIGKILL], err
    assert sorted(out.splitlines()) == ([f"[{rank}] ended with 3 True" for rank in range(3)] if elastic else [])
    assert re.search(
        r"-- ringrun: rank 3 of 4 failed .*\nhow +`ringrun join` has ended on host h3, which has left", err
    )
    assert re.search(r"\nwhere +host h3, pid", err)
    nodes.wait_until_gone()


@pytest.fixture
def lend(nodes, join, python):
    """lend(K, SLOTS, …): host K lends so many slots, a process for each; `head(…)`: h0 is a head without ranks."""

    def start(k, *slots, **variables):
        where = [python.parent / "ringrun", "join", "10.77.0.1:1234", "--key-file", nodes.folder / "key"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": variables}
        return [nodes.start(k, [*where, "--lend", each], **options) for each in slots]

    def head(*arguments):
        where = [python.parent / "ringrun", "join", "10.77.0.1:1234", "--lend", 0, "--key-file", nodes.folder / "key"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return nodes.start(0, [*where, *arguments], **pipes, env={"OF": "the head", "TO_ALL": "sent"})

    start.head = head
    return start


@pytest.mark.adapters
def test_a_head_without_ranks_and_hosts_that_are_lent_in_parts(lend, nodes, python):
    """The head's own host, too; they keep their own variables."""
    jobs = [lend.head("-np", 5, "--env", "TO_ALL", python, WHERE, "OF", "TO_ALL")]
    jobs += [*lend(1, 1, 1, OF="h1"), *lend(2, 2, OF="h2"), *lend(0, 1, OF="h0")]
    codes, out, err, _ = ends(jobs)
    assert codes == [0] * 5, err
    places = [("h0", 0, 1), ("h1", 0, 2), ("h1", 1, 2), ("h2", 0, 2), ("h2", 1, 2)]
    crossing = [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2)]
    assert sorted(out.splitlines()) == [
        f"[{rank}] {rank} {host} {local} {of} {number} {count} 5 14985.0 {host} sent"
        for rank, ((host, local, of), (number, count)) in enumerate(zip(places, crossing, strict=True))
    ]
    nodes.assert_nothing_is_left()


@pytest.mark.parametrize("first", [True, False])
def test_a_lender_that_is_killed_takes_its_ranks_along(first, lend, nodes, python):
    """The first of a host, all of those there; another one, its own."""
    head = lend.head("-np", 4, *ELASTIC, python, TRAINS)
    jobs = [head, *lend(1, 2), *(begun := lend(2, 1))]
    wait_until(lambda: "joined" in begun[0].stderr.readline())
    jobs += (more := lend(2, 1))
    trains(nodes, jobs)
    (begun if first else more)[0].send_signal(signal.SIGKILL)
    codes, out, err, _ = ends(jobs)
    left = [0, 1] if first else [0, 1, 2]
    assert codes[0] == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] ended with {len(left)} True" for rank in left]
    nodes.wait_until_gone()


def test_a_head_that_fails_tells_its_lenders_at_once(lend, nodes, python):
    jobs = [*lend(1, 1), lend.head("-np", 1, "no-such-command")]
    codes, *_ = ends(jobs[::-1])
    assert codes == [2, 2]
    nodes.assert_nothing_is_left()


def test_a_node_that_comes_after_the_head_has_failed_is_told(join, nodes, python):
    jobs = join("--network-interfaces", "nosuch0", python, WHERE, only=[0])
    jobs += join(python, WHERE, only=[1, 2, 3])
    codes, _, err, others = ends(jobs)
    assert codes == [2] * 4
    assert "there is no interface 'nosuch0' here" in err
    assert others.count("ringrun: error: the job ended before this node joined; see what ringrun has written") == 3
    nodes.assert_nothing_is_left()


GROWS = """
import time
from pathlib import Path

import numpy as np

import ringreduce as rr

rr.init()
state = rr.elastic.ObjectState(step=0)


@rr.elastic.run
def train(state):
    while rr.size() < SIZE:
        rr.allreduce(np.ones(3), name="gradient")
        state.step += 1
        state.commit()
        Path("trains").touch()
        time.sleep(0.05)


train(state)
print("of", rr.size())
"""
