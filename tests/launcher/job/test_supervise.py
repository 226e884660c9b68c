"""When a job's time is over: decisions of the supervisor alone, without processes."""

import queue
import threading
import time

import pytest

from ringrun.connection.wire import Finding, Notice
from ringrun.elastic import Elastic
from ringrun.errors import MachineError
from ringrun.hosts import Host
from ringrun.job import supervise
from ringrun.job.events import Arrived, HostLeft, LauncherEnded, RankEnded, Reported
from ringrun.job.growth import InUse
from ringrun.job.plan import Job
from ringrun.job.supervise import Supervisor
from ringrun.report.outcome import RankEnd
from tests.support.loops import in_a_loop


class Fake:
    """Agents, an mpirun and an output that only remember what was said."""

    def __init__(self):
        self.said = []
        self.tail = ["ssh: no route to h2"]
        self.name = "mpirun"
        self.code = 0
        self.colours = False
        self.signals = []
        self.gone = set()
        self.is_set_up = False

    def message(self, lines):
        self.said += lines

    def broadcast(self, message):
        self.signals.append(message.number)

    def ignore(self, *arguments):
        pass

    send = end_agents = end = close = ignore

    def set_up(self):
        self.is_set_up = True


def queue_of(*events):
    made = queue.SimpleQueue()
    for event in events:
        made.put(event)
    return made


def arrived(*ranks):
    return [Arrived(rank, "here", 2345) for rank in ranks]


def ended(rank, code=0, at_s=0.0, sent=()):
    return RankEnded(RankEnd(rank, "here", 1, code, at_s, sent))


@pytest.mark.parametrize(("timeout_s", "code", "signals"), [(None, 0, []), (30.0, 0, []), (0.1, 124, [15])])
def test_only_a_job_that_takes_longer_is_ended(timeout_s, code, signals, monkeypatch):
    monkeypatch.setattr(supervise, "_LONGEST_WAIT_S", 0.01)  # it wakes often, as in a job of days
    fake = Fake()
    events = queue_of(*arrived(0))
    timer = threading.Timer(1.0, events.put, [ended(0)])
    timer.start()
    assert Supervisor(Job(1, ["x"], timeout_s=timeout_s), fake, fake, fake, events).run() == code
    assert fake.is_set_up
    assert fake.signals == signals
    assert ["ran longer" in line for line in fake.said[-1:]] == [True] * (code == 124)
    timer.join()


def test_ranks_that_do_not_come_are_named_with_their_hosts(monkeypatch):
    fake = Fake()
    events = queue_of(*arrived(0, 2))
    hosts = ((Host("h1"), 1), (Host("h2"), 1), (Host("h3"), 2))
    job = Job(4, ["x"], hosts=hosts, start_timeout_s=0.2)

    def end_both(number):
        fake.signals.append(number)
        for rank in (0, 2):
            events.put(ended(rank, -number, sent=(number,)))

    monkeypatch.setattr(fake, "broadcast", lambda message: end_both(message.number))
    with pytest.raises(MachineError) as caught:
        Supervisor(job, fake, fake, fake, events).run()
    assert str(caught.value) == (
        "the 0.2 s of --start-timeout had passed when 2 of 4 ranks had started; missing: ranks 1,3 on h2, h3; "
        "mpirun wrote:\nssh: no route to h2"
    )
    assert fake.signals == [9]
    assert not fake.is_set_up, "no rank has begun its command"


def test_all_ranks_of_a_host_that_has_left_are_cut_off(monkeypatch):
    fake = Fake()
    events = queue_of(*arrived(0, 1, 2, 3), HostLeft("h2"), HostLeft("h9"))

    def cut(rank, why):
        events.put(RankEnded(RankEnd(rank, "h2", 1, None, 0.0, lost=why)))

    def end(number):
        for rank in (0, 3):
            events.put(ended(rank, -number, at_s=1.0, sent=(number,)))

    fake.cut = cut
    monkeypatch.setattr(fake, "broadcast", lambda message: end(message.number))
    job = Job(4, ["x"], hosts=((Host("h1"), 1), (Host("h2"), 2), (Host("h3"), 1)))
    assert Supervisor(job, fake, fake, fake, events).run() == 1
    assert "how         `ringrun join` has ended on host h2, which has left the job" in fake.said
    assert any(line.startswith("failed too  rank 2 on host h2: `ringrun join` has ended") for line in fake.said)


def test_of_a_host_that_several_lend_the_ranks_of_one_lender_are_its_own():
    part = Host("h2", 6, ((4, 2), (7, 1), (5, 3)))
    job = Job(7, ["x"], hosts=((Host("h1"), 1), (part, 5), (Host("h3"), 1)))
    assert [*job.lent_by("h2", -1)] == [1, 2, 3, 4, 5]
    assert [[*job.lent_by("h2", lender)] for lender in (4, 7, 5, 9)] == [[1, 2], [3], [4, 5], []]
    assert [*job.lent_by("h3", -1)] == [6]
    assert [*job.lent_by("h9", -1)] == []


