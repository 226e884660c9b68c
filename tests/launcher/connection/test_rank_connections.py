"""The connections of a job's ranks at ringrun's end, without processes: who is let in, how many, what is no message."""

import contextlib
import os
import queue
import resource
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringrun.connection import wire
from ringrun.connection.frames import HEAD_BYTES
from ringrun.connection.link import Link, connect
from ringrun.connection.listener import Listener
from ringrun.connection.wire import Answer, Died, Ended, Hello, Input, InputWanted, Note, Setup, Started, Taken
from ringrun.connection.wire import Output as Says
from ringrun.errors import MachineError
from ringrun.hosts import Host, Machine, Machines
from ringrun.job.events import Arrived, Deaf, RankDied, RankEnded, Refused, Reported
from ringrun.job.plan import Job
from ringrun.job.ranks import Agents, RankSetup
from ringrun.output.display import Output
from ringrun.processes import raise_open_files
from tests.support.patience import patient, wait_until

Come = Callable[[Hello], Link]
SIZE = 4
NAMES = [f"h{rank}" for rank in range(SIZE)]
JOB = Job(
    SIZE,
    ["true"],
    hosts=[(Host(name), 1) for name in NAMES],
    machines=Machines({name: Machine(name) for name in NAMES}),
)


@pytest.fixture
def events():
    return queue.SimpleQueue()


@pytest.fixture
def agents(tmp_path, events):
    listener = Listener(str(tmp_path), ["127.0.0.1"], SIZE)
    setup = RankSetup(folder="/work", local={"A": "b"})
    made = Agents(listener, JOB, setup, Output(SIZE, {}), events)
    made.start()
    links = []

    def come(hello):
        """Return the connection of an agent that says hello, or of one in whose place another does."""
        link = connect(listener.address, listener.authkey)
        links.append(link)
        link.send(hello) if hello else link._socket.sendall(bytes(HEAD_BYTES))
        return link

    yield made, come
    for link in links:  # first: it waits a second for those that are there
        link.close()
    made.close()


def hello(rank, size=SIZE, host=""):
    return Hello(rank, size, 0, 1, host or f"h{rank}", 2345)


NO_MESSAGE = "a message that ringrun does not understand: b"


@pytest.mark.parametrize(
    ("sent", "times", "why"),
    [
        (b"j[1, 2]x", 1, NO_MESSAGE),
        (b'j{"kind": "Started"}', 1, NO_MESSAGE),
        (b"", 1, NO_MESSAGE),
        (b"eX", 2, "message 3 of this connection was changed"),
        (wire.encode(Setup(("x",), "h", 1, "/", {}, gives_stdin=False)), 1, "an agent does not send Setup"),
    ],
)
def test_what_no_agent_sends_is_the_end_of_that_rank_and_says_why(agents, events, sent, times, why):
    link = agents[1](hello(0))
    assert events.get(timeout=10) == Arrived(0, "h0", 2345)
    link.send(Started(4711))
    link._socket.sendall(link._writer.frame(sent) * times)
    ended = events.get(timeout=10)
    assert isinstance(ended, RankEnded)
    assert ended.end.failed
    assert (ended.end.rank, ended.end.pid) == (0, 4711)
    assert ended.end.lost.startswith(f"its connection is broken: {why}")
    assert agents[0].gone == {0}
    with pytest.raises((EOFError, OSError)):
        link.receive()  # the agent sees it, and ends its rank


