"""A random job: hundreds of named tensors of all kinds, in another order on each rank, from several threads.

Every rank makes the same plan from the seed: steps of tensors, which come again from step to step with other data and
now and then another shape; some are submitted wrongly by one rank. What each must become is computed independently.
See tests/ranks/engine/test_random.py.
"""

import contextvars
import dataclasses
import random
import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from tests.support.reference import assert_reduced, data, legal

OPS = [rr.Sum, rr.Average, rr.Min, rr.Max, rr.Product]
KINDS = ["allreduce", "allreduce", "allreduce in place", "group", "broadcast", "allgather", "alltoall", "reducescatter"]


@dataclasses.dataclass
class Tensor:
    """One name of a plan, in one step."""

    name: str
    kind: str
    dtype: str
    op: rr.ReduceOp
    shape: tuple[int, ...]
    ranks: list[int]  # that submit it, rising: a process set, or the ranks that have not joined
    number: int  # of the process set
    root: int
    seed: int
    odd: int | None = None  # the rank that submits another shape, if any: all get a MismatchError

    def arrays(self, rank):
        """The arrays of a rank."""
        shape = self.shape
        if self.kind == "allgather":
            shape = ((rank + self.seed) % 3, *shape[1:])
        if rank == self.odd:
            shape = (*shape, 2)
        counts = range(self.seed % 4) if self.kind == "group" else [0]
        return [data(self.dtype, int(np.prod(shape)), rank, self.seed + k).reshape(shape) for k in counts]


def tensors(plan, sets, size, count):
    """What the steps of a plan have in common."""
    drawn = []
    for number in range(count):
        kind, dtype = plan.choice(KINDS), plan.choice(list(TABLE))
        ops = [op for op in (OPS[:2] if kind == "reducescatter" else OPS) if legal(op, dtype)]
        process_set = plan.choice([0, 0, *range(1, len(sets) + 1)])
        ranks = sets[process_set - 1] if process_set else list(range(size))
        shape = (plan.choice([0, 1, 3, 8, 40]) * (len(ranks) if kind == "alltoall" else 1), plan.choice([1, 3]))
        drawn.append(
            Tensor(f"t{number}", kind, dtype, plan.choice(ops), shape, ranks, process_set, plan.choice(ranks), number)
        )
    return drawn


