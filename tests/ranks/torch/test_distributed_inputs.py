"""Tensors of any kind in torch.distributed: functions work as over gloo, or refuse them, and all goes on."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import ringreduce as rr
import ringreduce.torch
from tests.ranks.torch.test_distributed import equal, mine, on_ring
from tests.support.tiers import extended

EXPANDED = r"an array of shape \(.*\) whose elements share memory, as with expand\(\) or broadcast_to\(\)"


def columns(rows, size):
    """Of a matrix: contiguous none of them."""
    matrix = torch.full((rows, size), -1.0)
    return matrix, list(matrix.unbind(1))


def each_column(matrix, expected):
    for found, of_rank in zip(matrix.unbind(1), expected, strict=True):
        equal(found, of_rank)


def into_columns(rank, size):
    """Of all functions that have outputs: what is not contiguous is written back."""
    everyones, total = [mine(each) for each in range(size)], sum(mine(each) for each in range(size))
    matrix, outputs = columns(6, size)
    dist.all_gather(outputs, mine(rank))
    each_column(matrix, everyones)
    matrix, outputs = columns(6, size)
    dist.gather(mine(rank), outputs if rank == 1 else None, 1)
    each_column(matrix, everyones if rank == 1 else [torch.full((6,), -1.0)] * size)
    matrix, outputs = columns(6, size)
    dist.all_to_all(outputs, [mine(rank) + 100 * each for each in range(size)])
    each_column(matrix, [each + 100 * rank for each in everyones])
    for function in (
        lambda output: dist.reduce_scatter(output, [mine(rank)] * size),
        lambda output: dist.reduce_scatter_single(output, mine(rank).repeat(size)),
        lambda output: output.copy_(mine(rank)) is None or dist.all_reduce(output),
    ):
        matrix, (output, *_) = columns(6, size)
        function(output)
        each_column(matrix, [total] + [torch.full((6,), -1.0)] * (size - 1))
    whole = torch.full((size, 6), -1.0).t()
    dist.all_gather_single(whole, mine(rank))
    equal(whole.reshape(-1), torch.cat(everyones))
    dist.all_to_all_single(whole, torch.cat([mine(rank) + 100 * each for each in range(size)]).view(6, size).t().t())
    equal(whole.reshape(-1), torch.cat([each + 100 * rank for each in everyones]))
    matrix, (output, *_) = columns(6, size)
    dist.scatter(output, [each + 1 for each in everyones] if rank == 0 else None, 0)
    equal(output, mine(rank) + 1)
    dist.broadcast(output, 1)
    equal(output, mine(1) + 1)
    if rank < 2:
        begun = dist.isend(mine(rank), 1 - rank)
        dist.irecv(output, 1 - rank).wait()
        begun.wait()
        equal(output, mine(1 - rank))
    together = [mine(rank), mine(rank).view(2, 3).t()]
    with dist._coalescing_manager():
        for each in together:
            dist.all_reduce(each)
    equal(together[1], total.view(2, 3).t())


def made_in_inference_mode(rank, size):
    """They may be written to there alone, which the thread that waits need not be in."""
    with torch.inference_mode():
        logits, (matrix, outputs) = mine(rank).view(2, 3).t(), columns(6, size)
        dist.all_reduce(logits)
        begun = [dist.all_gather(outputs, mine(rank), async_op=True)]
        whole = mine(rank)
        begun.append(dist.all_reduce(whole, async_op=True))
    for each in begun:
        each.wait()
    total = sum(mine(each) for each in range(size))
    equal(logits, total.view(2, 3).t())
    equal(whole, total)
    each_column(matrix, [mine(each) for each in range(size)])
    dist.broadcast(logits, 1)


def parameters(rank, size):
    """Leaves that require gradients, whose views torch itself writes to in no_grad only."""
    weight = torch.nn.Parameter(mine(rank).view(2, 3))
    dist.broadcast(weight.t(), 1)
    equal(weight.detach(), mine(1).view(2, 3))
    dist.all_reduce(weight)
    equal(weight.detach(), mine(1).view(2, 3) * size)


def on_their_way(rank, size):
    """The results of functional collectives, for which others than torch's own functions must wait."""
    total = sum(mine(each) for each in range(size))
    coming = functional.all_reduce(mine(rank), "sum", dist.group.WORLD)
    columns = functional.all_gather_single(mine(rank), 0, dist.group.WORLD).view(size, 6).t()
    assert {type(coming), type(columns)} == {functional.AsyncCollectiveTensor}
    gathered = torch.empty(6 * size)
    dist.all_gather_single(gathered, coming)
    equal(gathered, total.repeat(size))
    for each, expected in ((coming, total), (columns, torch.stack([mine(each) for each in range(size)], 1))):
        equal(ringreduce.torch.allreduce(each), expected)
        dist.all_reduce(each)
        equal(each + 0, expected * size)


def of_shared_elements(rank, size):
    """One rank alone is refused, and the others are told; nothing is left half begun."""
    shared = {
        "allreduce": lambda: dist.all_reduce(torch.ones(1).expand(4)),
        "broadcast": lambda: dist.broadcast(torch.arange(6.0).unfold(0, 3, 1), 0),
        "all_gather": lambda: dist.all_gather([torch.ones(1).expand(6) for _ in range(size)], mine(rank)),
        "all_gather_single": lambda: dist.all_gather_single(torch.ones(1).expand(6 * size), mine(rank)),
        "all_to_all": lambda: dist.all_to_all([torch.ones(1).expand(6)] * size, [mine(rank)] * size),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(1).expand(6), [mine(rank)] * size),
        "scatter": lambda: dist.scatter(torch.ones(1).expand(6), [mine(rank)] * size if rank == 0 else None, 0),
        "recv": lambda: dist.recv(torch.ones(1).expand(6), (rank + 1) % size),
    }
    for kind, call in shared.items():
        with pytest.raises(ValueError, match=EXPANDED) as caught:
            call()
        assert kind.partition("_")[0] in str(caught.value), (kind, str(caught.value))
        after = torch.ones(2)
        dist.all_reduce(after)
        assert after.tolist() == [size, size], kind
    gathered = [torch.empty(6) for _ in range(size)]
    dist.all_gather(gathered, torch.ones(1).expand(6) * (rank + 1.0))
    dist.all_gather(gathered, torch.full((1,), rank + 1.0).expand(6))  # what is only read may be any
    equal(gathered[1], torch.full((6,), 2.0))


