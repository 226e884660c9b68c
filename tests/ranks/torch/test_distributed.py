"""The torch.distributed backend "ring", on real ranks: each operation, its errors, groups, futures, and DDP."""

import datetime
import functools
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ringreduce as rr
from ringreduce import runtime
from ringreduce.torch import ddp_hook
from ringreduce.torch.distributed import RingProcessGroup
from tests.support.tiers import extended
from tests.support.world import on_a_pool


def on_ring(program, folder, backend="ring"):
    """The program between init_process_group and destroy_process_group; it takes the rank and the size."""

    def between():
        import ringreduce.torch.distributed  # noqa: F401

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=size)
        try:
            return program(rank, size)
        finally:
            dist.destroy_process_group()

    return between


def mine(rank, count=6, dtype=torch.float32):
    return (torch.arange(count) * (rank + 1) + 10 * rank).to(dtype)


def equal(found, expected):
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), f"{found} is not {expected}"


def reductions(rank, size):
    everyones = [mine(each) for each in range(size)]
    integers = [mine(each, dtype=torch.int32) for each in range(size)]
    ops = {
        dist.ReduceOp.SUM: sum(everyones),
        dist.ReduceOp.AVG: sum(everyones) / size,
        dist.ReduceOp.PRODUCT: torch.stack(everyones).prod(0),
        dist.ReduceOp.MIN: torch.stack(everyones).amin(0),
        dist.ReduceOp.MAX: torch.stack(everyones).amax(0),
    }
    bits = {dist.ReduceOp.BAND: "bitwise_and", dist.ReduceOp.BOR: "bitwise_or", dist.ReduceOp.BXOR: "bitwise_xor"}
    for op, expected in ops.items():
        found = mine(rank)
        dist.all_reduce(found, op)
        assert torch.allclose(found, expected), op
    for op, name in bits.items():
        found = mine(rank, dtype=torch.int32)
        dist.all_reduce(found, op)
        equal(found, functools.reduce(getattr(torch, name), integers))
    found = mine(rank)
    dist.all_reduce(found, dist._make_nccl_premul_sum(0.5))
    equal(found, sum(everyones) * 0.5)
    with pytest.raises(ValueError, match="float32 elements have no bits to combine: op=BitwiseAnd is for integers"):
        dist.all_reduce(mine(rank), dist.ReduceOp.BAND)


def again_and_again(rank, size):
    """Short operations that are known take the lane, beside others and of any layout."""
    lane = dist.group.WORLD._get_backend(torch.device("cpu")).channel._lane
    taken, run = [], lane.run
    lane.run = lambda *arguments: taken.append(run(*arguments)) or taken[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringreduce.execution.lane.PATIENCE_US", 1_000_000)  # for ranks that are late on busy cores
        _again_and_again(rank, size)
    assert sum(taken) > 40
    channel, tensor = rr.ordered(), mine(rank)
    for _ in range(3):
        channel.allreduce_(tensor=tensor, op=rr.Max)  # a tensor can be hashed, and is no part of what is known
    equal(tensor, mine(size - 1))


def _again_and_again(rank, size):
    for number in range(40):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            found, other = mine(rank + number, dtype=dtype), mine(rank + number, dtype=dtype)[::2]
            work = dist.all_reduce(mine(rank, 5000), async_op=True) if number % 7 == 3 else None
            dist.all_reduce(found)
            equal(found, sum(mine(each + number, dtype=dtype).double() for each in range(size)).to(dtype))
            dist.broadcast(other, number % size)
            equal(other, mine(number % size + number, dtype=dtype)[::2])
            dist.barrier()
            if work is not None:
                work.wait()


def layouts(rank, size):
    total = sum(range(1, size + 1))
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.complex64):
        found = mine(rank, dtype=dtype)
        dist.all_reduce(found)
        equal(found, sum(mine(each, dtype=dtype) for each in range(size)))
    transposed = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)
    dist.all_reduce(transposed)
    equal(transposed, torch.arange(6.0).reshape(2, 3).t() * total)
    every_other = torch.arange(8.0) * (rank + 1)
    dist.all_reduce(every_other[::2])
    equal(every_other[::2], torch.arange(8.0)[::2] * total)
    equal(every_other[1::2], torch.arange(8.0)[1::2] * (rank + 1))
    scalar, nothing = torch.tensor(rank + 1.0), torch.empty(0)
    dist.all_reduce(scalar)
    dist.all_reduce(nothing)
    equal(scalar, torch.tensor(float(total)))
    long = torch.full((3_000_001,), rank + 1.0)
    dist.all_reduce(long)
    assert (long == total).all()
    flags = torch.tensor([rank == 0, True, False])
    for op, expected in ((dist.ReduceOp.BOR, [True, True, False]), (dist.ReduceOp.BAND, [False, True, False])):
        found = flags.clone()
        dist.all_reduce(found, op)
        equal(found, torch.tensor(expected))
    parameter = torch.nn.Parameter(torch.ones(2) * (rank + 1))
    dist.broadcast(parameter, 1)
    assert parameter.tolist() == [2, 2]


