"""--restarts: which endings are followed by another attempt, when, on which hosts, and what a script finds then."""

import json
import queue
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.elastic import Elastic
from ringrun.environment import COUNT_VARIABLE
from ringrun.errors import MachineError, NotStartedError, UsageError
from ringrun.hosts import Host
from ringrun.job import restarts, signals
from ringrun.job.events import Arrived, Signalled
from ringrun.job.growth import Blacklist
from ringrun.job.plan import Job
from ringrun.job.restarts import Ending, SignalRelay, reallocated
from ringrun.job.supervise import Supervisor
from tests.launcher.job.test_growth import Clock
from tests.launcher.job.test_supervise import Fake, arrived, ended, queue_of
from tests.support.jobs import executable
from tests.support.loops import in_a_loop
from tests.support.patience import patient

OK, FAILED, TIMEOUT = Ending(0), Ending(7, failed=True), Ending(124)


class Attempts:
    """Plays endings one after the other, and remembers what was asked."""

    def __init__(self, *endings, sizes=(), signal=None):
        self.endings = list(endings)
        self.sizes = list(sizes)
        self.signal = signal
        self.jobs = []
        self.deadlines = []
        self.pauses = []
        self.said = []

    def attempt(self, job, deadline_s):
        self.jobs.append(job)
        self.deadlines.append(deadline_s)
        ending = self.endings.pop(0)
        if isinstance(ending, Exception):
            raise ending
        return ending

    def reallocate(self, job, in_use):
        size = self.sizes.pop(0) if self.sizes else job.size
        return None if size is None else replace(job, size=size)

    def wait(self, seconds):
        self.pauses.append(seconds)
        return self.signal

    def run(self, number, timeout_s=None, elastic=None):
        job = Job(8, ["true"], variables={"A": "b"}, restarts=number, timeout_s=timeout_s, elastic=elastic)
        return restarts.run(job, self.attempt, self.reallocate, self.wait, self.said.append, Blacklist(None))


def test_a_failure_is_followed_by_another_attempt_until_one_succeeds():
    run = Attempts(FAILED, FAILED, OK)
    assert run.run(3) == 0
    assert [job.variables for job in run.jobs] == [{"A": "b", COUNT_VARIABLE: str(count)} for count in range(3)]
    assert run.said == ["ringrun: restart 1 of 3 in 1 s", "ringrun: restart 2 of 3 in 2 s"]


def test_pauses_grow_and_the_last_failure_gives_the_exit_code():
    run = Attempts(*[FAILED] * 7, Ending(9, failed=True))
    assert run.run(7) == 9
    assert run.pauses == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("ending", [OK, TIMEOUT, Ending(130)])
def test_what_is_no_failure_is_not_followed(ending):
    run = Attempts(ending)
    assert run.run(3) == ending.exit_code
    assert not run.said


@pytest.mark.parametrize("error", [UsageError("wrong"), NotStartedError("nothing"), MachineError("too slow")])
def test_neither_is_a_job_that_cannot_be_started(error):
    run = Attempts(error)
    with pytest.raises(type(error)):
        run.run(3)
    assert not run.said


def test_but_one_that_had_started_before_is():
    run = Attempts(FAILED, NotStartedError("missing: rank 1 on h2"), OK)
    assert run.run(2) == 0
    assert run.said[1:] == ["ringrun: error: missing: rank 1 on h2", "ringrun: restart 2 of 2 in 2 s"]
    with pytest.raises(NotStartedError):
        Attempts(FAILED, NotStartedError("missing: rank 1 on h2")).run(1)


def test_it_goes_on_with_fewer_ranks_and_with_all_when_the_host_is_back():
    run = Attempts(FAILED, FAILED, OK, sizes=[6, 8])
    assert run.run(3) == 0
    assert [job.size for job in run.jobs] == [8, 6, 8]
    assert "ringrun: hosts that answer have 6 slots; continuing with 6 of 8 ranks" in run.said
    assert sum("slots" in line for line in run.said) == 1


def test_where_hosts_are_lost_an_elastic_job_has_fewer_spares_first():
    run = Attempts(FAILED, FAILED, FAILED, FAILED, sizes=[7, 5, 2])
    assert run.run(3, elastic=Elastic(min_np=3, spares=2)) == 7
    assert [(job.size, job.elastic) for job in run.jobs] == [(8, Elastic(3, 2)), (7, Elastic(3, 1)), (5, Elastic(3, 0))]
    assert run.said[-1] == "ringrun: no restart, because hosts that answer have 2 slots, and --min-np is 3"


