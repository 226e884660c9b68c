"""Short known operations in the caller's thread: results beside ranks that submit them; what goes the usual way."""

import contextvars
import functools
import json
import random
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.api.control import barrier_async
from ringreduce.api.process_sets import set_of
from ringreduce.collectives import compiled
from ringreduce.engine.express import DONE, LATE, SUMS_LATE
from ringreduce.kernels import native
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.express import WARM, Counting, element, fast, hurried, known, own, values, warm, watched
from tests.support.tiers import SEEDS

pytestmark = [
    pytest.mark.usefixtures("more_patience"),
    pytest.mark.timeout(60),
    pytest.mark.skipif(native.module is None, reason=f"the compiled module: {native.MISSING}"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_the_same_whichever_way_each_rank_takes(size, seed):
    """Names in any order of the ranks' own; some ranks are late; some calls differ, so ids are forgotten in between."""
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
@pytest.mark.parametrize("seed", SEEDS)
def test_all_kinds_whichever_way_each_rank_takes(size, seed):
    """In the program's order, since some have no name; each rank calls or submits, and is late now and then."""
    shared = random.Random(seed)
    operations = [some_operation(shared, size) for _ in range(12)]
    order = [shared.choice(operations) for _ in range(250)]

    def program():
        mine, counts = random.Random(f"{seed} {rr.rank()}"), {}
        for number, (call, submit, options, count, name, expected) in enumerate(order):
            for each in own().programs._by_call.values():
                if not isinstance(each.run, Counting):
                    each.run = Counting(each.run, counts.setdefault(each.plan.signature.kind, [0] * 4))
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


@pytest.fixture
def late_pieces(monkeypatch):
    """Ranks are late with the pieces on which all have agreed: for each, by a function that its test sets."""
    begin, is_late = compiled.allreduce, {}

    def sometimes_late(sources, targets, region, *others):
        time.sleep(0.005 * is_late.get(region.rank, bool)())
        return begin(sources, targets, region, *others)

    monkeypatch.setattr(compiled, "allreduce", sometimes_late)
    return is_late


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_sums_in_pieces_whichever_way_each_rank_takes(late_pieces, size, seed):
    """All have agreed on each of them first; who is late afterwards, as much as before, gets and gives the same."""
    shared = random.Random(seed)
    order = [(shared.choice([1500, 3001, 20_000]), shared.choice([rr.Sum, rr.Max])) for _ in range(100)]

    def program():
        rank, mine, counts, rest = rr.rank(), random.Random(f"{seed} {rr.rank()}"), [0] * 4, []
        hand_over = own()._hand_over
        own()._hand_over = lambda *given: (rest.append(given[2]), hand_over(*given))[1]
        late_pieces[rank] = lambda: mine.random() < 0.05
        for number, (count, op) in enumerate(order):
            for each in own().programs._by_call.values():
                if not isinstance(each.run, Counting):
                    assert each.in_pieces
                    each.run = Counting(each.run, counts)
            time.sleep(0.003 * (mine.random() < 0.05))
            parts = [values(each, number, count) for each in range(size)]
            name, total = f"{op.name}{count}", sum(parts) if op is rr.Sum else max_of(parts)
            array = np.repeat(parts[rank], 2)[::2] if number % 7 == 0 else parts[rank].copy()
            how = mine.randrange(4)
            if how == 0:
                result = rr.allreduce_async(array, name=name, op=op).wait()
            elif how == 1:
                result = rr.allreduce_(array, name=name, op=op)
                assert result is array
            else:
                result = rr.allreduce(array, name=name, op=op)
                np.testing.assert_array_equal(array, parts[rank])
            np.testing.assert_array_equal(result, total, strict=True)
        return counts, rest

    found = run_ranks(size, program, timeout_s=40, settings=Settings(shared_slot_bytes=1 << 13))
    assert sum(counts[DONE] for counts, _ in found) > 10, found
    assert sum(SUMS_LATE in rest for _, rest in found) > 0, found


def test_pieces_into_what_cannot_be_written_are_refused_before_anybody_agrees():
    def program():
        ones, fixed = np.ones(3000), np.ones(3000)
        fixed.flags.writeable = False
        for number in range(4 * WARM):
            rr.allreduce_(ones, name="x", op=rr.Max)
            if number > 2 * WARM and rr.rank() == 1:
                with pytest.raises(rr.UnsupportedArrayError, match="a read-only array cannot be changed in place"):
                    rr.allreduce_(fixed, name="x", op=rr.Max)
        return [each.in_pieces for each in own().programs._by_call.values()]

    assert run_ranks(2, program, settings=Settings(shared_slot_bytes=1 << 13)) == [[True]] * 2


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("most", [3, 40_000])
def test_rows_that_differ_now_and_then_are_gathered_all_the_same(size, most):
    """Those who know an allgather of equal rows find others' in the slot, or that these have no room there."""

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


@pytest.mark.parametrize("past", [0, 1])
def test_an_allgather_that_fills_a_slot_goes_this_way(past):
    """The number of its rows takes none of the slot; with an element more it takes several."""
    slot_bytes = 1 << 12

    def program():
        for number in range(2 * WARM):
            parts = [values(rank, number, slot_bytes // 8 + past) for rank in range(3)]
            np.testing.assert_array_equal(rr.allgather(parts[rr.rank()], "a"), np.concatenate(parts))
        return list(known())

    assert run_ranks(3, program, settings=Settings(shared_slot_bytes=slot_bytes)) == [[] if past else ["a"]] * 3


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
    totals, meet = [[0] * 4, [0] * 4], threading.Barrier(2, timeout=30)

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

        programs = own().programs
        programs.learn, learn = lambda *_: None, programs.learn
        rr.stats()  # they are recorded from now on
        steps(WARM)
        usual = steps(1)[0]
        programs.learn = learn
        steps(1)
        assert len(programs._by_call) == len(known()) == len(calls)
        counts, found = totals[mine], []
        for name, each in known().items():
            watched(name, counts)
            if mine == 0:
                hurried(each)
        for _ in range(50):  # until each rank was fast, and late: other programs may have the cores
            found += steps(20)
            meet.wait()
            impatient, patient = totals
            enough = patient[DONE] > 0 and impatient[LATE] + impatient[SUMS_LATE] > 0
            meet.wait()
            if enough:
                break
        for step in found:
            assert [(*each[:3], each.algorithm) for each in step.operations] == [
                (*each[:3], each.algorithm) for each in usual.operations
            ]
        since_s = {since_s for step in found for _, since_s, _ in step.waits}
        assert sum(each.submitted_s in since_s for step in found for each in step.operations) == sum(counts)
        assert enough, totals

    run_ranks(2, program)


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


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1)])
def test_each_process_set_on_one_host_goes_this_way(hosts, late):
    """Sets overlap, each rank calls them in an order of its own; some wait for nobody, and submit what is late."""

    def program():
        mine, counts, rank = random.Random(rr.rank()), {}, rr.rank()
        ours = [set_of(members) for members in chain if rank in members]
        for number in range(WARM + 40):
            for process_set in (*mine.sample(ours, len(ours)), rr.global_process_set):
                name, members = f"of {process_set.process_set_id}", process_set.ranks
                kinds = {"sum": sum, "gathered": np.concatenate, "root": lambda parts: parts[-1]}
                with_name = {kind: f"{name} {kind}" for kind in kinds}
                for key in with_name.values():
                    watched(key, counts.setdefault(key, [0] * 4))
                    if late and rank % 2 and number == WARM and key in known():
                        hurried(known()[key])
                own = values(rank, number, 64)
                results = {
                    "sum": rr.allreduce_(own.copy(), name=with_name["sum"], op=rr.Sum, process_set=process_set),
                    "gathered": rr.allgather(own, with_name["gathered"], process_set=process_set),
                    "root": rr.broadcast(own, members[-1], with_name["root"], process_set=process_set),
                }
                parts = [values(each, number, 64) for each in members]
                for kind, expected in kinds.items():
                    np.testing.assert_array_equal(results[kind], expected(parts), strict=True)
                rr.barrier(process_set)
        return set(known()) - {"barrier"}, counts

    chain = [0, 1], [1, 2], [2, 3]
    sets = range(4), *chain
    regions = Settings(fusion_buffer_bytes=1 << 20, fusion_slot_bytes=1024, shared_slot_bytes=4096)  # one for each set
    found = run_ranks(4, program, hosts=hosts, process_sets=chain, timeout_s=40, settings=regions)
    for rank, (names, _) in enumerate(found):
        on_a_host = [k for k, each in enumerate(sets) if rank in each and len({hosts[member] for member in each}) == 1]
        assert names == {f"of {number} {kind}" for number in on_a_host for kind in ("sum", "gathered", "root")}
    ends = np.sum([each for _, counts in found for each in counts.values()], axis=0)
    assert ends[DONE] > 0, ends
    assert ends[LATE] + ends[SUMS_LATE] > 0 or not late, ends


def test_a_set_that_was_removed_is_unknown_and_its_memory_serves_another():
    def program():
        mine = np.arange(64.0) + rr.rank()
        for _ in range(3):
            added = rr.add_process_set([0, 1])
            if added.included():
                for _ in range(WARM):
                    array = mine.copy()
                    rr.allreduce_(array, name="a", op=rr.Sum, process_set=added)
                    np.testing.assert_array_equal(array, 2 * np.arange(64.0) + 1)
                assert known()["a"].state.number == added.process_set_id
            number = added.process_set_id
            assert rr.remove_process_set(added)
            added.process_set_id = number  # as in a copy that somebody has kept
            with pytest.raises(rr.InputError, match=f"process set {number}"):
                rr.allreduce_(mine.copy(), name="a", op=rr.Sum, process_set=added)
        return True

    assert run_ranks(3, program, settings=Settings(dynamic_process_sets=True)) == [True] * 3


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1)])
def test_between_hosts_none_goes_this_way(hosts):
    def program():
        warm()
        return known()

    assert run_ranks(len(hosts), program, hosts=hosts) == [{}] * len(hosts)