def sparse(rank, size):
    indices = torch.arange(rank + 1)
    found = torch.sparse_coo_tensor(
        indices[None], (indices + 1.0)[:, None].expand(-1, 2), (size + 1, 2), check_invariants=True
    )
    expected = sum(
        torch.cat([torch.arange(each + 1) + 1.0, torch.zeros(size - each)])[:, None].expand(-1, 2)
        for each in range(size)
    )
    dist.all_reduce(found)
    equal(found.to_dense(), expected)


def gathers(rank, size):
    everyones = [mine(each) for each in range(size)]
    outputs = [torch.empty(6) for _ in range(size)]
    dist.all_gather(outputs, mine(rank))
    for found, expected in zip(outputs, everyones, strict=True):
        equal(found, expected)
    whole = torch.empty(6 * size)
    whole[6 * rank : 6 * rank + 6] = mine(rank)
    dist.all_gather_single(whole, whole[6 * rank : 6 * rank + 6])
    equal(whole, torch.cat(everyones))
    scattered = torch.empty(6)
    dist.reduce_scatter_single(scattered, torch.cat([mine(rank) * (each + 1) for each in range(size)]))
    equal(scattered, sum(everyones) * (rank + 1))
    for count in (0, 3):
        columns = torch.zeros(3, size).t()[:, :count]  # not contiguous, or nothing
        dist.all_gather(list(columns), torch.full((count,), 1j * rank).imag)
        equal(columns, torch.arange(size, dtype=torch.float32)[:, None].expand(-1, count))
    group, pair = dist.group.WORLD, [mine(rank), torch.full((2,), rank + 0.5)]
    wholes = [torch.empty(6 * size), torch.empty(2 * size)]
    group.all_gather_single_coalesced(wholes, pair).wait()
    equal(wholes[0], torch.cat(everyones))
    equal(wholes[1], torch.arange(size).repeat_interleave(2) + 0.5)
    parts = [[torch.empty(6), torch.empty(2)] for _ in range(size)]
    group.allgather_coalesced(parts, pair).wait()
    equal(torch.cat([first for first, _ in parts]), wholes[0])
    equal(torch.cat([second for _, second in parts]), wholes[1])
    group.reduce_scatter_single_coalesced(pair, [each * (rank + 1) for each in wholes]).wait()
    equal(pair[0], everyones[rank] * sum(range(1, size + 1)))
    equal(pair[1], torch.full((2,), (rank + 0.5) * sum(range(1, size + 1))))
    group.allreduce_coalesced([]).wait()
    group.allreduce_coalesced(pair).wait()
    equal(pair[1], torch.full((2,), sum(each + 0.5 for each in range(size)) * sum(range(1, size + 1))))
    uneven = torch.empty(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((each + 1,), float(rank + each)) for each in range(size)])
    equal(uneven, torch.full((rank + 1,), sum(range(size)) + float(size * rank)))
    for root in range(size):
        at_root = [torch.empty(6) for _ in range(size)] if rank == root else None
        dist.gather(mine(rank), at_root, root)
        for found, expected in zip(at_root or (), everyones, strict=False):
            equal(found, expected)
        part = torch.empty(6)
        dist.scatter(part, [mine(each) * (root + 1) for each in range(size)] if rank == root else None, root)
        equal(part, mine(rank) * (root + 1))
        reduced = mine(rank)
        dist.reduce(reduced, root)
        equal(reduced, sum(everyones) if rank == root else mine(rank))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    assert [each["rank"] for each in objects] == list(range(size))


