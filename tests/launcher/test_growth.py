"""Hosts that come while an elastic job runs, and hosts that fail and are left out: without processes."""

import queue
from collections.abc import Sequence

import pytest

from ringrun import cli
from ringrun.connection.wire import Hosts
from ringrun.elastic import Elastic
from ringrun.errors import UsageError
from ringrun.hosts import Host
from ringrun.job import restarts
from ringrun.job.events import HostsCame
from ringrun.job.growth import Blacklist, HostWatch
from ringrun.job.losses import Losses
from ringrun.job.plan import Job


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_host_is_left_out_for_longer_each_time_up_to_a_limit(clock: Clock) -> None:
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


def test_without_a_range_no_host_is_left_out() -> None:
    blacklist = Blacklist(None)
    assert blacklist.failed("h1") == 0.0
    assert blacklist.without([Host("h1")]) == [Host("h1")]


class Watched:
    """A HostWatch whose hosts a test changes."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts: Sequence[Host] | UsageError = hosts
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.said: list[str] = []
        self.answers = True
        self._watch = HostWatch(self._named, self._again, self.events, self.said.append)
        self.look()

    def _named(self) -> Sequence[Host]:
        if isinstance(self.hosts, UsageError):
            raise self.hosts
        return self.hosts

    def _again(self) -> Job | None:
        return Job(6, ["true"]) if self.answers else None

    def look(self, *hosts: Host) -> list[HostsCame]:
        self.hosts = hosts or self.hosts
        self._watch.look()
        return [self.events.get_nowait() for _ in range(self.events.qsize())]


def test_hosts_that_come_and_slots_that_are_added_are_told_once() -> None:
    watched = Watched(Host("h1", 2), Host("h2"))
    assert watched.look(Host("h1", 2), Host("h2")) == []
    assert watched.look(Host("h1", 4), Host("h2"), Host("h3", 1)) == [HostsCame(("h1:4", "h3:1"), 6)]
    assert watched.look() == []
    assert watched.look(Host("h1", 4)) == [], "some went"
    assert watched.look(Host("h1", 4), Host("h3", 1)) == [HostsCame(("h3:1",), 6)], "one is back"


def test_a_script_that_fails_changes_nothing_and_is_told_once() -> None:
    watched = Watched(Host("h1", 2))
    watched.hosts = UsageError("it ended with exit code 1")
    assert watched.look() == watched.look() == []
    assert watched.said == ["ringrun: warning: hosts stay as they are: it ended with exit code 1"]
    assert watched.look(Host("h1", 2), Host("h2", 1)) == [HostsCame(("h2:1",), 6)]


def test_hosts_that_do_not_answer_are_no_news() -> None:
    watched = Watched(Host("h1", 2))
    watched.answers = False
    assert watched.look(Host("h1", 2), Host("h2", 2)) == []


class Recorded:
    """A channel and an output."""

    colours = False

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.broadcast = self.sent.append
        self.message = self.sent.extend


@pytest.mark.parametrize(("size", "is_told"), [(4, False), (5, True)])
def test_ranks_hear_of_hosts_that_give_them_company(size: int, is_told: bool) -> None:
    recorded = Recorded()
    Losses(4, Elastic(spares=1), recorded, recorded).announce(HostsCame(("h2:1", "h3:2"), size))
    again = f"after its next commit the job is started again, with {size} ranks instead of 4"
    told = [Hosts("h2:1, h3:2"), f"ringrun: h2:1, h3:2 came; {again}"]
    assert recorded.sent == (told if is_told else [])


@pytest.mark.parametrize(
    ("max_np", "slots", "size"), [(None, 5, 3), (4, 5, 5), (4, 3, 3), (8, 6, 6)], ids=["as at first", "", "", ""]
)
def test_a_job_on_this_host_grows_to_its_slots_and_its_limit(max_np: int | None, slots: int, size: int) -> None:
    again = restarts.on_hosts_that_answer(lambda: [Host("localhost", slots)], lambda names: names)
    found = again(Job(3, ["true"], elastic=Elastic(spares=1, max_np=max_np)))
    assert found is not None
    assert found.size == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-np", "1"], "--max-np 1: the job would begin with 2 ranks"),
        (["--max-np", "x"], "--max-np: expected a whole number from 1 to 999999, got 'x'"),
        (
            ["--blacklist-cooldown-range", "9", "x"],
            "--blacklist-cooldown-range: expected a number of seconds above 0, got 'x'",
        ),
        (
            ["--blacklist-cooldown-range", "9", "5"],
            "--blacklist-cooldown-range: expected the longer time last, got 9 5",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        cli.run(["-np", "2", "--elastic", *arguments, "true"])
    assert str(error.value) == message


def test_a_range_in_a_file_is_one_text(tmp_path) -> None:
    file = tmp_path / "ringrun.yaml"
    file.write_text("elastic: true\nblacklist_cooldown_range: 10 100\n")
    request = cli.parse(["--config-file", str(file), "true"])
    assert request.job.elastic is not None
    assert request.job.elastic.cooldown_s == (10.0, 100.0)
    file.write_text("elastic: true\nblacklist_cooldown_range: 10\n")
    with pytest.raises(UsageError, match=r"ringrun.yaml:2: --blacklist.*expected two numbers of seconds, as in 10 100"):
        cli.parse(["--config-file", str(file), "true"])
