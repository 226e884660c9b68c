"""Hosts that come while an elastic job runs, and hosts that fail and are left out: without processes."""

import queue
import re
from dataclasses import replace

import pytest

from ringrun import cli
from ringrun.agent import kept_commits
from ringrun.connection.wire import Hosts, Initialized, Left, Meeting, Membership, Reformed
from ringrun.elastic import LONGEST_COOLDOWN_S, Elastic
from ringrun.errors import UsageError
from ringrun.hosts import Host, is_here
from ringrun.job.events import HostsCame, RankDied, RankEnded, Reported
from ringrun.job.growth import CANNOT_START_S, Blacklist, Growth, HostWatch, InUse
from ringrun.job.losses import Losses
from ringrun.job.plan import Job
from ringrun.report.outcome import RankEnd
from tests.support.loops import in_a_loop


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_host_is_left_out_for_longer_each_time_up_to_a_limit(clock):
    hosts = [Host("h1", 2), Host("h2", 2)]
    blacklist = Blacklist((10.0, 35.0), clock)
    assert blacklist.without(hosts) == hosts
    for cools_s in (10.0, 20.0, 35.0, 35.0):
        assert blacklist.failed("h2") == cools_s
        assert blacklist.failed("h2") == 0.0, "its other ranks fail too"
        clock.now_s += cools_s - 1.0
        assert (blacklist.without(hosts), blacklist.next_s()) == ([hosts[0]], 1.0)
        clock.now_s += 1.0
        assert (blacklist.without(hosts), blacklist.next_s()) == (hosts, 0.0)


def test_without_a_range_no_host_is_left_out():
    blacklist = Blacklist(None)
    assert blacklist.failed("h1") == 0.0
    assert blacklist.without([Host("h1")]) == [Host("h1")]


class Watched:
    """A HostWatch of a job that has `in_use`, whose hosts a test changes; `silent` are those that do not answer."""

    def __init__(self, clock, in_use, most=99):
        self.hosts = ()
        self.in_use = in_use
        self.silent = set()
        self.asked = []
        self.events = queue.SimpleQueue()
        self.said = []
        growth = Growth(self._named, self._named, Blacklist(None), most)
        self._watch = HostWatch(growth, self._reallocate, lambda: self.in_use, self.events, self.said.append, clock)

    def _named(self):
        if isinstance(self.hosts, UsageError):
            raise self.hosts
        return self.hosts

    def _reallocate(self, in_use):
        self.asked.append({host.name for host in self._named()} - in_use)
        placed = [(host, host.slots or 1) for host in self._named() if host.name not in self.silent]
        elsewhere = [] if all(map(is_here, self._named())) else placed
        return Job(sum(count for _, count in placed), ["true"], hosts=elsewhere) if placed else None

    def look(self, *hosts):
        self.hosts = hosts or self.hosts
        self._watch.look()
        return [self.events.get_nowait() for _ in range(self.events.qsize())]


H1, H2 = Host("h1", 2), Host("h2", 2)
ON_H1 = InUse(2, 2, {"h1": 2})


def test_hosts_that_come_and_slots_that_are_added_are_told_once(clock):
    watched = Watched(clock, ON_H1)
    assert watched.look(H1) == []
    assert not watched.asked
    assert watched.look(Host("h1", 4), Host("h3")) == [HostsCame(("h1:4", "h3:1"), 5)]
    clock.now_s += 1000
    assert watched.look() == []
    assert watched.look(H1) == [], "some went"
    assert watched.look(H1, Host("h3")) == [HostsCame(("h3:1",), 3)], "one is back"
    assert watched.asked == [{"h1", "h3"}] * 2 + [{"h3"}], "not those that are all in use"


def test_a_host_is_named_before_it_answers(clock):
    """It is asked again, ever more seldom: after 2, 4, 8 … s, then every minute; at once when the list changes."""
    watched = Watched(clock, ON_H1)
    watched.silent = {"h2"}
    asked_s = []
    while clock.now_s < 300:
        assert watched.look(H1, H2) == []
        if len(watched.asked) > len(asked_s):
            asked_s.append(clock.now_s)
        clock.now_s += 1
    assert asked_s == [0, 2, 6, 14, 30, 62, 122, 182, 242]
    assert watched.look(H1, H2, Host("h3")) == [HostsCame(("h3:1",), 3)]
    watched.silent.clear()
    clock.now_s += 2
    assert watched.look() == [HostsCame(("h2:2", "h3:1"), 5)]


def test_a_host_that_was_named_during_the_start_is_new_to_the_job(clock):
    watched = Watched(clock, None)
    assert watched.look(H1, H2) == []
    watched.in_use = ON_H1
    assert watched.look() == [HostsCame(("h2:2",), 4)]


def test_a_host_that_was_lost_is_taken_again_and_one_whose_rank_failed_is_not(clock):
    watched = Watched(clock, InUse(4, 4, {"h1": 2, "h2": 2}), most=4)
    assert watched.look(H1, H2) == []
    watched.in_use = InUse(3, 4, {"h1": 2, "h2": 2})
    assert watched.look() == []
    watched.in_use = InUse(2, 4, {"h1": 2, "h2": 0})
    assert watched.look() == [HostsCame(("h2:2",), 4)]


@pytest.mark.parametrize(
    ("in_use", "came"), [(InUse(3, 3, {}), []), (InUse(2, 2, {}), [HostsCame(("localhost:3",), 3)])]
)
def test_a_job_on_this_host_takes_slots_that_are_added(clock, in_use, came):
    assert Watched(clock, in_use).look(Host("localhost", 3)) == came