def exchanges(rank, size):
    found = torch.empty(size)
    dist.all_to_all_single(found, torch.arange(size) + 10.0 * rank)
    equal(found, torch.arange(size) * 10.0 + rank)
    rows = torch.full((sum(range(1, size + 1)), 2), float(rank))
    found = torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(found, rows, [rank + 1] * size, list(range(1, size + 1)))
    equal(found, torch.cat([torch.full((rank + 1, 2), float(each)) for each in range(size)]))
    again = torch.empty_like(found)
    dist.all_to_all_single(again, rows, np.full(size, rank + 1, np.int32), torch.arange(1, size + 1))
    equal(again, found)
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((each + 1,), 10.0 * rank + each) for each in range(size)])
    for source, found in enumerate(outputs):
        equal(found, torch.full((rank + 1,), 10.0 * source + rank))
    with pytest.raises(
        rr.MismatchError, match=r"all_to_all 'group .*rank \d sends \d elements to rank \d, which expec"
    ):
        dist.all_to_all_single(
            torch.empty(2 * size), torch.empty(size + (rank > 0)), [2] * size, [1 + (rank > 0)] + [1] * (size - 1)
        )


def messages(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.full((1_000_000,), rank + 10.0 * tag), right, tag=tag) for tag in (1, 2, 3)]
    first = torch.empty(1_000_000)
    for tag in (3, 2, 1):
        dist.recv(first, left, tag=tag)
        assert (first[0], first[-1]) == (left + 10 * tag, left + 10 * tag)
    for each in sends:
        each.wait()
    if rank == 0:
        found = {}
        for _ in range(2 * (size - 1)):
            one = torch.empty(3)
            source = dist.recv(one)
            found.setdefault(source, []).append(one.tolist())
        assert found == {each: [[float(each)] * 3, [each + 0.5] * 3] for each in range(1, size)}
    else:
        dist.send(torch.full((3,), float(rank)), 0)
        dist.send(torch.full((3,), rank + 0.5), 0)
    dist.barrier()  # a message of another shape is for none of those
    tensor = torch.empty(2)
    if rank == 0:
        dist.recv(tensor, 1)  # its source waited before for any rank
        assert tensor.tolist() == [7, 7]
    elif rank == 1:
        dist.send(torch.full((2,), 7.0), 0)
    for function, kind in ((dist.send, "send"), (dist.recv, "recv")):
        with pytest.raises(rr.InputError, match=rf"^{kind} 'group .*: tag=1\d+; expected a whole number of 64 bits$"):
            function(tensor, right, tag=2**70)
    for to, source in ((right, left), (rank, rank)):
        sent, received = dist.P2POp(dist.isend, mine(rank), to), dist.P2POp(dist.irecv, first[:6], source)
        for each in dist.batch_isend_irecv([sent, received]):
            each.wait()
        equal(first[:6], mine(source))


def differences(rank, size):
    at = rf"rank {size - 1} of {size}, allreduce 'group \d+' \(test_distributed.py:\d+\): "
    with pytest.raises(
        rr.MismatchError, match=at + rf"float32\[{size + 2}\], but rank 0 has float32\[3\] \(.*equal shapes"
    ):
        dist.all_reduce(torch.ones(3 if rank < size - 1 else size + 2))
    work = dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, async_op=True)
    with pytest.raises(rr.MismatchError, match=r"op=Max, but rank 0 has op=Sum"):
        work.wait()
    assert (work.is_completed(), work.is_success()) == (True, False)
    assert "op=Max" in str(work.exception())
    with pytest.raises(rr.MismatchError, match="op=Max"):
        work.get_future().wait()
    at = r"allgather 'group \d+' \(test_distributed.py:\d+\): "
    with pytest.raises(rr.InputError, match=at + "float32 of 3 elements beside float32 of 2"):
        dist.all_gather([torch.ones(3) for _ in range(size)], torch.ones(2))
    with pytest.raises(rr.InputError, match="5 elements cannot be split equally among"):
        dist.group.WORLD.alltoall_base(torch.empty(5 * size), torch.empty(5 * size + 1)[: 5 + (size == 5)], [], [])
    after = torch.ones(2)
    dist.all_reduce(after)
    assert after.tolist() == [size, size]