def test_a_start_that_takes_long_is_told_with_the_hosts_that_are_waited_for(monkeypatch):
    monkeypatch.setattr(supervise, "_PROGRESS_S", 0.05)
    fake = Fake()
    events = queue_of(*arrived(*{*range(12)} - {2, 3, 5}))
    told = []
    fake.message = lambda lines: (told.append(len(fake.said)), fake.said.extend(lines))

    def arrive():
        while len(told) < 2:
            time.sleep(0.01)
        for event in (*arrived(2, 3, 5), *map(ended, range(12))):
            events.put(event)

    timer = threading.Thread(target=arrive)
    timer.start()
    job = Job(12, ["x"], hosts=[(Host(f"node{number}"), 2) for number in range(6)])
    assert Supervisor(job, fake, fake, fake, events).run() == 0
    assert set(fake.said) == {"ringrun: 9 of 12 ranks have started, waiting for node1, node2"}
    assert fake.is_set_up
    timer.join()


@pytest.mark.parametrize("hosts", [(), [(Host("h1"), 1)]])
def test_only_where_there_are_hosts_to_name(hosts, monkeypatch):
    monkeypatch.setattr(supervise, "_PROGRESS_S", 0.05)
    fake = Fake()
    with pytest.raises(MachineError):
        Supervisor(Job(1, ["x"], hosts=hosts, start_timeout_s=0.2), fake, fake, fake, queue.SimpleQueue()).run()
    assert bool(fake.said) == bool(hosts)


@pytest.mark.parametrize(("lost_peer_code", "code", "cause"), [(14, 137, 1), (None, 14, 0)])
def test_the_engine_says_which_exit_code_is_a_consequence(lost_peer_code, code, cause):
    fake = Fake()
    events = queue_of(*arrived(0, 1), ended(0, 14, 1.0), ended(1, -9, 1.1))
    supervisor = Supervisor(Job(2, ["x"]), fake, fake, fake, events, lost_peer_code=lost_peer_code)
    assert supervisor.run() == code
    assert fake.said[0].startswith(f"-- ringrun: rank {cause} of 2 failed first --")


def test_what_ranks_say_of_the_job_is_shown_once_and_as_often_as_one_says_it():
    fake = Fake()
    said = [(0, "a"), (1, "a"), (2, "b"), (0, "a"), (1, "a"), (2, "b")]
    events = queue_of(*arrived(0, 1, 2), *(Reported(rank, Notice(text)) for rank, text in said))
    supervisor = Supervisor(Job(3, ["x"]), fake, fake, fake, events)
    while events.qsize():
        supervisor.take_step()
    assert fake.said == ["a", "b", "a", "b"]


def test_what_a_check_has_found_stands_in_the_report_of_a_failure():
    fake = Fake()
    found = [Reported(1, Finding(f"check: {number}")) for number in (1, 2)]
    assert Supervisor(Job(2, ["x"]), fake, fake, fake, queue_of(*arrived(0, 1), *found, ended(0, 3), ended(1))).run()
    assert fake.said[3:5] == ["found       check: 1", "            check: 2"]


@pytest.mark.parametrize(("elastic", "code"), [(Elastic(), 0), (None, 1)])
def test_ranks_of_an_elastic_job_outlive_mpirun(elastic, code):
    fake = Fake()
    fake.code = 1
    events = queue_of(*arrived(0, 1), LauncherEnded(), ended(0), ended(1))
    assert Supervisor(Job(2, ["x"], elastic=elastic), fake, fake, fake, events).run() == code
    assert fake.said[0].startswith(
        "ringrun: mpirun has ended with exit code 1; the ranks continue" if elastic else "ringrun: mpirun ended"
    )


@in_a_loop(("ends", "gone", "slots"), [((2, 3), {2, 3}, 0), ((2, 3), {3}, 2), ((3,), {2}, 2), ((), {1, 2}, 2)])
def test_a_host_is_lost_with_its_agents_however_its_ranks_have_ended(ends, gone, slots):
    fake = Fake()
    fake.gone = gone
    events = queue_of(*arrived(0, 1, 2, 3), *(ended(rank, -15) for rank in ends))
    job = Job(4, ["x"], hosts=[(Host("h1"), 2), (Host("h2"), 2)], elastic=Elastic())
    supervisor = Supervisor(job, fake, fake, fake, events)
    assert supervisor.in_use() is None, "they start"
    while events.qsize():
        supervisor.take_step()
    assert supervisor.in_use() == InUse(4 - len(ends), 4, {"h1": 2, "h2": slots})


def test_slots_of_a_lender_that_has_left_are_not_in_use():
    """Else one that comes in its place would bring nothing new: the host has as many slots as at first."""
    fake = Fake()
    fake.gone, fake.cut = set(), lambda *_: fake.gone.add(3)
    events = queue_of(*arrived(0, 1, 2, 3), HostLeft("h2", 7))
    job = Job(4, ["x"], hosts=[(Host("h1"), 1), (Host("h2", 3, ((4, 2), (7, 1))), 3)], elastic=Elastic())
    supervisor = Supervisor(job, fake, fake, fake, events)
    while events.qsize():
        supervisor.take_step()
    assert supervisor.in_use() == InUse(4, 4, {"h1": 1, "h2": 2})
