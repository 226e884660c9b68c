"""What was submitted before needs no checks; what differs from it, in whatever way, is not taken for it."""

import threading
import time

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce import runtime
from ringreduce.execution import plan
from ringreduce.negotiation import leader
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of

STEPS = range(3)  # the second and third are known


def submit_each(name, array, torch_array, root, op, **scale):
    """Every kind of call under one name; returns what each got, as lists of numbers."""
    grouped = [array, torch_array]
    found = [
        rr.allreduce(array, name=f"{name}.out", op=op, **scale),
        rr.allreduce_(array.copy(), name=f"{name}.in", op=op, **scale),
        hvd.allreduce(torch_array, name=f"{name}.torch", op=op, **scale),
        hvd.allreduce_(torch_array.clone(), name=f"{name}.torch_in", op=op, **scale),
        *rr.grouped_allreduce(grouped, name=f"{name}.group", op=op, **scale),
        *rr.grouped_allreduce_([array.copy(), torch_array.clone()], name=f"{name}.group_in", op=op, **scale),
        rr.broadcast(array, root, name=f"{name}.broadcast"),
        rr.broadcast_(torch_array.clone(), root, name=f"{name}.broadcast_in"),
        rr.allgather(array, name=f"{name}.allgather"),
        rr.reducescatter(array, name=f"{name}.reducescatter", op=rr.Sum, **scale),
    ]
    return [(each.shape, str(each.dtype), each.flatten().tolist()) for each in found]


def expected(array, torch_type, root, op, **scale):
    """As `submit_each`, of two ranks whose arrays are `array` and three times it."""
    scaled = array * np.prod([*scale.values()], dtype=array.dtype)
    total = scaled * (4 if op is rr.Sum else 2)
    mine, rooted = rr.rank() * array.shape[0] // 2, array * (1, 3)[root]
    numpy_type, half = str(array.dtype), array.shape[0] // 2
    whole = (array.shape, numpy_type, total.ravel().tolist())
    of_torch = (array.shape, torch_type, total.ravel().tolist())
    rows = (2 * array.shape[0], *array.shape[1:])
    part = (scaled * 4)[mine : mine + half]
    return [
        *([whole] * 2),
        *([of_torch] * 2),
        *([whole, of_torch] * 2),
        (array.shape, numpy_type, rooted.ravel().tolist()),
        (array.shape, torch_type, rooted.ravel().tolist()),
        (rows, numpy_type, [*array.ravel().tolist(), *(array * 3).ravel().tolist()]),
        (part.shape, numpy_type, part.ravel().tolist()),
    ]


@each_rank_of(2)
def test_every_kind_of_call_that_comes_again_in_another_way_gets_its_own_result():
    ramp = np.arange(12, dtype=np.float32)
    variants = [
        (ramp, torch.float32, 0, rr.Sum),
        (ramp, torch.float32, 0, rr.Average),  # another op
        *((ramp, torch.float32, 0, rr.Average, {f"{when}scale_factor": 0.5}) for when in ("pre", "post")),
        (ramp, torch.float32, 1, rr.Average),  # another root
        (ramp.reshape(6, 2), torch.float32, 1, rr.Average),  # other shapes
        (ramp.reshape(2, 6), torch.float32, 1, rr.Average),
        (ramp[:8], torch.float32, 1, rr.Average),
        (ramp.astype(np.float64), torch.float64, 1, rr.Average),  # other types
        (ramp.astype(np.float16), torch.bfloat16, 1, rr.Average),
        (np.asfortranarray(ramp.reshape(6, 2)), torch.float32, 1, rr.Average),  # other layouts
        (np.repeat(ramp, 2)[::2], torch.float32, 1, rr.Average),
        (ramp, torch.float32, 0, rr.Sum),
    ]
    for array, torch_type, root, op, *scales in variants:
        mine = array * (1 + 2 * rr.rank())
        tensor = torch.from_numpy(mine.astype(np.float32)).to(torch_type)
        for _ in STEPS:
            found = submit_each("w", mine, tensor, root, op, **dict(*scales))
            assert found == expected(array, str(torch_type), root, op, **dict(*scales))


def frozen():
    array = np.ones(3, np.float32)
    array.setflags(write=False)
    return array


WRONG_AFTER_KNOWN = {
    "read-only": (
        lambda: rr.allreduce_(np.ones(3, np.float32), name="w"),
        lambda: rr.allreduce_(frozen(), name="w"),
        "read-only",
    ),
    "a 0-d tensor": (
        lambda: rr.reducescatter(np.ones(2), name="w"),
        lambda: rr.reducescatter(np.float64(1), name="w"),
        "0-d tensor",
    ),
    "a 0-d tensor for rows": (
        lambda: rr.allgather(np.ones(2), name="w"),
        lambda: rr.allgather(np.float64(1), name="w"),
        "0-d tensor",
    ),
    "an out that is a part of the tensor": (
        lambda: rr.allgather(np.ones(4)[:1], name="w", out=np.empty(2)),
        lambda: (lambda whole: rr.allgather(whole[:1], name="w", out=whole[:2]))(np.ones(4)),
        "share memory|in common|overlap|pass another array as out",
    ),
    "an out of another type": (
        lambda: rr.reducescatter(np.ones(4), name="w", out=np.empty(2)),
        lambda: rr.reducescatter(np.ones(4), name="w", out=np.empty(2, np.float32)),
        "out is float32 on cpu; expected float64",
    ),
    "no op of bool": (
        lambda: rr.allreduce(np.ones(2, np.uint8), name="w", op=rr.Sum),
        lambda: rr.allreduce(np.ones(2, bool), name="w", op=rr.Average),
        "bool elements cannot be averaged",
    ),
    "sparse": (
        lambda: hvd.allreduce_(torch.ones(3), name="w"),
        lambda: rr.allreduce_(torch.ones(3).to_sparse(), name="w"),
        "not dense",
    ),
    "no rank": (
        lambda: rr.broadcast(np.ones(3), 1, name="w"),
        lambda: rr.broadcast(np.ones(3), 1.0, name="w"),
        "root_rank='1.0'; expected a rank",
    ),
    "a process set that is no more": (
        lambda: rr.allgather(np.ones(3), name="w"),
        lambda: rr.allgather(np.ones(3), name="w", process_set=rr.ProcessSet([0, 1])),
        "was not added, or was removed",
    ),
}