def test_a_rank_that_is_cut_off_is_lost_for_that_reason_and_its_agent_sees_the_end(agents, events):
    made, come = agents
    links = [come(hello(rank)) for rank in range(2)]
    assert {events.get(timeout=10).rank for _ in links} == {0, 1}
    made.cut(1, "its node has left")
    made.cut(3, "it has not come")
    ended = events.get(timeout=10)
    assert (ended.end.rank, ended.end.code, ended.end.lost, made.gone) == (1, None, "its node has left", {1})
    with pytest.raises((EOFError, OSError)):
        links[1].receive()
    links[0].send(Started(4711))
    links[0].send(Ended(0, 1.0))
    assert events.get(timeout=10).end.rank == 0


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (hello(0), "rank 0 was started twice, again on host h0"),
        (hello(4), "a process on host h4 was started as rank 4 of 4, but this job has 4"),
        (hello(-1), "a process on host h-1 was started as rank -1 of 4, but this job has 4"),
        (
            hello(1, size=1),
            "a process on host h1 was started as rank 1 of 1, but this job has 4: perhaps another MPI's",
        ),
        (
            hello(1, host="h2"),
            "rank 1 is to run on h1, but was started on h2; use the name that `hostname` prints on each host",
        ),
        (Note("no greeting"), "expected Hello as an agent's first message, got Note"),
        (None, "an agent's first message is not valid: message 0 of this connection was changed"),
    ],
)
def test_only_ranks_that_the_job_awaits_are_let_in_and_each_once(agents, events, second, reason):
    made, come = agents
    first = come(hello(0))
    assert isinstance(events.get(timeout=10), Arrived)
    refused = come(second)
    event = events.get(timeout=10)
    assert isinstance(event, Refused)
    assert event.reason.startswith(reason)
    with pytest.raises((EOFError, OSError)):
        refused.receive()
    made.set_up()
    variables = {"A": "b", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": str(len(JOB.hosts))}
    assert first.receive() == Setup(("true",), "127.0.0.1", 2345, "/work", variables, False), "the first one stays"


def test_a_rank_that_is_gone_takes_no_more_of_the_input(tmp_path, events):
    """What is typed from then on is for the rank of the next start."""
    read, write = os.pipe()
    listener = Listener(str(tmp_path), [], 1)
    agents = Agents(listener, Job(1, ["true"]), RankSetup(stdin=read), Output(1, {}), events)
    agents.start()
    agent = connect(listener.address, listener.authkey)
    agent.send(hello(0, 1, socket.gethostname()))
    agent.send(InputWanted())
    os.write(write, b"first")
    assert agent.receive() == Input(b"first")
    agent.send(InputWanted())
    while isinstance(events.get(timeout=10), Arrived):
        agent.close()
    os.write(write, b"second")
    assert not select.select([], [], [], 0.2)[0]
    assert select.select([read], [], [], 0)[0]
    assert os.read(read, 10) == b"second"
    agents.close()
    os.close(read)
    os.close(write)


def test_all_but_output_is_heard_while_nobody_reads_what_ranks_print(tmp_path, events):
    read, write = os.pipe()
    listener = Listener(str(tmp_path), [], 1)
    output = Output(1, {}, write, write)
    agents = Agents(listener, Job(1, ["true"]), RankSetup(), output, events)
    agents.start()
    agent = connect(listener.address, listener.authkey)
    agent.send(hello(0, 1, socket.gethostname()))
    lines = [b"%06d" % number + b"x" * 65000 for number in range(20)]
    for line in lines:
        agent.send(Says("stdout", line + b"\n"))
    for sent in (Died(3, 1.0), Answer(1, "", "", ""), Says("stderr", b"Oops\nlast"), Ended(3, 1.0)):
        agent.send(sent)
    output.message(["ringrun: the end"])  # does not wait either
    heard = [events.get(timeout=10) for _ in range(4)]
    assert heard[1:3] == [RankDied(0, 3), Reported(0, Answer(1, "", "", ""))]
    assert isinstance(heard[3], RankEnded)
    assert (heard[3].end.code, heard[3].end.tail) == (3, ("Oops", "last"))
    assert not output.finish(0.01)
    assert not select.select([agent], [], [], 0.01)[0], "nothing is Taken, so no agent sends more"
    with os.fdopen(read, "rb") as printed:
        expected = [*lines, b"Oops", b"last"]
        while expected:
            line = printed.readline()
            if line != b"ringrun: the end\n":
                assert line == b"[0] " + expected.pop(0) + b"\n", "the order within a rank stays"
        assert output.finish(patient(10))
    taken = agent.receive()
    assert isinstance(taken, Taken)
    assert taken.nbytes >= 65000
    assert not agents.gone
    agent.close()
    wait_until(lambda: agents.gone == {0})
    agents.close()
    os.close(write)


def test_a_listener_that_breaks_says_so(agents, events, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    _, come = agents
    monkeypatch.setattr(Agents, "admit", refuse)
    come(hello(0))
    assert events.get(timeout=10) == Deaf("RuntimeError: can't start new thread")


def test_each_rank_takes_one_descriptor_and_no_thread(agents, events):
    """512 and 4096 of them: tests/end_to_end/test_bench.py."""
    _, come = agents
    before, threads = open_files(), {*threading.enumerate()}
    for rank in range(SIZE):
        come(hello(rank))
        assert isinstance(events.get(timeout=10), Arrived)
    new = [each for each in open_files() if each not in before]
    assert len(new) == 2 * SIZE, f"the agents' ends are here, too: {new}"
    assert {*threading.enumerate()} <= threads


def open_files():
    """What this process has open: sockets by their inodes, since those of an earlier test may be closed meanwhile."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return found


def test_a_low_limit_of_open_files_is_raised_as_far_as_is_wanted():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (is_open + 8, before[1]))
        assert raise_open_files(64, 64) == is_open + 8
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (is_open + 64, before[1])
        assert raise_open_files(32, 32) == is_open + 64, "it is high enough"
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (is_open + 64, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_limit_that_is_too_low_for_the_job_is_told_with_the_cure():
    with pytest.raises(MachineError, match=r"needs \d+ open files here .* no more than \d+ are .* `ulimit -Hn \d+`"):
        raise_open_files(1 << 40, 1 << 40)


def test_what_all_are_sent_is_encoded_once(monkeypatch):
    encoded = []
    monkeypatch.setattr(wire, "encode", lambda message: encoded.append(message) or b"frame")
    agents, frames = Agents(None, Job(3, ["true"]), RankSetup(), None, None), []
    agents._links = dict.fromkeys(range(3), SimpleNamespace(send_encoded=frames.append))
    agents.broadcast(Note("x"))
    assert (encoded, frames) == ([Note("x")], [b"frame"] * 3)


def test_an_agent_that_may_use_other_cores_than_those_of_its_host_is_refused(agents, events):
    made, come = agents
    made._job = replace(JOB, hosts=[(Host("h0"), 3), (Host("h1"), 1)])
    for rank, (host, local_rank, count, cpus) in enumerate(
        [("h0", 0, 3, "0-1"), ("h0", 1, 3, "0-1"), ("h0", 2, 3, "2-3"), ("h1", 0, 1, "2-3")]
    ):
        come(Hello(rank, SIZE, local_rank, count, host, 0, "", cpus))
        event = events.get(timeout=10)
        assert isinstance(event, Refused if rank == 2 else Arrived)
        if rank == 2:
            assert "rank 2 is to get its share of the CPUs 0-1 of h0, but was started on 2-3" in event.reason
