"""Short known operations in the caller's thread: beside ranks that submit them; ranks that are late, differ or end."""

import contextvars
import dataclasses
import functools
import json
import random
import re
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce import runtime
from ringreduce.api.control import barrier_async
from ringreduce.engine import express
from ringreduce.engine.express import DONE, LATE, OTHER, SUMS_LATE
from ringreduce.kernels import native
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.counters import END, READ
from tests.support.patience import wait_until
from tests.support.tiers import parted

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(native.module is None, reason=f"the compiled module: {native.MISSING}"),
]
WARM = 8


def own():
    return runtime.current("a test").engine.express


@dataclasses.dataclass
class Counting:
    """In place of the `Exchange` of a name: it counts what that returns; its first call goes by `how`, if set."""

    original: object
    counts: list[int]
    how: Callable | None = None

    def run(self, *arguments):
        how, self.how = self.how, None
        found = how(self.original.run, *arguments) if how else self.original.run(*arguments)
        self.counts[found] += 1
        return found


def within(run, patience_us, source, target, number, sequence, _, group):
    """The call, with another patience."""
    return run(source, target, number, sequence, patience_us, group)


@dataclasses.dataclass
class Hurried:
    """In place of an `Exchange`: it waits for nobody."""

    original: object

    def run(self, *arguments):
        return within(self.original.run, 0.0, *arguments)


def watched(name, counts, how=None):
    """Count, for this rank, how the calls of this name end."""
    known = own()._known
    if name in known and not isinstance(known[name].exchange, Counting):
        known[name] = known[name]._replace(exchange=Counting(known[name].exchange, counts, how))


def fast(name, array):
    """A call that goes this way, once nothing else is under way: the engine's thread may look around just now."""
    wait_until(lambda: own().run("allreduce", name, array, array, (None, rr.Sum, 1.0, 1.0)) is not None)


def element(rank, name, number, count=64):
    return np.arange(count, dtype=np.float32) % 7 + 100 * rank + 10 * "abc".index(name) + number


def warm(names="abc"):
    """Until each name has its id, and was learned, on all ranks."""
    for name in names:
        for number in range(WARM):
            rr.allreduce_(element(rr.rank(), name, number), name=name, op=rr.Sum)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", parted(range(4), lambda seed: seed < 2))
def test_sums_are_the_same_whichever_way_each_rank_takes(size, seed, monkeypatch):
    """Names in any order of the ranks' own; some ranks are late; some calls differ, so ids are forgotten in between."""
    monkeypatch.setattr(express, "PATIENCE_US", 5000.0)
    shared, rounds = random.Random(seed), 120
    differing = {number: shared.randrange(size) for number in range(9, rounds, 25)}

    def program():
        mine, counts = random.Random(f"{seed} {rr.rank()}"), [0] * 4
        warm()
        for number in range(rounds):
            names = mine.sample("abc", 3) if number % 3 else list("abc")
            arrays = {name: element(rr.rank(), name, number) for name in names}
            pending, fast = [], own()
            for name in names:
                watched(name, counts)
                time.sleep(0.002 * (mine.random() < 0.03))
                if mine.random() < 0.2 or names != list("abc"):
                    pending.append(rr.allreduce_async_(arrays[name], name=name, op=rr.Sum))
                elif mine.random() < 0.2:
                    handle = rr.allreduce_async_(arrays[name], name=name, op=rr.Sum)
                    handle.wait()
                else:
                    assert rr.allreduce_(arrays[name], name=name, op=rr.Sum) is arrays[name]
            for each in pending:
                each.wait()
            assert own() is fast
            for name in names:
                total = sum(element(rank, name, number).astype(np.float64) for rank in range(size))
                np.testing.assert_array_equal(arrays[name], total)
            if number in differing and size > 1:
                with pytest.raises(rr.MismatchError, match="'b'"):
                    rr.allreduce_(np.ones(3 + (rr.rank() == differing[number]), np.float32), name="b", op=rr.Sum)
        return counts

    for counts in run_ranks(size, program, timeout_s=40):
        assert (counts[DONE] > 10) == (size > 1), counts


def values(rank, number, count):
    return np.arange(count, dtype=np.float64) % 5 + 10 * rank + number


