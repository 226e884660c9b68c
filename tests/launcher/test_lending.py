"""run() on slots that others lend, as tasks of Ray, Spark and Dask do: here, threads of this process."""

import contextlib
import io
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ringreduce import spark
from ringreduce.dask import tasks as dask
from ringreduce.errors import InputError, JobFailedError, StartupError
from ringreduce.ray import tasks as ray
from ringrun import lending
from ringrun.connection import wire
from ringrun.connection.listener import Listener
from ringrun.join.key import KEY_VARIABLE, read_key
from tests.support.engines import go_on, grow, sleep, train, trained
from tests.support.loops import in_a_loop
from tests.support.patience import patient, wait_until

SLOW = {"start_timeout": 300}


@pytest.fixture
def lend(monkeypatch):
    """lend(TICKET, SLOTS): a thread that lends so many; all of them end with the job."""
    threads, start = [], lending.start_with_parent
    begun = []

    def started(*arguments, **options):
        begun.append(start(*arguments, **options))
        return begun[-1]

    monkeypatch.setattr(lending, "start_with_parent", started)

    def begin(*arguments, **options):
        count = len(begun)
        threads.append(threading.Thread(target=lending.lend, args=arguments, kwargs=options))
        threads[-1].start()
        wait_until(lambda: len(begun) > count)
        return begun[-1]

    yield begin
    for each in threads:
        each.join(60)
        assert not each.is_alive()


def begin(ticket, lend, *slots):
    """Start lenders once there is a head: called by what asks for trouble."""
    left = list(slots)

    def trouble():
        if left:
            lend(ticket, left.pop(0))
        return ""

    return trouble


@pytest.mark.adapters
@pytest.mark.timeout(600)
def test_ranks_run_on_slots_that_several_lend_with_their_variables_and_their_failures_come_back(lend, capfd):
    ticket = lending.ticket(300)
    found = lending.run((train, (2,), {}), ticket, 3, SLOW, {"ASKED": "for"}, begin(ticket, lend, 2, 1))
    assert found == trained(3, 2, "for")
    assert "[2] rank 2 says hello\n" in capfd.readouterr().out
    ticket = lending.ticket(300)
    with pytest.raises(JobFailedError) as caught:
        lending.run((train, (2, True), {}), ticket, 2, SLOW, {}, begin(ticket, lend, 1, 1))
    assert re.search(r"rank 1 of 2 failed first -.*\nhow +exit code 1\nwhere +host \S+, pid \d+", str(caught.value))
    assert "ValueError: bad luck" in str(caught.value)


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_lender_that_is_killed_takes_its_rank_along_and_the_others_go_on(lend, tmp_path):
    """Not the first of the host, below which all ranks run."""
    ticket, lenders, left = lending.ticket(300), [], [1, 1, 1]

    def runs(lender):
        return any(each.read_text() for each in Path(f"/proc/{lender.pid}/task").glob("*/children"))

    def trouble():
        if left:
            lenders.append(lend(ticket, left.pop()))
        if len([each for each in tmp_path.iterdir() if each.name.startswith("1 ")]) == 3:
            next(each for each in lenders if not runs(each)).kill()
            (tmp_path / "1 killed").touch()
        return ""

    flags = {**SLOW, "elastic": True, "min_np": 2}
    assert lending.run((go_on, (str(tmp_path), 2), {}), ticket, 3, flags, {}, trouble) == [[3, 2], [3, 2]]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_slots_that_are_lent_later_are_used_up_to_max_np(lend, tmp_path):
    ticket, left = lending.ticket(300), [1, 1, 1]

    def trouble():
        if left and (len(left) > 1 or list(tmp_path.iterdir())):
            lend(ticket, left.pop(0))
        return ""

    flags = {**SLOW, "elastic": True, "max_np": 3}
    found = lending.run((grow, (str(tmp_path), 3), {}), ticket, 2, flags, {}, trouble)
    assert found == [(rank, 3) for rank in range(3)]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_an_elastic_job_begins_with_the_slots_that_have_come_and_takes_the_others_later(lend, tmp_path, capfd):
    ticket, left = lending.ticket(patient(5)), [1, 1]

    def trouble():
        if left and (len(left) == 2 or list(tmp_path.iterdir())):
            lend(ticket, left.pop())
        return ""

    flags = {**SLOW, "elastic": True}
    found = lending.run((grow, (str(tmp_path), 2), {}), ticket, 2, flags, {}, trouble)
    assert found == [(rank, 2) for rank in range(2)]
    assert (tmp_path / "1 0").exists(), "it began alone"
    starts = r"1 of 2 slots have joined within \S+ s; the elastic job starts with these, and takes others that come"
    assert re.search(f"ringrun: {starts}\n", capfd.readouterr().err)