def forms(rank, size):
    """Of a group's methods: one tensor in place of a list, and values in place of options."""
    group, last, minute = dist.group.WORLD, size - 1, datetime.timedelta(minutes=1)
    everyones, largest = [mine(each) for each in range(size)], mine(size - 1)
    for call, expected in (
        (lambda tensor: group.allreduce(tensor), sum(everyones)),
        (lambda tensor: group.allreduce([tensor], dist.ReduceOp.MAX), largest),
        (lambda tensor: group.allreduce(tensor, dist.ReduceOp.MAX, minute), largest),
        (lambda tensor: group.allreduce([tensor], op=dist.ReduceOp.MAX, timeout=minute), largest),
        (lambda tensor: group.broadcast(tensor, last), largest),
        (lambda tensor: group.broadcast(tensor, root=last, timeout=minute), largest),
        (lambda tensor: group.reduce(tensor, last, dist.ReduceOp.MIN), mine(0 if rank == last else rank)),
        (lambda tensor: group.reduce_scatter(tensor, everyones, dist.ReduceOp.MIN), mine(rank)),
        (lambda tensor: group.scatter(tensor, everyones if rank == last else [], last), mine(rank)),
    ):
        found = mine(rank)
        call(found).wait()
        equal(found, expected)
    for call in (
        lambda tensors: group.allgather(tensors, mine(rank), minute),
        lambda tensors: group.alltoall(tensors, [mine(rank)] * size, timeout=minute),
        lambda tensors: group.gather(tensors if rank == last else [], mine(rank), root=last),
    ):
        found = [torch.zeros(6) for _ in range(size)]
        call(found).wait()
    equal(torch.cat(found), torch.cat(everyones) if rank == last else torch.zeros(6 * size))
    whole = torch.empty(size)
    group.all_to_all_single(whole, torch.full((size,), float(rank)), [], [], minute).wait()
    equal(whole, torch.arange(size).float())
    pair = dist.new_group([0, 1])
    if rank == 0:
        with pytest.raises(rr.CollectiveError, match=r"Timed out after \d\.\d s, waiting for rank 1"):
            pair.barrier(datetime.timedelta(seconds=0.2)).wait()
    dist.barrier()


def groups(rank, size):
    pairs = [dist.new_group([each, (each + 1) % size]) for each in range(size)]
    same, alone = dist.new_group(), dist.new_group([rank], use_local_synchronization=True)
    of_another_backend = dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    works = []
    for each in reversed(range(size)):
        if rank in (each, (each + 1) % size):
            value = torch.full((2,), rank + 1.0)
            works.append((each, value, dist.all_reduce(value, group=pairs[each], async_op=True)))
    for each, value, work in works:
        work.wait()
        assert value.tolist() == [each + 1.0 + (each + 1) % size + 1] * 2
    for group, expected in ((same, size), (alone, 1), (of_another_backend, size)):
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value == expected
    root = torch.full((2,), float(rank))
    last = dist.get_group_rank(same, size - 1)
    dist.broadcast(root, size - 1, group=same)
    assert root.tolist() == [last] * 2
    backwards = RingProcessGroup(range(size)[::-1], "backwards", 20)
    root.fill_(rank)
    backwards.broadcast([root]).wait()
    assert root.tolist() == [size - 1] * 2
    if size - 1 - rank == 0:
        backwards.send([root], 1, 0).wait()
    elif size - 1 - rank == 1:
        work = backwards.recv([torch.empty(2)], 0, 0)
        assert (work.source_rank(), work.result()[0].tolist()) == (0, [size - 1] * 2)
    backwards.shutdown()
    dist.destroy_process_group(same)
    with pytest.raises(Exception, match=r"is not initialized"):
        dist.all_reduce(torch.ones(1), group=same)


def futures(rank, size):
    """They come when the result is there, and a callback may wait for the next operation."""
    value, other, seen = torch.ones(3), torch.ones(2), []
    store = dist.distributed_c10d._get_default_store()

    def then(future):
        (found,) = future.value()
        assert found is value
        seen.append(value.tolist())
        dist.all_reduce(other)
        return found + other.sum()

    if rank > 0:
        store.wait(["asked"])
    work = dist.all_reduce(value, async_op=True)
    future = work.get_future().then(then)
    if rank == 0:
        store.set("asked", "yes")
    equal(future.wait(), torch.full((3,), size + 2.0 * size))
    for number in range(200):  # whoever knows that an operation is over can take its future's value
        known = dist.all_reduce(mine(rank, 1000), async_op=True)
        future = known.get_future()
        while not (known.wait() if number % 2 else known.is_completed()):
            time.sleep(0)
        equal(future.value()[0], sum(mine(each, 1000) for each in range(size)))
    assert seen == [[size] * 3]
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)