@pytest.mark.parametrize(("first", "second", "message"), WRONG_AFTER_KNOWN.values(), ids=WRONG_AFTER_KNOWN)
@each_rank_of(2)
def test_what_is_wrong_is_refused_though_its_name_is_known(first, second, message):
    for _ in STEPS:
        first()
    for _ in STEPS:
        with pytest.raises(rr.InputError, match=message):
            second()
    first()


@each_rank_of(2)
def test_a_view_whose_memory_holds_other_values_is_not_taken_for_what_is_known():
    for step in range(12):
        tensor = torch.full((3,), 1 + 2j) * (1 + hvd.rank())
        given = tensor.conj() if step % 4 == 3 else tensor
        assert rr.allreduce_(given, name="w", op=rr.Sum) is given
        assert tensor.tolist() == [3 + 6j] * 3


def test_what_is_known_is_one_engines_and_holds_no_array():
    def program():
        array = np.ones(3)
        rr.allreduce_(array, name="w")
        plans = runtime.current("a test").engine.submitting._plans
        known = [*plans._plans, *(described for described, _ in plans._last.values())]
        kinds = sorted({tuple(each[1:3]) for each in known if each[2] == "w"})
        return kinds, any(isinstance(part, np.ndarray) for each in known for part in each)

    assert run_ranks(2, program) == run_ranks(2, program) == [([("allreduce", "w")], False)] * 2


def test_plans_that_were_dropped_are_made_anew_and_counted_by_the_same_ids(monkeypatch):
    """Also of calls under way; and of two equal names, one of a set and one of a user's `unnamed`."""
    monkeypatch.setattr(plan, "MOST_PLANS", 3)

    def program():
        engine, evens = runtime.current("a test").engine, rr.add_process_set([0, 2])
        found = []
        for step in STEPS:
            handles = [rr.allreduce_async(np.full(2, k + step), name=f"w{k}", op=rr.Sum) for k in range(5)]
            handles += [rr.allreduce_async(np.full(2, 7), op=rr.Sum), rr.allreduce_async(np.full(2, 8), name="unnamed")]
            if rr.rank() != 1:
                handles.append(rr.allreduce_async(np.ones(2), name="w0", op=rr.Sum, process_set=evens))
            found.append([each.wait().tolist()[0] for each in handles])
            assert len(engine.submitting._plans._plans) <= 3
        return found, engine.negotiation.known_submissions

    settings = Settings(dynamic_process_sets=True)
    for rank, (found, known) in enumerate(run_ranks(3, program, settings=settings)):
        assert found == [[*(3 * (k + step) for k in range(5)), 21, 8, *[2] * (rank != 1)] for step in STEPS]
        assert known >= 2 * 6


@pytest.mark.timeout(60)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 1], [0, 1, 2]], ids=["one host", "two hosts", "hosts in a row"])
def test_calls_without_a_name_that_differ_are_found_soon(monkeypatch, hosts, odd, known):
    """Whether the ranks have counted ids or sent records, and no stall is ever looked for."""
    monkeypatch.setattr(leader, "FAN_OUT", 1)

    def program():
        for _ in range(3):
            rr.allreduce(np.ones(3))
            if known:
                rr.barrier()
        for _ in range(2):
            with pytest.raises(
                rr.MismatchError, match=r"rank . of 3, (allreduce of an unnamed tensor|barrier) .*; all ranks must"
            ):
                rr.barrier() if rr.rank() == odd else rr.allreduce(np.ones(3))
        assert rr.allreduce(np.ones(3), op=rr.Sum).tolist() == [3, 3, 3]

    run_ranks(3, program, hosts=hosts, settings=Settings(stall_check_s=0, stall_abort_s=300))


@pytest.mark.parametrize(("hosts", "messages"), [([0, 0, 0], 0), ([0, 1, 2], 4)], ids=["one host", "three hosts"])
def test_a_known_call_without_a_name_beside_a_slow_rank_costs_no_more_messages(hosts, messages):
    """Up to the root and down from it, one for each other host."""
    counted = threading.Barrier(3)

    def program():
        mailbox = runtime.current("a test").engine.mailbox
        for _ in range(3):
            rr.allreduce(np.ones(3))
        rr.allreduce(np.ones(3), name="all are here")
        before = mailbox.messages
        for _ in range(3):
            if rr.rank() == 2:
                time.sleep(0.3)  # far longer than a call whose signature another rank does not have
            rr.allreduce(np.ones(3))
        sent = mailbox.messages - before
        counted.wait()  # none leaves before
        return sent

    assert sum(run_ranks(3, program, hosts=hosts)) == 3 * messages