def test_an_elastic_job_does_not_begin_with_less_than_it_may_have():
    with pytest.raises(StartupError, match=r"0 of 2 slots have joined within 1 s; see what"):
        lending.run((train, (2,), {}), lending.ticket(1), 2, {"elastic": True, "min_np": 2}, {}, str)


def test_what_keeps_tasks_from_lending_ends_the_wait_for_them():
    with pytest.raises(StartupError, match=r"^run\(\): no worker has ringreduce$"):
        lending.run((train, (2,), {}), lending.ticket(300), 2, {}, {}, lambda: "no worker has ringreduce")


@pytest.mark.parametrize("where", ["trouble", "stdout"])
def test_an_error_while_the_job_runs_ends_it(where, monkeypatch):
    """Its tasks have as long as they may take to begin, in which nothing of the kind is waited for."""

    class Full:
        def write(self, text):
            raise ZeroDivisionError(text)

    def trouble():
        if where == "stdout":
            monkeypatch.setattr("sys.stderr", Full())  # ringrun says there how many slots have joined
            return ""
        raise ZeroDivisionError

    begin_s = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        lending.run((train, (2,), {}), lending.ticket(900), 2, {}, {}, trouble)
    assert time.monotonic() - begin_s < 120


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_once_there_are_ranks_ringrun_says_which_is_lost_and_not_the_engine(lend, tmp_path):
    """An engine may have noticed first that a lender is gone, and knows of no rank."""
    ticket, lenders, left = lending.ticket(300), [], [1, 1]

    def trouble():
        if left:
            lenders.append(lend(ticket, left.pop()))
        if len(list(tmp_path.iterdir())) < 2:
            return ""
        lenders[0].kill()
        return "a task is lost"

    with pytest.raises(JobFailedError, match=r"rank \d of 2 failed first -.*\nhow +.*`ringrun join` has ended"):
        lending.run((sleep, (str(tmp_path),), {}), ticket, 2, SLOW, {}, trouble)


def test_no_task_is_started_for_a_job_that_is_refused():
    with pytest.raises(InputError, match=r"--nonsense"):
        lending.run((train, (2,), {}), lending.ticket(900), 2, {"nonsense": 1}, {}, lambda: "the tasks would begin")


def test_a_task_whose_job_has_ended_does_not_wait_for_its_head():
    with pytest.raises(RuntimeError, match=r"^the job ended before this task joined it$"):
        lending.lend(lending.ticket(900), wanted=lambda: False)


def test_a_lender_that_reaches_no_head_says_so():
    ticket = lending.ticket(0.1)
    with pytest.raises(RuntimeError, match=rf"cannot be reached from \S+: .* port {ticket.port}: .*refused.*; let its"):
        lending.lend(ticket)


@pytest.mark.parametrize(("address", "named"), [("10.0.0.1", "10.0.0.1"), ("fd00::1", "[fd00::1]")])
def test_a_head_is_named_by_an_address_that_leads_to_it(address, named, monkeypatch):
    def connect(where, timeout_s):
        if where[0] == "10.9.9.9":
            raise OSError("no route to host")
        return io.BytesIO()  # which can be closed

    ticket = lending.Ticket(("10.9.9.9", address), 5000, "key", 60)
    monkeypatch.setattr(lending.socket, "create_connection", connect)
    assert lending._reached(ticket, lambda: True) == named


def test_without_a_network_no_task_is_started(monkeypatch):
    monkeypatch.setattr("ringrun.network._interface_addresses", lambda names: iter(["127.0.0.1", "::1"]))
    with pytest.raises(StartupError, match=r"^run\(\): this host has no address .*, or use ringreduce\.run\(\), whose"):
        lending.ticket(60)


class Refusing:
    """A head's end of a connection, which takes no node."""

    def __init__(self, link):
        self.link = link

    def handle(self, message):
        if isinstance(message, wire.Node):
            self.link.send(wire.Release(2, f"a node called {message.host} has already joined"))
        return False


