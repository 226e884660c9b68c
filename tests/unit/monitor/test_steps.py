"""What is recorded of steps, by a clock that the tests set; what of it is sent, and at which line a script is."""

import _thread
import functools
import json
import math
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ringreduce.execution import steps
from ringreduce.execution.signature import Signature
from ringreduce.execution.steps import MARKED, MOST, StepRecorder
from ringreduce.monitor import sampling
from ringreduce.monitor.reporting import MOST_BYTES, Reporting, shortened
from ringreduce.transport import traffic
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.world import World
from ringrun.records import Operation
from tests.support.opcodes import opcodes_of


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: clock.s))
    return clock


@pytest.fixture
def recorder(clock):
    made = StepRecorder()
    made.start()
    return made


def ended(recorder, clock, at, submitted, ready, begun, name="w", nbytes=(300, 700), process_set=0):
    clock.s = 100 + at
    recorder.ended(
        SimpleNamespace(
            signature=Signature("allreduce", name),
            inputs=[SimpleNamespace(nbytes=each) for each in nbytes],
            submitted_s=100 + submitted,
            ready_s=100 + ready,
            begun_s=100 + begun,
            algorithm="shared",
            process_set=process_set,
        )
    )


def waited(recorder, clock, since, until, name="w"):
    clock.s = 100 + until
    recorder.waited(name, 100 + since)


def step(recorder, clock, at, who=1, **options):
    clock.s = 100 + at
    recorder.stepped(who, **options)


def test_operations_of_one_name_in_several_process_sets_are_told_apart(recorder, clock):
    for process_set in (0, 2):
        ended(recorder, clock, 3, 1, 2, 2, process_set=process_set)
    ended(recorder, clock, 3, 1, 2, 2, "check.nan.w")
    step(recorder, clock, 4)
    assert [each.name for each in recorder.steps[-1].operations] == ["w", "w (set 2)", "check.nan"]


def test_the_times_of_a_step_that_is_known(recorder, clock):
    """Data moves from 21 to 24 and from 26 to 28; the rank waits from 23 to 25 and from 27 to 28, in two waits."""
    ended(recorder, clock, 5, 1, 2, 3, "before training")
    step(recorder, clock, 20)
    ended(recorder, clock, 23, 20.5, 21, 21, "a")
    ended(recorder, clock, 24, 20.5, 22, 23, "b")
    waited(recorder, clock, 23, 25, "b")
    ended(recorder, clock, 28, 25, 26, 26, "a", nbytes=[1025])
    waited(recorder, clock, 27, 28)
    waited(recorder, clock, 27.5, 28)
    step(recorder, clock, 30, examples=64)
    ended(recorder, clock, 32, 29, 29, 29, "a")
    step(recorder, clock, 40)
    first, last = list(recorder.steps)[1:]
    assert (first.number, first.from_s, first.to_s, first.step_s, first.count) == (1, 120, 130, 10, 3)
    assert (first.moving_s, first.blocked_s, first.hidden_s) == (5, 3, 3)
    assert first.operations[1] == Operation("b", "allreduce", 1000, 120.5, 122, 123, 124, "shared")
    assert first.waits == [("b", 123, 125), ("w", 127, 128), ("w", 127.5, 128)]
    assert last.moving_s == 2, "what moved before the step is not of it"
    totals = recorder.totals()
    assert {name: totals[name] for name in ("step", "step_s", "computing_s", "moving_s", "hidden_s", "examples")} == {
        "step": 2,
        "step_s": 20,
        "computing_s": 17,
        "moving_s": 7,
        "hidden_s": 5,
        "examples": 64,
    }
    assert totals["histogram"] == {math.floor(math.log(10, 1.05)): 2}
    assert totals["by_algorithm"] == {"shared 1024": [3, 3000, 6], "shared 2048": [1, 1025, 2]}
    assert totals["by_name"] == {"a": [3, 3025, 7], "b": [1, 1000, 1]}
    assert (totals["operations"], totals["bytes"]) == (4, 4025)