def step_of(plan, drawn, step, mistakes):
    """This step's tensors: other data, now and then another shape or a mistake."""
    for tensor in drawn:
        if plan.random() < 0.05:
            tensor.shape = (tensor.shape[0], tensor.shape[1] + 1)
    chosen = drawn if step % 3 else plan.sample(drawn, len(drawn) * 2 // 3)
    made = [dataclasses.replace(each, seed=each.seed + 1000 * step) for each in chosen]
    for tensor in made:
        if mistakes and len(tensor.ranks) > 1 and plan.random() < 0.04:
            tensor.odd = plan.choice(tensor.ranks)
            tensor.seed += tensor.kind == "group" and tensor.seed % 4 == 0  # an empty group cannot be wrong
    return made


def begin(tensor, arrays):
    """Submit a tensor; its handle."""
    process_set = rr.global_process_set
    if tensor.number:
        process_set = rr.ProcessSet(tensor.ranks)
        process_set.process_set_id = tensor.number
    where = {"name": tensor.name, "process_set": process_set}
    match tensor.kind:
        case "allreduce":
            return rr.allreduce_async(arrays[0], op=tensor.op, **where)
        case "allreduce in place":
            return rr.allreduce_async_(arrays[0], op=tensor.op, **where)
        case "group":
            return rr.grouped_allreduce_async(arrays, op=tensor.op, **where)
        case "broadcast":
            return rr.broadcast_async(arrays[0], tensor.root, **where)
        case "allgather":
            return rr.allgather_async(arrays[0], **where)
        case "alltoall":
            return rr.alltoall_async(arrays[0], **where)
        case "reducescatter":
            return rr.reducescatter_async(arrays[0], op=tensor.op, **where)


def check(tensor, handle, size):
    """Wait for it, and compare with what it must be."""
    if tensor.odd is not None:
        with pytest.raises(rr.MismatchError, match=rf"'{tensor.name}(\.\d)?'"):
            rr.synchronize(handle)
        return
    result = rr.synchronize(handle)
    everyones = [tensor.arrays(rank) for rank in tensor.ranks]
    me = tensor.ranks.index(rr.rank())
    match tensor.kind:
        case "broadcast":
            np.testing.assert_array_equal(result, tensor.arrays(tensor.root)[0])
        case "allgather":
            np.testing.assert_array_equal(result, np.concatenate([arrays[0] for arrays in everyones]))
        case "alltoall":
            rows = tensor.shape[0] // len(tensor.ranks)
            parts = [arrays[0][me * rows : (me + 1) * rows] for arrays in everyones]
            np.testing.assert_array_equal(result, np.concatenate(parts))
        case "reducescatter":
            parts = [np.array_split(arrays[0], len(tensor.ranks))[me] for arrays in everyones]
            assert_reduced(result, tensor.op, parts)
        case _:
            check_reduced(tensor, result if tensor.kind == "group" else [result], everyones, size)


def check_reduced(tensor, results, everyones, size):
    """The others, those that have joined, give nothing; but an Average is divided by all."""
    assert len(results) == len(everyones[0])
    for number, result in enumerate(results):
        arrays = [each[number] for each in everyones]
        if not tensor.number and tensor.op is rr.Average:
            arrays += [np.zeros_like(arrays[0])] * (size - len(arrays))
        assert_reduced(result, tensor.op, arrays)


def run_step(order, made, threads, size):
    """Submit a step's tensors in this rank's own order, from several threads; wait in yet another order."""
    mine = [tensor for tensor in made if rr.rank() in tensor.ranks]
    order.shuffle(mine)
    handles = {}
    failures = []

    def submit(share):
        try:
            for tensor in share:
                handles[tensor.name] = begin(tensor, [array.copy() for array in tensor.arrays(rr.rank())])
        except BaseException as exc:
            failures.append(exc)

    shares = [mine[k::threads] for k in range(threads)]
    # a thread that a threaded rank starts is in no world, unless it takes over its context
    helpers = [
        threading.Thread(target=contextvars.copy_context().run, args=(submit, share), daemon=True)
        for share in shares[1:]
    ]
    for helper in helpers:
        helper.start()
    submit(shares[0])
    for helper in helpers:
        helper.join()
    assert not failures, failures
    order.shuffle(mine)
    for tensor in mine:
        check(tensor, handles[tensor.name], size)


def tail(plan, size, sets, epoch):
    """Steps of allreduces that each rank takes a different number of, before it joins: who takes how many, and what."""
    lengths = [plan.randint(0, 4) for _ in range(size)]
    kinds = ("allreduce", "allreduce in place", "group")
    drawn = [each for each in tensors(plan, sets, size, 12) if each.kind in kinds]
    for each in drawn:
        each.name = f"tail.{each.name}"
    steps = []
    for step in range(max(lengths)):
        live = [rank for rank in range(size) if lengths[rank] > step]
        made = step_of(plan, drawn, 100 * (epoch + 1) + step, mistakes=False)
        own = [each for each in made if each.number and set(each.ranks) <= set(live)]
        steps.append([*own, *(dataclasses.replace(each, ranks=live) for each in made if not each.number)])
    return lengths, steps


def in_a_fixed_order(plan, size, epoch):
    """What makes its caller wait: the same order on all ranks; some of it without names."""
    for _ in range(plan.randint(0, 3)):
        root = plan.randrange(size)
        assert rr.broadcast_object(("of", rr.rank(), epoch), root) == ("of", root, epoch)
        assert rr.allgather_object(rr.rank() * "z", name="zs") == [rank * "z" for rank in range(size)]
        rr.barrier()
        assert rr.allreduce(np.float64(rr.rank() + epoch), op=rr.Max) == size - 1 + epoch


def storm(seed, sets, epochs=2, steps=4, count=40):
    """The whole job on this rank; `sets` are the members of process sets 1, 2, … Returns the tensors it waited for."""
    plan, order = random.Random(seed), random.Random(1000 * seed + rr.rank())
    size = rr.size()
    drawn = tensors(plan, sets, size, count)
    waited = 0
    for epoch in range(epochs):
        for step in range(steps):
            made = step_of(plan, drawn, 10 * epoch + step, mistakes=True)
            run_step(order, made, order.randint(1, 4), size)
            waited += len(made)
            in_a_fixed_order(plan, size, epoch)
        lengths, ragged = tail(plan, size, sets, epoch)
        for made in ragged[: lengths[rr.rank()]]:
            run_step(order, made, order.randint(1, 3), size)
            waited += len(made)
        last = rr.join()
        common = [step for step, made in enumerate(ragged) if any(tensor.number == 0 for tensor in made)]
        assert lengths[last] > max(common, default=-1), "that step ran when all ranks without it had joined"
        assert rr.allgather_object(last) == [last] * size
    return waited