def hooks(rank, size):
    """What their callbacks begin comes in the same order on all ranks, however late a rank is; messages cross."""
    seen = []

    def hook(begin, bucket):
        def then(future):
            number = torch.tensor([bucket.index() * (rank + 1.0)])
            dist.all_reduce(number)
            seen.append((bucket.index(), number.item()))
            return bucket.buffer()

        return begin(bucket).then(then)

    for begin in (
        lambda bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future(),
        lambda bucket: default_hooks.allreduce_hook(None, bucket),  # whose own callback need not run at once
    ):
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(6)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1e-4)
        model.register_comm_hook(begin, hook)
        for index, each in enumerate(layers):
            each.weight.register_hook(lambda _, late=(index + rank) % 2: time.sleep(0.01 * late))
        for step in range(4):
            model(mine(rank, 8) * step).sum().backward()
            expected = [(each, each * sum(range(1, size + 1))) for each in range(1 if step == 0 else len(layers))]
            assert seen[-len(expected) :] == expected

    def exchange(_, bucket):
        received, next_rank = torch.empty_like(bucket.buffer()), (rank + 1) % size
        future = dist.irecv(received, (rank - 1) % size).get_future().then(lambda future: future.value()[0] * 2)
        dist.send(bucket.buffer(), next_rank)
        return future

    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model.register_comm_hook(None, exchange)
    model(torch.full((1, 3), rank + 1.0)).sum().backward()
    equal(model.module.weight.grad, torch.full((1, 3), ((rank - 1) % size + 1) * 2.0))


def in_fewer_bits(rank, size):
    """By a group's own format, and by that of DDP's hook; what cannot travel so travels as ever."""
    wire = rr.Compression.int8.everywhere
    group = dist.new_group(pg_options=wire)
    whole, integers, largest = mine(rank, 1000), mine(rank, 1000, torch.int64), mine(rank, 1000)
    exact = sum(mine(each, 1000) for each in range(size))
    for each, op in ((whole, dist.ReduceOp.SUM), (integers, dist.ReduceOp.SUM), (largest, dist.ReduceOp.MAX)):
        dist.all_reduce(each, op, group=group)
    equal(integers, exact.long())
    equal(largest, mine(size - 1, 1000))
    assert 0 < (whole - exact).abs().max() < exact.max() / 100
    torch.manual_seed(0)
    models = [DistributedDataParallel(torch.nn.Linear(600, 600)) for _ in range(2)]
    models[0].register_comm_hook(wire, ddp_hook)
    for step in range(4 if size == 2 else 1):  # by then DDP's buckets would be mapped
        for model in models:
            model.zero_grad(set_to_none=False)
            model.module.load_state_dict(models[0].module.state_dict())
            model(mine(rank, 600) * (step + 1)).sum().backward()
    encoded, plain = (each.module.weight.grad for each in models)
    assert 0 < (encoded - plain).abs().max() < plain.max() / 100
    with pytest.raises(rr.InputError, match=r"ddp_hook: state='int8'; expected Compression\.int8, \.int4, or None"):
        ddp_hook("int8", None)
    with pytest.raises(
        rr.InputError, match=r"pg_options='int8'; expected Compression\.int8 or \.int4 of ringreduce, or None"
    ):
        dist.new_group(pg_options="int8")


def timeouts(rank, size):
    group, other = dist.new_group(timeout=datetime.timedelta(seconds=0.5)), dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(rr.StalledError, match=r"allreduce 'group .*: Timed out after 0\.05 s"):
            work.wait(datetime.timedelta(seconds=0.05))
        store.set("tried", "yes")
    else:
        store.wait(["tried"])
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    if rank == 0:
        with pytest.raises(rr.CollectiveError, match=r"barrier 'group .*Timed out after \d\.\d s, waiting for rank 1"):
            dist.barrier(group)
        with pytest.raises(rr.CollectiveError, match="Timed out"):
            dist.barrier(group)
        with pytest.raises(rr.CollectiveError, match=r"Timed out after \d\.\d s, waiting for rank 1"):
            other.monitored_barrier(datetime.timedelta(seconds=0.5))
    dist.barrier()