def some_operation(draw, size):
    """One of those that go this way: what every rank calls, what it may submit instead, and what they return."""
    count, root = draw.choice([1, 64, 3000, 20_000]), draw.randrange(size)
    name = draw.choice([None, f"of {count}"])
    last = size - 1
    return draw.choice(
        [
            (lambda x: rr.allreduce(x, name=name, op=rr.Sum), rr.allreduce_async, {"op": rr.Sum}, count, name, sum),
            (lambda x: rr.allreduce_(x, name=name, op=rr.Max), rr.allreduce_async, {"op": rr.Max}, count, name, max_of),
            (lambda x: rr.broadcast_(x, root, name), rr.broadcast_async, {"root_rank": root}, count, name, at(root)),
            (lambda x: rr.broadcast(x, last, name), rr.broadcast_async, {"root_rank": last}, count, name, at(last)),
            (lambda x: rr.allgather(x, name), rr.allgather_async, {}, count, name, np.concatenate),
            (
                lambda x: rr.allgather(x, name, out=np.empty(size * count)),
                rr.allgather_async,
                {},
                count,
                name,
                np.concatenate,
            ),
            (
                lambda x: rr.reducescatter(x, name, op=rr.Sum),
                rr.reducescatter_async,
                {"op": rr.Sum},
                count,
                name,
                lambda parts: np.array_split(sum(parts), size)[rr.rank()],
            ),
            (lambda x: rr.barrier() or x, lambda x, **_: barrier_async().mapped(lambda _: x), {}, 1, None, None),
        ]
    )


def max_of(parts):
    return functools.reduce(np.maximum, parts)


def at(root):
    return lambda parts: parts[root]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", parted(range(4), lambda seed: seed < 2))
def test_all_kinds_whichever_way_each_rank_takes(size, seed, monkeypatch):
    """In the program's order, since some have no name; each rank calls or submits, and is late now and then."""
    monkeypatch.setattr(express, "PATIENCE_US", 5000.0)
    shared = random.Random(seed)
    operations = [some_operation(shared, size) for _ in range(12)]
    order = [shared.choice(operations) for _ in range(250)]

    def program():
        mine, counts = random.Random(f"{seed} {rr.rank()}"), {}
        for number, (call, submit, options, count, name, expected) in enumerate(order):
            for key, known in own()._known.items():
                if not isinstance(known.exchange, Counting):
                    counted = Counting(known.exchange, counts.setdefault(known.plan.signature.kind, [0] * 4))
                    own()._known[key] = known._replace(exchange=counted)
            time.sleep(0.003 * (mine.random() < 0.05))
            array = values(rr.rank(), number, count)
            result = submit(array, name=name, **options).wait() if mine.random() < 0.25 else call(array)
            parts = [values(rank, number, count) for rank in range(size)]
            np.testing.assert_array_equal(result, array if expected is None else expected(parts), strict=True)
        return counts

    found = run_ranks(size, program, timeout_s=40)
    kinds = {kind for counts in found for kind in counts}
    for kind in kinds:
        assert sum(counts.get(kind, [0])[DONE] for counts in found) > 0, (kind, found)
    assert kinds


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("most", [3, 40_000])
def test_rows_that_differ_now_and_then_are_gathered_all_the_same(size, most, monkeypatch):
    """Those who know an allgather of equal rows find others' in the slot, or that these have no room there."""
    monkeypatch.setattr(express, "PATIENCE_US", 5000.0)

    def rows(rank, number):
        return most if number % 7 == 6 and rank == number % size else 2

    def program():
        counts = [0] * 4
        for number in range(60):
            watched("rows", counts)
            array = np.full((rows(rr.rank(), number), 4), 10.0 * rr.rank() + number)
            expected = [np.full((rows(rank, number), 4), 10.0 * rank + number) for rank in range(size)]
            np.testing.assert_array_equal(rr.allgather(array, "rows"), np.concatenate(expected))
        return counts

    found = run_ranks(size, program)
    assert sum(counts[DONE] for counts in found) > 0, found
    assert sum(counts[SUMS_LATE] for counts in found) > 0, found


