"""Datagrams between an agent and ringreduce in its rank: what is passed on to ringrun, and what the rank is told."""

import json
import socket

import pytest

from ringreduce.monitor import launcher_link
from ringreduce.runtime.recovery.membership import Members
from ringrun.agent.rank_socket import RankSocket
from ringrun.connection import wire

LIST = wire.Membership(3, (0, 1, 3), {"2": "was killed by SIGKILL"})


@pytest.fixture
def heard():
    return []


@pytest.fixture
def agents(tmp_path, heard):
    made = RankSocket(tmp_path / "rank1.json", heard.append)
    yield made
    made._socket.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the socket, at the process's end
def test_an_agent_without_a_socket_says_so(tmp_path):
    """Else its rank of an elastic job never hears which ranks go on."""
    with pytest.raises(OSError, match="path too long"):
        RankSocket(tmp_path / ("x" * 120), print)


@pytest.fixture
def ranks(tmp_path):
    """The rank's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(str(tmp_path / "rank1.json.ask"))
        own.settimeout(10)
        yield own


def test_all_that_a_rank_has_said_is_passed_on_in_order(tmp_path, agents, heard):
    files, mapped = str(tmp_path / "rank1.json"), []
    agents._on_init = mapped.extend
    launcher_link.report(files, init=10.0, package=launcher_link.PACKAGE)
    agents.read()
    launcher_link.report(files, started="ringreduce", shared=["a line of maps"])
    launcher_link.report(files, grouped=(1, 2))
    launcher_link.report(files, alone="torch", ends=1, in_vain=0)
    launcher_link.report(files, stalled="'w' waits")
    launcher_link.report(files, suspects=[2, 5], why="'w' waits for ranks 2,5")
    launcher_link.report(files, meeting=3)
    launcher_link.report(files, reformed=3)
    launcher_link.report(files, left="its script ended")
    launcher_link.report(files, committed="h3:2")
    launcher_link.report(files, measured={"totals": {"step": 4}})
    launcher_link.report(files, finding="rank 1: 'w' is NaN")
    assert heard == [wire.InInit(10.0)], "nobody has read it yet"
    agents.read()
    of_rank = [
        wire.Grouped(1, 2),
        wire.Alone("torch", True, False),
        wire.Stalled("'w' waits"),
        wire.Suspects((2, 5), "'w' waits for ranks 2,5"),
        wire.Meeting(3),
        wire.Reformed(3),
        wire.Left("its script ended"),
        wire.Committed("h3:2"),
        wire.Measured('{"totals": {"step": 4}}'),
        wire.Finding("rank 1: 'w' is NaN"),
    ]
    assert heard == [wire.InInit(10.0), wire.Initialized(), *of_rank]
    assert agents.package == launcher_link.PACKAGE
    assert mapped == ["a line of maps"]


@pytest.mark.parametrize(
    "datagram", [b"", b"[1]", b"\xff", b'{"reformed": "x"}', b'{"suspects": 7}', b'{"init": []}', b'{"grouped": [1]}']
)
def test_what_is_no_message_says_nothing(datagram, tmp_path, agents, heard):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.sendto(datagram, str(tmp_path / "rank1.json.agent"))
    agents.read()
    assert heard == []


def test_a_rank_that_is_late_gets_the_last_list(tmp_path, agents, ranks):
    agents.notify(LIST._replace(number=2))
    agents.notify(LIST)
    sent = {"membership": {"number": 3, "ranks": [0, 1, 3], "dead": {"2": "was killed by SIGKILL"}}}
    assert [json.loads(ranks.recv(1 << 16))["membership"]["number"] for _ in range(2)] == [2, 3]
    launcher_link.report(str(tmp_path / "rank1.json"), started="ringreduce")
    agents.read()
    assert json.loads(ranks.recv(1 << 16)) == sent


def test_hosts_that_came_are_told_too(tmp_path, agents, ranks):
    agents.notify(wire.Hosts("h3:2"))
    members = Members(1)
    members.hear(json.loads(ranks.recv(1 << 16)))
    assert (members.hosts, members.newest.number) == ("h3:2", -1)
    launcher_link.report(str(tmp_path / "rank1.json"), started="ringreduce")
    agents.read()
    assert json.loads(ranks.recv(1 << 16)) == {"hosts": "h3:2"}, "for a rank that is late"


def test_a_rank_that_does_not_listen_is_no_error(agents):
    agents.notify(LIST)
    assert not agents.ask()


def test_a_rank_whose_queue_is_full_is_told_later(agents, ranks):
    """Its Python may stand still for long, as in a compiler that holds the GIL, while somebody asks what it does."""
    questions = 0
    while agents.ask():
        questions += 1
    for number in (3, 4, 5):
        agents.notify(LIST._replace(number=number))
    agents.notify(wire.Hosts("h3:2"))
    assert [ranks.recv(1 << 16) for _ in range(questions)] == questions * [b"doing"]
    told = {**json.loads(ranks.recv(1 << 16)), **json.loads(ranks.recv(1 << 16))}
    assert (told["membership"]["number"], told["hosts"]) == (5, "h3:2"), "the last of each"
    ranks.settimeout(0.5)
    with pytest.raises(TimeoutError):
        ranks.recv(1 << 16)


def test_a_rank_whose_queue_was_full_where_no_thread_could_start_hears_the_next(agents, ranks, monkeypatch):
    while agents.ask():
        continue
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", lambda _: exec("raise RuntimeError"))
        agents.notify(LIST)
    ranks.recv(1 << 16)
    agents.notify(LIST._replace(number=4))
    while (told := ranks.recv(1 << 16)) == b"doing":
        continue
    assert json.loads(told)["membership"]["number"] == 4