def mapped(rank, size):
    """Operations of several kinds; what took them, and the error of a tensor on a GPU."""
    engine = runtime.current("").engine
    before = engine.submitting.count
    value, everyones = mine(rank), [torch.empty(6) for _ in range(size)]
    dist.all_reduce(value)
    equal(value, sum(mine(each) for each in range(size)))
    dist.all_gather(everyones, mine(rank))
    equal(torch.cat(everyones), torch.cat([mine(each) for each in range(size)]))
    half = dist.new_group([0, 1])
    if rank == 0:
        dist.send(value, 1, half)
    elif rank == 1:
        assert dist.recv(torch.empty(6), group=half) == 0
    dist.barrier()
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(1, 3) * rank).sum().backward()
    equal(model.module.weight.grad, torch.full((2, 3), sum(range(size)) / size))
    backend = dist.group.WORLD._get_backend(torch.device("cpu")).name()
    if backend == "gloo":
        assert engine.submitting.count - before <= 2, "but for a barrier, and an end of a group"
    try:
        dist.group.WORLD.elsewhere("cuda")
    except RuntimeError as exc:
        return backend, str(exc)
    return backend, ""


@pytest.mark.parametrize(
    ("backends", "cpu", "error"),
    [
        ("cpu:ring,cuda:ring", "ring", ""),
        ("cpu:gloo,cuda:ring", "gloo", ""),
        ("cuda:ring,cpu:gloo", "gloo", ""),
        ("cpu:ring,cuda:nccl", "ring", "Distributed package doesn't have NCCL built in"),
    ],
)
@on_a_pool
def test_tensors_go_to_the_backend_of_their_device(world, backends, cpu, error, tmp_path):
    if dist.is_nccl_available() and error:
        pytest.skip("this PyTorch has NCCL")
    assert set(world(2).run(on_ring(mapped, tmp_path, backends))) == {(cpu, error)}


def more_than_2_gib(rank, size):
    """More bytes than an int32 counts: whole, in halves, and as a message."""
    count = (1 << 31) + 7
    whole = torch.full((count,), rank + 1, dtype=torch.uint8)
    whole[-1] = 10 * rank
    dist.all_reduce(whole)
    assert (whole[0], whole[count // 2], whole[-1]) == (3, 3, 10)
    if rank == 0:
        dist.send(whole, 1)
    else:
        whole.zero_()
        dist.recv(whole, 0)
        assert (whole[0], whole[count // 2], whole[-1]) == (3, 3, 10)
    half = whole[: (count + 1) // 2] + rank
    dist.all_gather_single(whole := torch.empty(2 * half.numel(), dtype=torch.uint8), half)
    assert (whole[0], whole[-2], whole[half.numel() - 1]) == (3, 4, 3)


@extended
@on_a_pool
def test_more_than_2_gib(world, tmp_path):
    world(2).run(on_ring(more_than_2_gib, tmp_path))


def timeline(rank, size):
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0], "timeline.json")
    rr.start_timeline(path)
    dist.all_reduce(mine(rank))
    dist.all_gather([torch.empty(6) for _ in range(size)], mine(rank))
    dist.send(mine(0), 1) if rank == 0 else dist.recv(mine(1), 0) if rank == 1 else None
    dist.barrier()
    rr.stop_timeline()
    dist.barrier()
    records = json.loads(path.read_text())
    rows = {(each["pid"], each["tid"]): each["args"]["name"] for each in records if each["name"] == "thread_name"}
    found = {(each["name"], rows[each["pid"], each["tid"]]) for each in records if each["ph"] == "X"}
    group = dist.group.WORLD.group_name
    for kind in ("allreduce", "all_gather"):
        assert {
            (kind.upper(), f"{kind}.group {group}"),
            (f"NEGOTIATE_{kind.upper()}", f"{kind}.group {group}"),
        } <= found
    assert {("SEND", f"send.group {group}"), ("RECV", f"recv.group {group}")} <= found
    assert ("NEGOTIATE_BARRIER", f"barrier.group {group}") in found


@pytest.mark.parametrize(("world", "size"), [("mpi", 2), pytest.param("mpi", 3, marks=extended)], indirect=["world"])
@pytest.mark.parametrize(
    "program",
    [
        reductions,
        again_and_again,
        layouts,
        sparse,
        gathers,
        exchanges,
        messages,
        differences,
        forms,
        groups,
        futures,
        hooks,
        in_fewer_bits,
        timeouts,
        timeline,
    ],
    ids=lambda program: program.__name__,
)
def test_operations(world, size, program, tmp_path):
    world(size).run(on_ring(program, tmp_path))