def test_numbers_are_summed_this_way_too():
    def program():
        counts, results = [0] * 4, []
        for number in range(4 * WARM):
            results.append(rr.allreduce(float(rr.rank() + number), name="loss"))
            results.append(rr.allreduce(np.float32(number), name="accuracy", op=rr.Sum))
            for name in ("loss", "accuracy"):
                watched(name, counts)
        return counts, results

    for counts, results in run_ranks(2, program):
        assert counts[DONE] > 0
        assert results[::2] == [number + 0.5 for number in range(4 * WARM)]
        assert results[1::2] == [2 * number for number in range(4 * WARM)]
        assert {type(each) for each in results[::2]} == {np.float64}
        assert {type(each) for each in results[1::2]} == {np.float32}


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("count", [64, 20_000])
def test_a_broadcast_and_a_large_sum_whose_others_are_late_go_on(late, count, monkeypatch):
    """Scheduled and packed, with no patience left: the rest is an operation under way."""

    def program():
        counts = [0] * 4
        for number in range(3 * WARM):
            for name in "sb":
                watched(name, counts)
            array = values(rr.rank(), number, count)
            summed = rr.allreduce_(array.copy(), name="s", op=rr.Sum)
            np.testing.assert_array_equal(summed, values(0, number, count) + values(1, number, count))
            np.testing.assert_array_equal(rr.broadcast_(array, 1, "b"), values(1, number, count))
            if number == WARM:
                monkeypatch.setattr(express, "PATIENCE_US", 0.0)
            time.sleep(0.001 * (rr.rank() == late))
        return counts[LATE] + counts[SUMS_LATE]

    assert run_ranks(2, program)[1 - late] > 0


@pytest.mark.parametrize("found", [OTHER, LATE])
def test_a_response_forgets_the_id_by_which_it_was_counted(found):
    """Rank 0's call differs; the response comes while rank 1 waits for the schedule, or when it has handed over."""
    begun, counts = threading.Event(), [0] * 4

    def how(run, *arguments):
        if found == LATE:
            ends = within(run, 0.0, *arguments)
            begun.set()
            return ends
        begun.set()
        views = own()._state.negotiator._views
        wait_until(lambda: views[0].words[END] != views[1].words[READ])
        return run(*arguments)

    def program():
        warm()
        rr.barrier()
        if rr.rank() == 1:
            watched("a", counts, how)
            with pytest.raises(rr.MismatchError, match="allreduce 'a'") as caught:
                fast("a", np.ones(64, np.float32))
        else:
            assert begun.wait(20)
            with pytest.raises(rr.MismatchError) as caught:
                rr.allreduce_(np.ones(65, np.float32), name="a", op=rr.Sum)
        text = r"rank 1 of 2, allreduce 'a' \(test_express\.py:\d+\): float32\[64\]"
        assert re.match(text, str(caught.value)), "the caller's line"
        warm()
        return rr.allreduce_(np.ones(64, np.float32), name="a", op=rr.Sum)[0]

    assert run_ranks(2, program) == [2.0, 2.0]
    assert counts[found] >= 1


@pytest.mark.parametrize("late", [0, 1])
def test_others_have_counted_but_not_packed(late):
    """The sum goes on as an operation under way, behind which others come in their order."""
    packed, counts = threading.Event(), [0] * 4

    def until_counted(run, *arguments):
        negotiator = own()._state.negotiator
        if late == 1:
            wait_until(lambda: negotiator._views[1].counters[arguments[2]] != negotiator._leader.passed[arguments[2]])
        found = within(run, 1e5, *arguments)
        packed.set()
        return found

    def program():
        array, other = (element(rr.rank(), name, 1) for name in "ab")
        warm()
        rr.barrier()
        if rr.rank() == late:
            executor = own()._state.executor
            run = executor.run
            executor.run = lambda *given: (packed.wait(20), run(*given))
            rr.allreduce_async_(array, name="a", op=rr.Sum).wait()
        else:
            watched("a", counts, until_counted)
            fast("a", array)
        return array, rr.allreduce_(other, name="b", op=rr.Sum)

    for array, other in run_ranks(2, program):
        np.testing.assert_array_equal(array, element(0, "a", 1) + element(1, "a", 1))
        np.testing.assert_array_equal(other, element(0, "b", 1) + element(1, "b", 1))
    assert counts == [0, 0, 0, 1]