def test_an_operation_that_had_no_turn_began_when_it_was_submitted(recorder, clock):
    ended(recorder, clock, 4, 3, -100, -100)
    recorder.passed("b", "barrier", 0, 104, "")
    recorder.passed("c", "barrier", 0, 104, None)
    step(recorder, clock, 5)
    (found,) = recorder.steps
    assert [each[3:7] for each in found.operations] == [(103, 103, 103, 104), (104, 104, 104, 104)]
    assert [name for name, _, _ in found.waits] == ["b", "c"]


def test_of_optimizers_that_step_in_turn_one_ends_a_step(recorder, clock):
    for number, (who, count) in enumerate(
        [
            (["D", "G", "H"] * 5, 5),
            (["G", "H"] * 3, 8),  # D is gone
            (list(range(100)) * 3, 10),  # an optimizer of each parameter: the first one to step twice is 0
            ([MARKED, "G", "G", "D"] * 40, 50),  # what the script says counts, alone
        ]
    ):
        for each in who:
            step(recorder, clock, 1, each)
        assert len(recorder.steps) == count, number


def test_waits_count_in_the_thread_that_steps_and_in_a_framework_s_own(recorder, clock):
    def other(done):
        waited(recorder, clock, 0, 1, "other")
        done.set()

    done = threading.Event(), threading.Event()
    threading.Thread(target=other, args=done[:1]).start()
    _thread.start_new_thread(other, done[1:])
    assert all(each.wait(10) for each in done)
    step(recorder, clock, 2)
    assert len(recorder.steps[0].waits) == 1
    trainer = threading.Thread(target=lambda: (step(recorder, clock, 3), waited(recorder, clock, 3, 4, "mine")))
    trainer.start()
    trainer.join()
    step(recorder, clock, 5)
    assert [name for name, _, _ in recorder.steps[2].waits] == ["mine"]


def test_memory_is_bounded(recorder, clock):
    def size():
        kept = [recorder._step, *recorder.steps]
        assert max(len(each) for s in kept for each in (s.operations, s.waits)) <= MOST
        names = {**recorder._by_name, **recorder._by_algorithm}
        lists = [recorder._moving, recorder._blocked]
        return max(map(len, [names, recorder.steps, *lists]))

    for number in range(20_000):
        ended(recorder, clock, 10 * number + 3, 1, 10 * number, 10 * number, f"{number}" * 99, [1 << number % 60])
        waited(recorder, clock, 10 * number, 10 * number + 5)
    assert size() <= steps.MOST_SPANS
    assert max(map(len, recorder._by_name)) == steps.LONGEST_NAME
    for number in range(300):
        step(recorder, clock, 200_000 + number)
        for _ in range(300):
            ended(recorder, clock, 200_000 + number, 0, 0, 0)
    step(recorder, clock, 300_000)
    assert size() <= steps.MOST_SPANS
    assert (len(recorder.steps), len(recorder.steps[-1].operations), recorder.steps[-1].count) == (64, MOST, 300)
    assert recorder.totals()["operations"] == 300 * 300, "they are counted all the same"


@pytest.mark.parametrize("longest", ["operations", "by_name"])
def test_a_message_fits_into_a_datagram(longest):
    row = ["gradient" * 10, "allreduce", 123456789, *[12345.678901234] * 4, "hierarchical"]
    body = {"number": 7, "operations": [row] * 2001, "more": 5}
    if longest == "by_name":
        body = {"step": 7, "by_name": {f"{number}": row for number in range(2000)}}
    found = shortened(body)
    assert len(json.dumps(found)) <= MOST_BYTES
    assert len(found["operations"]) + found["more"] == 2006 if longest == "operations" else len(found["by_name"]) >= 200


def test_a_report_that_is_asked_for_again_goes_on_and_ends_no_sooner():
    begin_s = time.monotonic()
    asked = SimpleNamespace(_until_s=begin_s + 5, _thread=SimpleNamespace(is_alive=lambda: True))
    for for_s in (60, 1):
        assert Reporting.prolong(asked, for_s)
        assert begin_s + 60 <= asked._until_s < begin_s + 65