def refused_on_one_rank(rank, size):
    sparse = torch.eye(3).to_sparse()
    for kind, right, wrong, why in (
        (
            "allreduce",
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(1).expand(4)),
            EXPANDED,
        ),
        ("broadcast", lambda: dist.broadcast(torch.ones(3), 0), lambda: dist.broadcast(sparse, 0), "is not dense"),
    ):
        at = r"\(test_distributed_inputs.py:\d+\)"
        told = rf"rank 1 of {size}, {kind} 'group \d+' {at} was refused: .*{why}"
        with pytest.raises(ValueError if rank == 1 else rr.MismatchError, match=why if rank == 1 else told):
            (wrong if rank == 1 else right)()
        after = torch.ones(2)
        dist.all_reduce(after)
        assert after.tolist() == [size, size]


def lists_of_wrong_lengths(rank, size):
    few = [torch.empty(6) for _ in range(size - 1)]
    for call in (
        lambda: dist.all_gather(few, mine(rank)),
        lambda: dist.reduce_scatter(torch.empty(6), few),
        lambda: dist.all_to_all(few, [mine(rank)] * size),
        lambda: dist.all_to_all([torch.empty(6) for _ in range(size)], few),
    ):
        with pytest.raises(ValueError, match=rf"{size - 1} .*{size}"):
            call()
    with pytest.raises(ValueError, match=rf"{size * 6 + 1}|{size * 6}"):
        dist.all_gather_single(torch.empty(size * 6 + 1), mine(rank))
    with pytest.raises(ValueError, match="99"):
        dist.broadcast(torch.ones(2), 99)
    after = torch.ones(2)
    dist.all_reduce(after)
    assert after.tolist() == [size, size]


def several_of_which_one_is_sparse(rank, size):
    """As _coalescing_manager() gives them; alone each is reduced."""
    one, other = (torch.eye(3).mul(rank + each).to_sparse() for each in (1, 2))
    for tensors, why in (
        ([one, other], "2 tensors, the first of which is sparse; expected one: reduce each on its own"),
        ([mine(rank), other], "tensor 2 of 2 to be written: .* is not dense"),
    ):
        with pytest.raises(ValueError, match=why):
            dist.group.WORLD.allreduce_coalesced(tensors)
    equal(one.to_dense(), torch.eye(3) * (rank + 1))
    dist.group.WORLD.allreduce_coalesced([one]).wait()
    dist.all_reduce(other)
    equal(one.to_dense(), torch.eye(3) * sum(range(1, size + 1)))
    equal(other.to_dense(), torch.eye(3) * sum(range(2, size + 2)))


def futures_that_raise(rank, size):
    """What hangs on a result may fail; the result, and what follows, do not."""
    value = mine(rank).view(2, 3).t()
    work = dist.all_reduce(value, async_op=True)
    failing = work.get_future().then(lambda future: future.value()[0].nothing_of_this_name)
    other = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(Exception, match="nothing_of_this_name"):
        failing.wait()
    work.wait()
    other.wait()
    equal(value, sum(mine(each) for each in range(size)).view(2, 3).t())


def on_another_default_device(rank, size):
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        value = torch.full((3,), rank + 1.0, dtype=torch.float32, device="cpu")
        sparse = torch.eye(2, device="cpu", dtype=torch.float32).to_sparse()
        found = [None] * size
        dist.all_reduce(value)
        dist.all_reduce(sparse)
        dist.all_gather_object(found, rank)
        dist.barrier()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    equal(value, torch.full((3,), float(sum(range(1, size + 1)))))
    equal(sparse.to_dense(), torch.eye(2) * size)
    assert found == list(range(size))


def moved_as_bytes(rank, size):
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.float8_e8m0fnu):
        everyones = [torch.arange(1, 7).float().add(each).to(dtype) for each in range(size)]
        gathered = [torch.empty(6, dtype=dtype) for _ in range(size)]
        dist.all_gather(gathered, everyones[rank])
        assert [each.view(torch.uint8).tolist() for each in gathered] == [
            each.view(torch.uint8).tolist() for each in everyones
        ]
        found = everyones[rank].clone()
        dist.broadcast(found, 1)
        assert found.view(torch.uint8).tolist() == everyones[1].view(torch.uint8).tolist()
    with pytest.raises(ValueError, match=r"float8_e5m2 .*tensor.to\(torch.float32\)"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))


@pytest.mark.parametrize(("world", "size"), [("mpi", 2), pytest.param("mpi", 3, marks=extended)], indirect=["world"])
@pytest.mark.parametrize(
    "program",
    [
        into_columns,
        made_in_inference_mode,
        parameters,
        on_their_way,
        of_shared_elements,
        refused_on_one_rank,
        lists_of_wrong_lengths,
        several_of_which_one_is_sparse,
        futures_that_raise,
        on_another_default_device,
        moved_as_bytes,
    ],
    ids=lambda program: program.__name__,
)
def test_inputs(world, size, program, tmp_path):
    world(size).run(on_ring(program, tmp_path))