def test_what_was_handed_over_is_counted_once():
    """Each rank calls another name first: neither is scheduled before both have called both."""
    both_late = threading.Barrier(2)

    def program():
        warm()
        names = "ab" if rr.rank() else "ba"
        for number in range(10):
            first, second = (element(rr.rank(), name, number) for name in names)
            handles, counts = [], [0] * 4

            def how(run, *arguments, handles=handles, second=second):
                found = within(run, 0.0, *arguments)
                both_late.wait(20)
                handles.append(rr.allreduce_async_(second, name=names[1], op=rr.Sum))
                return found

            known = own()._known
            known[names[0]] = known[names[0]]._replace(exchange=Counting(known[names[0]].exchange, counts, how))
            fast(names[0], first)
            handles[0].wait()
            assert counts == [0, 0, 1, 0]
            for name, each in zip(names, (first, second), strict=True):
                np.testing.assert_array_equal(each, sum(element(rank, name, number) for rank in (0, 1)))
        return own()._state.negotiator._views[rr.rank()].counters[:2].tolist()

    counted, others = run_ranks(2, program)
    assert counted == others


@pytest.mark.parametrize("first", [0, 1])
def test_it_overtakes_nothing_that_is_pending(first):
    """Else two operations of this rank could be ready at once, and be one entry of the schedule."""
    called = threading.Event()

    def program():
        arrays = [element(rr.rank(), name, 1) for name in "ab"]
        warm()
        rr.barrier()
        time.sleep(0.05)
        if rr.rank() == first:
            handle = rr.allreduce_async_(arrays[1], name="b", op=rr.Sum)
            handle.poll()  # so it is announced
            wait_until(lambda: not own()._inbox.holds_any())
            time.sleep(0.05)
            assert own().run("allreduce", "a", arrays[0], arrays[0], (None, rr.Sum, 1.0, 1.0)) is None
            called.set()
        else:
            assert called.wait(20)
            handle = rr.allreduce_async_(arrays[1], name="b", op=rr.Sum)
        handle.wait()
        fast("a", arrays[0])
        return arrays

    expected = [element(0, name, 1) + element(1, name, 1) for name in "ab"]
    for arrays in run_ranks(2, program):
        np.testing.assert_array_equal(arrays, expected)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_named(late):
    """A call that was handed over is pending as any other: its stall is reported, with the caller's line."""

    def program():
        warm()
        rr.barrier()
        if rr.rank() == late:
            time.sleep(0.9)
            return
        with pytest.raises(rr.StalledError, match=rf"(?s)allreduce 'a'.*test_express\.py:\d+.*rank {late}"):
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)

    run_ranks(2, program, settings=Settings(stall_check_s=0.2, stall_abort_s=0.4))


def test_a_stall_report_names_what_went_this_way_last(capsys):
    def program():
        warm()
        rr.allreduce_(element(rr.rank(), "c", 0), name="not the last")
        fast("b", element(rr.rank(), "b", 0))
        if rr.rank() == 1:
            time.sleep(0.9)
            return
        with pytest.raises(rr.StalledError):
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)

    run_ranks(2, program, settings=Settings(stall_check_s=0.2, stall_abort_s=0.4))
    told = capsys.readouterr().err
    assert re.search(r"rank 1 last submitted allreduce 'b' \(test_express\.py:\d+\)", told), told


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_joins(size):
    def program():
        warm()
        total = 0.0
        for _ in range(20 + 10 * rr.rank()):
            total += float(rr.allreduce_(np.ones(64, np.float32), name="a", op=rr.Sum)[0])
        last = rr.join()
        again = [float(rr.allreduce_(np.ones(64, np.float32), name="a", op=rr.Sum)[0]) for _ in range(2 * WARM)]
        assert again == [size] * (2 * WARM)
        return total, last

    totals = [20.0 * size + sum(size - 1 - step // 10 for step in range(10 * rank)) for rank in range(size)]
    assert run_ranks(size, program) == [(each, size - 1) for each in totals]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_leaves(leaver):
    def program():
        warm()
        rr.barrier()
        if rr.rank() == leaver:
            return
        with pytest.raises(rr.PeerLostError, match=rf"allreduce 'a' .*: rank {leaver} has left the job"):
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)

    run_ranks(3, program)


@pytest.mark.parametrize("found", [DONE, LATE, SUMS_LATE])
def test_an_interruption_ends_the_engine_and_the_others_hear_of_it(found):
    """As one in the middle of a poll does."""

    def call():
        while True:  # until rank 0 has found what it looks for
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)

    class Interrupted(Counting):
        def run(self, *arguments):
            if found == SUMS_LATE:  # it is then scheduled at once, but the other has not packed yet
                negotiator, until_s = own()._state.negotiator, time.monotonic() + 0.01
                while negotiator._views[1].counters[arguments[2]] == negotiator._leader.passed[arguments[2]]:
                    if time.monotonic() > until_s:
                        break
            ends = within(self.original.run, 1e3 if found == DONE else 0.0, *arguments)
            if ends == found:
                raise KeyboardInterrupt
            return ends

    def program():
        warm("a")
        if rr.rank() == 0:
            known = own()._known
            known["a"] = known["a"]._replace(exchange=Interrupted(known["a"].exchange, [0] * 4))
            with pytest.raises(KeyboardInterrupt):
                call()
            with pytest.raises(rr.CollectiveError, match="rank 0 of 2 failed inside an operation: KeyboardInterrupt"):
                call()
        else:
            with pytest.raises(rr.CollectiveError, match="rank 0 of 2 failed inside an operation"):
                call()

    run_ranks(2, program)