def test_a_lender_that_the_head_does_not_take_says_why(tmp_path):
    ticket = lending.ticket(60)._replace(addresses=("127.0.0.1",))
    head = Listener(
        str(tmp_path), ticket.addresses, 8, port=ticket.port, authkey=read_key(None, {KEY_VARIABLE: ticket.key})
    )
    with contextlib.closing(head):
        head.start(Refusing)
        with pytest.raises(
            RuntimeError, match=r"ended with exit code 2: (?s:.*)error: a node called .* already joined"
        ):
            lending.lend(ticket)


@in_a_loop(
    ("wrong", "message"),
    [
        ({"np": 0}, "expected a number of ranks, 1 or more, got 0"),
        ({"np": "4"}, "expected a number of ranks, 1 or more, got '4'"),
        ({"np": True}, "expected a number of ranks, 1 or more, got True"),
        ({"elastic": True, "limits": {"max_np": "4"}}, "max_np: expected a number of ranks, 1 or more, got '4'"),
        ({"flags": {"hosts": "h1"}}, "hosts='h1': Ray, Spark or Dask places the ranks; leave it out"),
        ({"flags": {"wdir": "/"}}, "wdir='/': Ray, Spark or Dask places the ranks; leave it out"),
        ({"flags": {"num_proc": 4}}, "num_proc=4: here it is np="),
        ({"limits": {"max_np": 4}}, "max_np=4 is for an elastic job; add elastic=True"),
    ],
)
def test_what_run_of_an_engine_cannot_have_meant(wrong, message):
    right = {"where": "here", "np": 2, "limits": {}, "elastic": False, "flags": {}, "names": {"num_proc": "np="}}
    lending.checked(**right)
    with pytest.raises(InputError, match=f"^here: {message}"):
        lending.checked(**{**right, **wrong})


@in_a_loop(
    ("engine", "flag", "here"),
    [
        (ray, "num_proc", "np="),
        (ray, "min_num_proc", "min_np="),
        (ray, "max_num_proc", "max_np="),
        (dask, "np", "workers="),
        (dask, "num_proc", "workers="),
        (dask, "max_num_proc", "max_np="),
        (spark, "np", "num_proc="),
        (spark, "elastic", "run_elastic()"),
        (spark, "min_np", "run_elastic(min_num_proc=)"),
        (spark, "max_num_proc", "run_elastic(max_num_proc=)"),
    ],
)
def test_a_number_of_ranks_by_another_engine_s_name_says_what_it_is_here(engine, flag, here):
    """It would count for ringrun alone, and not for how many tasks there are."""
    with pytest.raises(InputError, match=rf"^here: {flag}=4: here it is {re.escape(here)}$"):
        lending.checked("here", 2, {}, flag != "max_num_proc", {flag: 4}, engine._NAMES)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ("x", None, r"args='x': expected a tuple of the function's arguments, such as \('x',\)"),
        ((), [1], r"kwargs=\[1\]: expected a dict of the function's arguments by name"),
    ],
)
def test_what_no_function_can_be_called_with(args, kwargs, message):
    with pytest.raises(InputError, match=f"^here: {message}"):
        lending.call_of("here", len, args, kwargs)


def test_what_follows_in_horovod_is_no_argument_by_place():
    """There use_mpi, and here env, would be the sixth."""
    with pytest.raises(TypeError, match="positional"):
        spark.run(len, (), {}, 2, None, True)


def test_numbers_of_ranks_may_be_numpy_s():
    limits = {"min_np": np.int32(1), "max_np": np.int64(5)}
    count, asked = lending.checked("here", np.int64(3), limits, True, {"verbose": 2}, {})
    assert (count, asked) == (3, {"verbose": 2, "elastic": True, "min_np": 1, "max_np": 5})
    assert {int} == {type(each) for each in (count, asked["min_np"], asked["max_np"])}


@pytest.mark.parametrize("wrong", ["5", -1, None])
def test_a_time_that_is_no_number_of_seconds_is_refused(wrong):
    with pytest.raises(
        InputError, match=rf"\(timeout_s; in Spark start_timeout\): expected .* above 0, got {wrong!r}$"
    ):
        lending.ticket(wrong)