def test_a_job_that_may_have_no_more_ranks_asks_nobody(clock):
    watched = Watched(clock, ON_H1, most=2)
    assert watched.look(H1, H2) == []
    assert not watched.asked


def test_a_script_that_fails_changes_nothing_and_is_told_once(clock):
    watched = Watched(clock, ON_H1)
    watched.hosts = UsageError("it ended with exit code 1")
    assert watched.look() == watched.look() == []
    assert watched.said == ["ringrun: warning: the list of hosts was not updated: it ended with exit code 1"]
    assert watched.look(H1, H2) == [HostsCame(("h2:2",), 4)]


class Recorded:
    """Agents and an output."""

    colours = False

    def __init__(self):
        self.sent = []
        self.broadcast = self.sent.append
        self.message = self.sent.extend


@pytest.mark.parametrize(("size", "is_told"), [(4, False), (5, True)])
def test_ranks_hear_of_hosts_that_give_them_company(size, is_told):
    recorded = Recorded()
    Losses(4, Elastic(spares=1), recorded, recorded).announce(HostsCame(("h2:1", "h3:2"), size))
    again = f"after its next commit the job starts again, with {size} ranks instead of 4"
    told = [Hosts("h2:1, h3:2"), f"ringrun: h2:1, h3:2 joined; {again}"]
    assert recorded.sent == (told if is_told else [])


def test_how_a_rank_was_lost_is_said_before_the_others_went_on():
    """Survivors are quicker than the last words of the dead."""
    recorded = Recorded()
    losses = Losses(3, Elastic(), recorded, recorded)
    for rank in range(3):
        losses.handle(Reported(rank, Initialized()))
    losses.handle(RankDied(1, -9))
    for rank in (0, 2):
        losses.handle(Reported(rank, Reformed(1)))
    assert [each for each in recorded.sent if isinstance(each, str)] == []
    losses.handle(RankEnded(RankEnd(1, "h", 12, -9, 0.0)))
    said = [each for each in recorded.sent if isinstance(each, str)]
    assert any("rank 1 of 3 " in line for line in said[:-1]), said
    assert re.fullmatch("ringrun: ranks 0,2 resumed after [0-9]+ ms", said[-1])


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_the_others_go_on_without_a_rank_that_has_left_in_whatever_order_they_say_so(order):
    """Each has an agent of its own, and on a busy machine the one of the rank that left may be the last."""
    recorded = Recorded()
    losses = Losses(3, Elastic(), recorded, recorded)
    for rank in range(3):
        losses.handle(Reported(rank, Initialized()))
    for rank in order:
        losses.handle(Reported(rank, Meeting(0) if rank else Left("it called shutdown()")))
    gone_on = "ringrun: rank 0 left before others did; continuing with ranks 1-2"
    assert recorded.sent == [gone_on, Membership(1, (1, 2), {})]


@in_a_loop(("max_np", "slots", "size"), [(None, 5, 3), (4, 5, 5), (4, 3, 3), (8, 6, 6)])
def test_a_job_on_this_host_grows_to_its_slots_and_its_limit(max_np, slots, size):
    flags = [] if max_np is None else ["--max-np", str(max_np)]
    request = cli.parse(["--elastic", "-np", "2", "--spares", "1", "-H", f"localhost:{slots}", *flags, "true"])
    found = cli._reallocation(request, ["true"], cli._growth(request))(replace(request.job, size=3), ())
    assert found.size == size


def test_hosts_stay_known_while_their_list_cannot_be_read(tmp_path):
    file, said = tmp_path / "hosts", []
    file.write_text("h1:2\nh2:3\n")
    request = cli.parse(["--elastic", "--blacklist-cooldown-range", "10", "100", "--hostfile", str(file), "true"])
    growth = cli._growth(request)
    file.write_text("h1:2\nh2:")
    growth.update(said.append)
    assert growth.known() == [H1, Host("h2", 3)]
    assert re.fullmatch(f"ringrun: warning: the list of hosts was not updated: {file}:2: 'h2:'.*", "\n".join(said))
    growth.blacklist.failed("h1")
    assert growth.known() == [Host("h2", 3)]
    file.write_text("h1:2\nh2:4\n")
    growth.update(said.append)
    assert growth.known() == [Host("h2", 4)]
    assert len(said) == 1


def test_a_range_in_a_file_is_one_text_or_a_list(tmp_path):
    file = tmp_path / "ringrun.yaml"
    for right in "10 100", "[10, 100]", "[10, '100']":
        file.write_text(f"elastic: true\nblacklist_cooldown_range: {right}\n")
        request = cli.parse(["--config-file", str(file), "true"])
        assert request.job.elastic.cooldown_s == (10.0, 100.0)
    two = "expected two numbers of seconds, as in 10 100"
    for wrong, why in (("10", two), ("10 7200", "expected at most 3000 s"), ("[]", two), ("[1, 2, 3]", two)):
        file.write_text(f"elastic: true\nblacklist_cooldown_range: {wrong}\n")
        with pytest.raises(UsageError, match=f"ringrun.yaml:2: --blacklist.*{why}"):
            cli.parse(["--config-file", str(file), "true"])
    assert max(LONGEST_COOLDOWN_S, *CANNOT_START_S) < kept_commits._ABANDONED_S, "commits outlast a pause"