def test_checks_and_the_timeline_see_each_call(tmp_path):
    """While one is on, none goes this way; a report has them all."""
    path = tmp_path / "timeline.json"

    def program():
        warm()
        counts, bad = [0] * 4, np.full(64, np.nan, np.float32)
        watched("a", counts)

        def some():
            for number in range(10):
                rr.allreduce_(element(rr.rank(), "a", number), name="a", op=rr.Sum)
            return sum(counts)

        before = some()
        rr.start_timeline(str(path))
        rr.barrier()
        assert some() == before
        rr.stop_timeline()
        rr.check("nan:raise")
        assert some() == before
        with pytest.raises(rr.NanError, match="'a'"):
            rr.allreduce_(bad, name="a", op=rr.Sum)
        return before

    assert min(run_ranks(2, program)) > 0
    names = [each["name"] for each in json.loads(path.read_text()) if each and each.get("ph") in "BX"]
    assert names.count("ALLREDUCE") >= 10


def test_calls_are_recorded_as_their_submissions_are():
    """Same names, kinds, bytes and algorithms; and each is a wait, also what was handed over since its call began."""

    def program():
        recorder, mine = runtime.current("a test").engine.recorder, rr.rank()
        calls = [
            lambda: rr.allreduce_(element(mine, "a", 1), name="a", op=rr.Sum),
            lambda: rr.allreduce(np.ones(100), op=rr.Max),
            lambda: rr.broadcast_(np.ones(30) * mine, 1, "b"),
            lambda: rr.allgather(np.ones(20), "c"),
            lambda: rr.reducescatter(np.ones(40), "d", op=rr.Sum),
            rr.barrier,
        ]

        def steps(count):
            for _ in range(count):
                for call in calls:
                    call()
                rr.mark_step()
            return list(recorder.steps)[-count:]

        own().learn, learn = lambda *_: None, own().learn
        rr.stats()  # they are recorded from now on
        steps(WARM)
        usual = steps(1)[0]
        own().learn = learn
        steps(1)
        assert len(own()._known) == len(calls)
        counts = [0] * 4
        for name in list(own()._known):
            watched(name, counts)
            if mine == 0:
                own()._known[name].exchange.original = Hurried(own()._known[name].exchange.original)
        found = steps(20)
        for step in found:
            assert [(*each[:3], each.algorithm) for each in step.operations] == [
                (*each[:3], each.algorithm) for each in usual.operations
            ]
        since_s = {since_s for step in found for _, since_s, _ in step.waits}
        assert sum(each.submitted_s in since_s for step in found for each in step.operations) == sum(counts)
        return counts

    impatient, patient = run_ranks(2, program)
    assert patient[DONE] > 0
    assert impatient[LATE] + impatient[SUMS_LATE] > 0