def test_restarts_for_hosts_that_come_are_not_counted():
    scales_up = Ending(1, scales_up=True)
    run = Attempts(scales_up, FAILED, scales_up, OK, sizes=[12, 12, 16])
    assert run.run(1) == 0
    assert run.pauses == [0, 1, 0]
    assert [job.restarts for job in run.jobs] == [1, 1, 0, 0]
    assert [job.variables[COUNT_VARIABLE] for job in run.jobs] == ["0", "1", "2", "3"]
    run = Attempts(scales_up, FAILED, sizes=[12])
    assert run.run(0) == 7


def test_a_job_goes_on_without_hosts_that_came_and_cannot_start_ranks():
    """These restarts are not counted, and the hosts are left out for longer each time."""
    h1, h2 = Host("h1.example", 2), Host("h2.example", 2)
    scales_up, broken, blacklist = Ending(1, scales_up=True), MachineError("no prted there"), Blacklist(None, Clock())
    run = Attempts(scales_up, broken, scales_up, broken, FAILED, OK)

    def reallocate(job, in_use):
        if run.endings[0] is broken:
            blacklist._now_s.now_s += blacklist.next_s()
        found = [(host, 2) for host in blacklist.without([h1, h2])]
        return replace(job, size=2 * len(found), hosts=found)

    job = Job(2, ["true"], hosts=[(h1, 2)], restarts=1, elastic=Elastic())
    assert restarts.run(job, run.attempt, reallocate, run.wait, run.said.append, blacklist) == 0
    assert [tried.size for tried in run.jobs] == [2, 4, 2, 4, 2, 2]
    assert [line for line in run.said if "slots" not in line] == [
        "ringrun: error: no prted there",
        "ringrun: continuing without host h2.example, which has joined, but is left out for 60 s",
        "ringrun: error: no prted there",
        "ringrun: continuing without host h2.example, which has joined, but is left out for 120 s",
        "ringrun: restart 1 of 1 in 1 s",
    ]
    run = Attempts(scales_up, broken, OK)
    assert restarts.run(replace(job, restarts=0), run.attempt, reallocate, run.wait, run.said.append, blacklist) == 0


def test_where_hosts_that_are_left_out_are_needed_it_waits_for_them():
    run = Attempts(FAILED, OK, sizes=[1, None, 8])
    left = SimpleNamespace(next_s=iter([30.0, 12.0]).__next__)
    job = Job(8, ["true"], restarts=1, elastic=Elastic(min_np=2))
    assert restarts.run(job, run.attempt, run.reallocate, run.wait, run.said.append, left) == 0
    assert run.pauses == [1, 30, 12]
    assert "ringrun: waiting 30 s for a host that failed and is left out until then" in run.said


def test_it_waits_for_no_host_that_is_left_out_for_longer_than_the_job_may_take():
    run = Attempts(FAILED, sizes=[1])
    left = SimpleNamespace(next_s=lambda: 3000.0)
    job = Job(8, ["true"], restarts=1, timeout_s=600.0, elastic=Elastic(min_np=2))
    assert restarts.run(job, run.attempt, run.reallocate, run.wait, run.said.append, left) == 7
    assert run.pauses == [1]
    assert run.said[-1] == "ringrun: no restart: --timeout 600 s is up before a host that failed may be used again"


@pytest.mark.parametrize(
    ("endings", "size", "code", "said"),
    [
        ([FAILED, OK], 12, 0, "hosts that answer have 12 slots; continuing with 12 ranks"),
        ([FAILED], None, 7, "no restart, because no host answers"),
    ],
)
def test_more_slots_than_before_or_none_are_said(endings, size, code, said):
    run = Attempts(*endings, sizes=[size])
    assert (run.run(1), run.said[-1]) == (code, f"ringrun: {said}")


def test_where_hosts_cannot_be_found_out_any_more_it_is_over():
    run = Attempts(FAILED)

    def reallocate(job, in_use):
        raise UsageError("hostfile hosts: no such file")

    run.reallocate = reallocate
    assert run.run(1) == 7
    assert run.said[-1] == "ringrun: no restart: hostfile hosts: no such file"


def test_the_time_limit_is_of_all_attempts_together():
    run = Attempts(FAILED, OK)
    assert run.run(1, timeout_s=50.0) == 0
    assert len(set(run.deadlines)) == 1
    assert run.deadlines[0] is not None
    run = Attempts(FAILED)
    assert run.run(1, timeout_s=0.5) == 7
    assert run.said == ["ringrun: no restart, because --timeout 0.5 s is up before it could begin"]


# which hosts, with how many ranks each


HOSTS = [Host("a", 4), Host("b", 4), Host("c", 2)]
BEFORE = {"a": 4, "b": 4}