TRAIN = """
def train(load):
    for _ in load:
        pass
def compute(look):
    return look()
def batches(look):
    yield look()
class Loader:
    def __init__(self, look):
        self.look = look
    def __iter__(self):
        return self
    def __next__(self):
        raise StopIteration(self.look())
"""
LOADER = """
class Loader:
    def __init__(self, look):
        self.look = look
    def __iter__(self):
        self.look()
        return iter([])
"""


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda own, torch, look: own["compute"](look), "train.py:6"),
        (lambda own, torch, look: own["compute"](functools.partial(json.dumps, {1}, default=look)), "train.py:6"),
        (lambda own, torch, look: own["train"](own["batches"](look)), "train.py:8 (data loader)"),
        (lambda own, torch, look: own["train"](own["Loader"](look)), "train.py:15 (data loader)"),
        (lambda own, torch, look: own["train"](torch["Loader"](look)), "train.py:3 (data loader)"),
        (lambda own, torch, look: own["train"](own["batches"](lambda: own["compute"](look))), "train.py:6"),
    ],
)
def test_the_line_of_a_script_that_a_stack_is_at(run, expected, tmp_path):
    own, torch, found = {}, {}, []
    exec(compile(TRAIN, str(tmp_path / "train.py"), "exec"), own)
    exec(compile(LOADER, "/venv/lib/python3/site-packages/torch/utils/data/dataloader.py", "exec"), torch)

    def look(*_):
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        found.append(sampling.line_of(frame))

    run(own, torch, look)
    assert found == [expected]
    assert sampling.line_of(SimpleNamespace(f_code=json.dumps.__code__, f_lineno=1, f_back=None)) == ""


def test_where_the_kernel_says_nothing_there_are_zeros(monkeypatch, tmp_path):
    sampler = sampling.Sampler(threading.get_ident())
    sampler.look()
    assert sampler.totals()["samples"] == 1
    assert sampling.memory()[0] > 1 << 20
    monkeypatch.setattr(sampling, "Path", lambda _: tmp_path / "is not there")
    nothing = sampling.Sampler(1)
    nothing.look()
    assert (nothing.totals(), sampling.memory()) == ({"lines": {}, "samples": 1, "core_wait_s": 0}, (0, 0))


def test_an_operation_costs_the_same_number_of_instructions_whatever_came_before(recorder, clock):
    def operation():
        ended(recorder, clock, 3, 1, 2, 2)
        waited(recorder, clock, 1, 2)

    def least():  # what the garbage collector calls meanwhile is counted, too
        return min(opcodes_of(operation) for _ in range(3))

    operation()
    first = least()
    for _ in range(MOST - 8):
        operation()
    assert least() == first < 600
    for _ in range(10 * MOST):
        operation()
    assert least() < first, "what is too much is counted only"


def test_how_long_messages_to_a_rank_are_under_way(monkeypatch):
    """Two to rank 1 that overlap, from 0 to 5 and from 3 to 7, and one to rank 2 that does not end."""
    now, transport, requests = [0.0], MessageTransport(World(0, 1, (0,))), []
    monkeypatch.setattr(traffic, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def sent(*_):
        request = SimpleNamespace(done=False)
        request.Test = lambda: request.done
        requests.append(request)
        return request

    transport._comm, transport._members = SimpleNamespace(Isend=sent), range(3)
    transport.send(np.ones(9, np.uint8), 1, 0)  # not counted
    transport.traffic = traffic.Traffic()
    first, _ = transport.send(np.ones(100, np.uint8), 1, 0), transport.send(np.ones(7, np.uint8), 2, 0)
    now[0] = 3
    second = transport.send(np.ones(11), 1, 0)
    for work, number, until in ((first, 1, 5), (second, 3, 7)):
        assert not work.done()
        now[0], requests[number].done = until, True
        assert work.done()
        assert work.done()
    assert (transport.traffic.nbytes, transport.traffic.seconds) == ({1: 188, 2: 7}, {1: 7})