def test_what_does_not_fit_goes_the_usual_way():
    """Other types, shapes, ops and scales under the name, memory that is not contiguous or read-only, other sets."""

    def program():
        warm()
        for array in (np.ones((8, 8), np.float32), np.ones(64), np.ones(1, np.float32), np.zeros(0, np.float32)):
            assert (rr.allreduce_(array.copy(), name="a", op=rr.Sum) == 2 * array).all()
        warm()
        assert rr.allreduce_(np.ones(64, np.float32), name="a")[0] == 1
        assert rr.allreduce_(np.ones(64, np.float32), name="a", op=rr.Sum, prescale_factor=2)[0] == 4
        warm()
        every_second = np.ones(128, np.float32)[::2]
        assert (rr.allreduce_(every_second, name="a", op=rr.Sum) == 2).all()
        fixed = np.ones(64, np.float32)
        fixed.flags.writeable = False
        with pytest.raises(rr.InputError, match="read-only"):
            rr.allreduce_(fixed, name="a", op=rr.Sum)
        warm()
        return True

    assert run_ranks(2, program) == [True, True]


def test_tensors_of_torch_go_this_way_beside_numpys_arrays():
    """With results of torch's on rank 0, where autograd sees what has changed."""

    def program():
        mine = rr.rank()
        made = torch.from_numpy if mine == 0 else lambda array: array
        room = made(np.empty((8, 2), np.float32))

        def ranked(count):
            return np.arange(count, dtype=np.float32).reshape(-1, 2) * (1 + mine)

        calls = {
            "a": lambda: rr.allreduce_(made(ranked(6)), name="a", op=rr.Sum),
            "b": lambda: rr.allreduce(made(ranked(6)), name="b", op=rr.Max),
            "c": lambda: rr.broadcast_(made(ranked(6)), 1, "c"),
            "d": lambda: rr.broadcast(made(ranked(6)), 0, "d"),
            "e": lambda: rr.allgather(made(ranked(4)), "e"),
            "f": lambda: rr.allgather(made(ranked(8)), "f", out=room),
            "g": lambda: rr.reducescatter(made(ranked(8)), "g", op=rr.Sum),
        }
        for _ in range(WARM):
            for call in calls.values():
                call()
        counts = [0] * 4
        for name in calls:
            watched(name, counts)
        versions = room._version if mine == 0 else 0
        found = {name: [call() for _ in range(10)] for name, call in calls.items()}
        assert counts[DONE] > 0
        if mine == 0:
            assert {type(each) for several in found.values() for each in several} == {torch.Tensor}
            assert room._version >= versions + 10
            assert all(each is room for each in found["f"])
            changed = torch.ones(3)
            before = changed._version
            rr.allreduce_(changed, name="h")
            assert changed._version == before + 1
        else:
            rr.allreduce_(np.ones(3, np.float32), name="h")
        return [[np.asarray(each) for each in several] for several in found.values()]

    ones = np.arange(8, dtype=np.float32).reshape(-1, 2)
    whole = [np.concatenate([part, 2 * part]) for part in (ones[:2], ones)]
    expected = [3 * ones[:3], 2 * ones[:3], 2 * ones[:3], ones[:3], *whole]
    for rank, found in enumerate(run_ranks(2, program)):
        for several, sums in zip(found, [*expected, 3 * ones[2 * rank :][:2]], strict=True):
            for each in several:
                np.testing.assert_array_equal(each, sums)


def test_ids_are_forgotten_all_the_time():
    """There is room for two of three names, so the least recently used one loses its id."""

    def program():
        for number in range(60):
            for name in "abbccc":
                array = element(rr.rank(), name, number)
                rr.allreduce_(array, name=name, op=rr.Sum)
                np.testing.assert_array_equal(array, element(0, name, number) + element(1, name, number))

    run_ranks(2, program, settings=Settings(cache_capacity=2))


def test_a_name_that_another_thread_calls_meanwhile_is_pending():
    def program():
        context, refused = contextvars.copy_context(), []

        def other():
            with pytest.raises(rr.InputError, match="'a'") as caught:
                rr.allreduce_async_(np.ones(64, np.float32), name="a", op=rr.Sum)
            refused.append(str(caught.value))

        def meanwhile(run, *arguments):
            thread = threading.Thread(target=context.run, args=(other,))
            thread.start()
            thread.join()
            return run(*arguments)

        warm()
        watched("a", [0] * 4, meanwhile)
        array = np.ones(64, np.float32)
        fast("a", array)
        assert array[0] == 2
        return len(refused)

    assert run_ranks(2, program) == [1, 1]


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1)])
def test_between_hosts_none_goes_this_way(hosts):
    def program():
        warm()
        return own()._known

    assert run_ranks(len(hosts), program, hosts=hosts) == [{}] * len(hosts)