@in_a_loop(
    ("answering", "counts"),
    [
        (["a", "b", "c"], {"a": 4, "b": 4}),
        (["a", "c"], {"a": 4, "c": 2}),
        (["c", "b"], {"b": 4, "c": 2}),
        (["b"], {"b": 4}),
        ([], {}),
    ],
)
def test_ranks_move_to_the_slots_of_hosts_that_answer(answering, counts):
    assert {host.name: count for host, count in reallocated(HOSTS, BEFORE, answering, 8)} == counts


def test_where_slots_were_not_said_a_host_takes_what_it_had():
    hosts = [Host("a"), Host("b"), Host("spare")]
    placed = reallocated(hosts, {"a": 5, "b": 3}, ["b", "spare"], 8)
    assert {host.name: count for host, count in placed} == {"b": 3, "spare": 1}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=6), st.integers(1, 40))
def test_never_more_ranks_than_slots_nor_than_asked_for(rows, size):
    hosts = [Host(f"h{number}", slots) for number, (slots, _, _) in enumerate(rows)]
    before = {f"h{number}": min(had, slots) for number, (slots, had, _) in enumerate(rows)}
    answering = [f"h{number}" for number, (_, _, answers) in enumerate(rows) if answers]
    placed = reallocated(hosts, before, answering, size)
    assert all(host.name in answering and 1 <= count <= (host.slots or 0) for host, count in placed)
    slots = sum(host.slots or 0 for host in hosts if host.name in answering)
    assert sum(count for _, count in placed) == min(size, slots)


def test_a_job_is_placed_anew_on_the_hosts_that_answer():
    asked = []

    def answering(names):
        asked.append(list(names))
        return answers.pop(0)

    here = Host("localhost", 2)
    hosts = [here, Host("h2.example", 2), Host("h3.example", 1)]
    job = Job(4, ["true"], hosts=((here, 2), (hosts[1], 2)))
    reallocate = restarts.on_hosts_that_answer(lambda: hosts, answering, 4)
    answers = [["localhost", "h2.example", "h3.example"], ["h3.example", "localhost"], ["localhost"], [], []]
    assert reallocate(job, ()) == replace(job, hosts=[(here, 2), (hosts[1], 2)])
    assert reallocate(job, ()) == replace(job, size=3, hosts=[(here, 2), (hosts[2], 1)])
    assert reallocate(job, ()) == replace(job, size=2, hosts=())  # all ranks on this host
    assert reallocate(job, ["localhost"]) == replace(job, size=2, hosts=())
    assert reallocate(job, ()) is None
    assert asked == [["localhost", "h2.example", "h3.example"]] * 3 + [["h2.example", "h3.example"], asked[0]]
    alone = Job(2, ["true"])
    assert restarts.on_hosts_that_answer(lambda: [here], answering, 1)(alone, ()) is alone
    assert restarts.on_hosts_that_answer(list, answering, 1)(alone, ()) is alone


@in_a_loop("slots", [2, None])
@in_a_loop(("most", "counts"), [(sys.maxsize, [2, 3]), (3, [2, 1])])
def test_hosts_that_are_new_get_ranks(most, counts, slots):
    here, new = Host("localhost", 2), Host("h2.example", 3)
    hosts = [replace(here, slots=slots)]
    reallocate = restarts.on_hosts_that_answer(lambda: hosts, lambda names: names, most)
    job = Job(2, ["true"])
    assert reallocate(job, ()) is job
    hosts.append(new)
    assert reallocate(job, ()) == replace(job, size=sum(counts), hosts=list(zip([here, new], counts, strict=True)))


# signals


@pytest.fixture
def relay(monkeypatch):
    monkeypatch.setattr(signals.SignalReader, "__init__", lambda *_: None)  # the test's own signals stay as they are
    return SignalRelay()


def test_a_signal_that_nobody_has_taken_reaches_the_next_that_listens(relay):
    relay.take(signal.SIGINT)
    events = queue.SimpleQueue()
    relay.to(events)
    events.put(Arrived(0, "here", 2345))  # of an attempt that is over
    assert relay.wait(30.0) == signal.SIGINT


def test_a_pause_without_signals_ends_by_itself_and_with_one_at_once(relay):
    assert relay.wait(0.05) is None
    threading.Timer(0.05, relay.take, [signal.SIGUSR1]).start()  # asks for stacks; there are no ranks
    timer = threading.Timer(0.1, relay.take, [signal.SIGTERM])
    begin_s = time.monotonic()
    timer.start()
    assert relay.wait(30.0) == signal.SIGTERM
    assert time.monotonic() - begin_s < 20
    timer.join()


@pytest.mark.parametrize(("signalled", "failed"), [([], True), ([Signalled(signal.SIGINT)], False)])
def test_a_failure_during_which_ctrl_c_was_pressed_is_none_to_restart_after(signalled, failed):
    fake, events = Fake(), queue_of(*arrived(0, 1), ended(0, 5), *signalled, ended(1, at_s=1.0))
    supervisor = Supervisor(Job(2, ["x"]), fake, fake, fake, events)
    assert supervisor.run() == 5
    assert supervisor.failed is failed


# whole runs


def test_a_script_with_a_checkpoint_goes_on(ringrun, program, wait_until_gone, tmp_path):
    done = ringrun("-np", 2, "--restarts", 2, "--report", "run", *program("checkpoints"), returncode=0)
    wait_until_gone()
    for rank in range(2):
        assert f"[{rank}] attempt 0 begins at step 0\n" in done.stdout
        assert f"[{rank}] attempt 1 begins at step 4\n" in done.stdout
        assert f"[{rank}] done 6.0 {float(3 * sum(range(6)))}\n" in done.stdout
    assert "ringrun: rank 1 of 2 failed first" in done.stderr
    assert "ringrun: restart 1 of 2 in 1 s\n" in done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [each["text"] for each in report["elastic"]] == ["restart 1 of 2 in 1 s"]
    assert [each["rank"] for each in report["failures"]][:1] == [1]


@pytest.mark.without_mpi
def test_it_gives_up_after_the_last_restart(ringrun, script, tmp_path, wait_until_gone):
    source = """
        import os, pathlib, sys, time
        count = int(os.environ["RINGREDUCE_RESTART_COUNT"])
        print("words of attempt", count, file=sys.stderr)
        others = pathlib.Path(f"said {count}")
        if os.environ["RANK"] == "0":
            others.touch()
            sys.exit()
        while not others.exists():  # else it is ended within its words
            time.sleep(0.01)
        sys.exit(20 + count)
    """
    done = ringrun("-np", 2, "--restarts", 2, "--output-filename", "kept", *script(source), returncode=22)
    wait_until_gone()
    told = [line for line in done.stderr.splitlines() if line.startswith(("ringrun:", "-- ringrun:", "how "))]
    assert [re.sub(r"[- ]*-$", "", line) for line in told] == [
        *("-- ringrun: rank 1 of 2 failed first", "how         exit code 20", "ringrun: restart 1 of 2 in 1 s"),
        *("-- ringrun: rank 1 of 2 failed first", "how         exit code 21", "ringrun: restart 2 of 2 in 2 s"),
        *("-- ringrun: rank 1 of 2 failed first", "how         exit code 22"),
    ]
    for rank in range(2):  # nothing of an earlier attempt is lost
        kept = (tmp_path / "kept" / f"rank.{rank}" / "stderr").read_text()
        assert kept == "".join(f"words of attempt {count}\n" for count in range(3))


@pytest.mark.without_mpi
@pytest.mark.parametrize("how", ["file", "script"])
def test_a_list_of_hosts_that_cannot_be_had_stays_as_it_was(ringrun, script, tmp_path, how):
    """As while it is being rewritten, or in an outage."""
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    executable(tmp_path / "discover", "#!/bin/sh\necho busy >&2; cat hosts\n")
    source = """
        import os, pathlib, sys
        count = os.environ["RINGREDUCE_RESTART_COUNT"]
        print("attempt", count)
        pathlib.Path("hosts").unlink(missing_ok=True)
        sys.exit(3 if count == "0" else 0)
    """
    flags = {"file": ("--hostfile", "hosts"), "script": ("--host-discovery-script", "./discover")}[how]
    done = ringrun("-np", 2, "--restarts", 1, *flags, *script(source), returncode=0)
    assert {"[0] attempt 1", "[1] attempt 1"} <= {*done.stdout.splitlines()}
    why = {"file": "hostfile hosts: no such file\n", "script": "--host-discovery-script ./discover: it ended with"}[how]
    assert f"ringrun: warning: the list of hosts was not updated: {why}" in done.stderr


def test_ctrl_c_during_a_pause_ends_at_once(start, script, wait_until_gone):
    process = start("-np", 2, "--restarts", 9, *script("import sys; sys.exit(5)"))
    for line in process.stderr:
        if "restart 3 of 9 in 4 s" in line:
            break
    begin_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=patient(20))
    assert process.returncode == 130
    assert errors == "ringrun: interrupted before the restart\n"
    assert time.monotonic() - begin_s < patient(3)  # the pause would take 4
    wait_until_gone()


@pytest.mark.without_mpi
def test_ranks_know_of_no_restart_without_the_flag(ringrun):
    program = f"import os; print(os.environ['{COUNT_VARIABLE}'])"
    done = ringrun("-np", 2, sys.executable, "-c", program, env={COUNT_VARIABLE: "5"})
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 0", "[1] 0"])
