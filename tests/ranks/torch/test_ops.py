"""The torch functions on threads: results of every form and type, gradients against one process, what is refused."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support import operations
from tests.support.on_threads import each_rank_of, known
from tests.support.reference import (
    FEW_TYPES,
    MATRIX,
    all_but_one_of_each_extended,
    assert_reduced,
    data,
    numpy_dtype,
    readable,
)
from tests.support.tiers import parted

SMALL = Settings(fusion_slot_bytes=256, ring_segment_bytes=64)
SHAPES = [(), (0,), (5,), (3, 7), (2, 100)]


def tensor_of(dtype, shape, rank, seed=0):
    array = data(dtype, int(np.prod(shape)), rank, seed).reshape(shape)
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor):
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def finish(handles):
    """Wait for the last one first."""
    return [hvd.synchronize(handle) for handle in reversed(handles)][::-1]


ALLREDUCE = {
    "sync": lambda tensors, op: [hvd.allreduce(each, op=op) for each in tensors],
    "async": lambda tensors, op: finish([hvd.allreduce_async(each, op=op) for each in tensors]),
    "grouped": lambda tensors, op: hvd.grouped_allreduce(tensors, op=op),
    "grouped async": lambda tensors, op: hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=op)),
}
ALLREDUCE_IN_PLACE = {
    "in place": lambda tensors, op: [hvd.allreduce_(each, op=op) for each in tensors],
    "async in place": lambda tensors, op: finish([hvd.allreduce_async_(each, op=op) for each in tensors]),
    "grouped in place": lambda tensors, op: hvd.grouped_allreduce_(tensors, op=op),
    "grouped async in place": lambda tensors, op: hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=op)),
}


@pytest.mark.parametrize(("dtype", "op"), all_but_one_of_each_extended(MATRIX), **readable)
@pytest.mark.parametrize("size", parted([1, 2, 3], lambda size: size == 3))
def test_allreduce_in_every_form(size, dtype, op):
    def mine(rank):
        return [tensor_of(dtype, shape, rank, seed) for seed, shape in enumerate(SHAPES)]

    def program():
        results = []
        for form in ALLREDUCE.values():
            tensors = mine(hvd.rank())
            results.append(form(tensors, op))
            assert all(torch.equal(one, other) for one, other in zip(tensors, mine(hvd.rank()), strict=True))
        for form in ALLREDUCE_IN_PLACE.values():
            tensors = mine(hvd.rank())
            results.append(form(tensors, op))
            assert all(one is other for one, other in zip(tensors, results[-1], strict=True))
        return results

    everyones = [mine(rank) for rank in range(size)]
    for forms in run_ranks(size, program, settings=SMALL):
        for results in forms:
            for number, result in enumerate(results):
                assert (tuple(result.shape), result.dtype) == (SHAPES[number], everyones[0][number].dtype)
                assert_reduced(array_of(result), op, [array_of(each[number]) for each in everyones])


@pytest.mark.parametrize("dtype", FEW_TYPES)
@each_rank_of(3, settings=SMALL)
def test_the_other_collectives_in_every_form(dtype):
    rank = hvd.rank()
    unevens = [tensor_of(dtype, (rows, 4), each) for each, rows in enumerate([2, 0, 3])]
    evens = [tensor_of(dtype, (6, 2), each, 1) for each in range(3)]
    uneven, even, splits = unevens[rank], evens[rank], torch.tensor([rank, 4 - rank, 2], dtype=torch.int32)
    starts, counts = [[0, 0, 0], [0, 1, 2], [4, 4, 4]][rank], [[0, 1, 2], [4, 3, 2], [2, 2, 2]][rank]
    gathered, equal_parts = torch.cat(unevens), torch.cat([each[2 * rank : 2 * rank + 2] for each in evens])
    parts = torch.cat([each[s : s + n] for each, s, n in zip(evens, starts, counts, strict=True)])
    exchanged = [hvd.alltoall(even, splits), hvd.synchronize(hvd.alltoall_async(even, splits.tolist()))]
    for result, expected in [
        (hvd.allgather(uneven), gathered),
        (hvd.grouped_allgather([uneven, even])[0], gathered),
        (hvd.synchronize(hvd.allgather_async(uneven)), gathered),
        (hvd.synchronize(hvd.grouped_allgather_async([uneven]))[0], gathered),
        (hvd.broadcast(even, 2), evens[2]),
        (hvd.synchronize(hvd.broadcast_async(even, 2)), evens[2]),
        (hvd.broadcast_(even.clone(), 2), evens[2]),
        (hvd.synchronize(hvd.broadcast_async_(even.clone(), 2)), evens[2]),
        (hvd.alltoall(even), equal_parts),
        (hvd.synchronize(hvd.alltoall_async(even))[0], equal_parts),
        *((rows, parts) for rows, _ in exchanged),
        *((received, torch.tensor(counts, dtype=torch.int32)) for _, received in exchanged),
    ]:
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], **readable)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "complex64"])
@each_rank_of(3, settings=SMALL)
def test_reducescatter_in_every_form(dtype, op):
    everyones = [tensor_of(dtype, (7, 3), rank) for rank in range(3)]
    mine, (low, high) = everyones[hvd.rank()], [(0, 3), (3, 5), (5, 7)][hvd.rank()]
    for result in (
        hvd.reducescatter(mine, op=op),
        hvd.grouped_reducescatter([mine[:2].clone(), mine], op=op)[1],
        hvd.synchronize(hvd.reducescatter_async(mine, op=op)),
        hvd.synchronize(hvd.grouped_reducescatter_async([mine], op=op))[0],
    ):
        assert_reduced(array_of(result), op, [array_of(each)[low:high] for each in everyones])


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 2048.0), (torch.bfloat16, 256.0)], **readable)
@each_rank_of(5, settings=SMALL)
def test_16_bit_sums_are_rounded_once(dtype, large):
    """Next to `large`, one is half of the distance between two numbers: rounded at each addition, all ones are lost."""
    mine, expected = (torch.full((40,), each, dtype=dtype) for each in (1.0 if hvd.rank() else large, large + 4))
    for form in (ALLREDUCE | ALLREDUCE_IN_PLACE).values():
        assert torch.equal(form([mine.clone()], hvd.Sum)[0], expected)
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), expected[:8])
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Average) * 5, expected)


# Gradients


@pytest.mark.parametrize("name", operations.ALL)
@each_rank_of(3, settings=SMALL)
def test_results_and_gradients(name):
    x, result, weights, gradient = map(torch.from_numpy, operations.case(name, hvd.rank(), 3))
    found = operations.ALL[name].call(hvd, x.requires_grad_())
    (found * weights).sum().backward()
    torch.testing.assert_close(found, result, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


def equal_parts(tensors, rank):
    return torch.cat([tensor.chunk(3)[rank] for tensor in tensors])


def loss_of(result, rank):
    """Not linear, and every rank's and element's own."""
    weights = torch.from_numpy(data("float64", result.numel(), rank, 99)).reshape(result.shape).to(result.dtype)
    return (result * result * weights + result * weights.flip(0)).sum()


GROUPED = {
    "allreduce": (
        lambda xs: hvd.grouped_allreduce(xs, op=hvd.Sum),
        lambda xs: [hvd.allreduce(x, op=hvd.Sum) for x in xs],
    ),
    "allgather": (hvd.grouped_allgather, lambda xs: [hvd.allgather(x) for x in xs]),
    "reducescatter": (hvd.grouped_reducescatter, lambda xs: [hvd.reducescatter(x) for x in xs]),
}


@pytest.mark.parametrize("name", GROUPED)
@each_rank_of(3)
def test_groups_have_the_gradients_of_their_members(name):
    """Among them one of integers, and one that requires no gradient on some ranks."""
    grouped, singly = GROUPED[name]
    gradients = []
    for call in (grouped, singly):
        tensors = [
            tensor_of("float64", (4, 2), hvd.rank()).requires_grad_(),
            tensor_of("int64", (5,), hvd.rank(), 1),
            tensor_of("float32", (6,), hvd.rank(), 2).requires_grad_(call is singly or hvd.rank() == 1),
            tensor_of("bfloat16", (7,), hvd.rank(), 3).requires_grad_(),
        ]
        results = call(tensors)
        assert not results[1].requires_grad
        sum(loss_of(each, hvd.rank()).double() for each in results).backward()
        gradients.append([each.grad for each in tensors])
    for one, other in zip(*gradients, strict=True):
        assert one is None or torch.equal(one, other)
    assert [each is not None for each in gradients[0]] == [True, False, hvd.rank() == 1, True]


@pytest.mark.parametrize("name", GROUPED)
@each_rank_of(3)
def test_a_generator_is_a_group_that_has_gradients(name):
    of_generator, of_list = ([torch.ones(3, requires_grad=True)] for _ in range(2))
    for tensors, own in ((of_generator, iter(of_generator)), (of_list, of_list)):
        (result,) = GROUPED[name][0](own)
        loss_of(result, hvd.rank()).backward()
        assert tensors[0].grad is not None
    assert torch.equal(of_generator[0].grad, of_list[0].grad)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
@pytest.mark.parametrize("call", [hvd.allreduce, hvd.reducescatter])
def test_compression_halves_what_travels_both_ways(call, compression):
    seen = []

    class Watched(compression):
        @staticmethod
        def compress(tensor):
            compressed, context = compression.compress(tensor)
            seen.append(compressed.dtype)
            return compressed, context

    def program():
        mine = tensor_of("float32", (6, 5), hvd.rank()).requires_grad_()
        result = call(mine, compression=Watched, op=hvd.Sum)
        (result * (1 + hvd.rank())).sum().backward()
        integers = call(torch.full((6, 5), 70000), compression=Watched, op=hvd.Sum)
        assert integers.dtype is torch.int64
        assert integers.eq(3 * 70000).all()
        return result.detach(), mine.grad

    wire = torch.float16 if compression is hvd.Compression.fp16 else torch.bfloat16
    total = sum(tensor_of("float32", (6, 5), rank).to(wire).float() for rank in range(3)).to(wire).float()
    for rank, (result, gradient) in enumerate(run_ranks(3, program)):
        assert result.dtype is gradient.dtype is torch.float32
        assert torch.equal(result, total if call is hvd.allreduce else total[2 * rank : 2 * rank + 2])
        expected = torch.full((6, 5), 6.0) if call is hvd.allreduce else 3.0 * torch.arange(1.0, 4).repeat_interleave(2)
        assert torch.equal(gradient, expected if call is hvd.allreduce else expected[:, None].expand(6, 5))
    assert set(seen) == {wire, torch.int64}


@each_rank_of(3, process_sets=[[2, 0]])
def test_gradients_in_a_process_set():
    some = known([2, 0], 1)
    weight, gradients = 1.0 + hvd.rank(), []
    for call in (
        lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=some),
        lambda x: hvd.allgather(x, process_set=some),
        lambda x: hvd.broadcast(x, 2, process_set=some),
        lambda x: hvd.alltoall(x, process_set=some),
        lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=some),
    ):
        mine = torch.zeros(2, requires_grad=True)
        if hvd.rank() != 1:
            (call(mine) * weight).sum().backward()
            gradients.append(mine.grad.tolist())
    expected = [[4, 4], [2, 2], [hvd.rank()] * 2, [1, 3], [2, 6]]
    assert gradients == ([] if hvd.rank() == 1 else expected)


@pytest.mark.parametrize("name", operations.ALL)
@each_rank_of(1)
def test_gradcheck_alone(name):
    x, call = torch.ones(operations.ALL[name].rows(0, 1), 2, dtype=torch.float64), operations.ALL[name].call
    assert not x.numel() or torch.autograd.gradcheck(lambda x: call(hvd, x * x), [x.requires_grad_()])
    assert not x.numel() or torch.autograd.gradgradcheck(lambda x: call(hvd, x * x * x), [x])


@each_rank_of(3)
def test_second_derivatives():
    rank, inputs = hvd.rank(), [tensor_of("float64", (6, 2), each).requires_grad_() for each in range(3)]
    losses = [loss_of(sum(inputs) / 3, each) + loss_of(equal_parts(inputs, each), each) for each in range(3)]
    gradients = torch.autograd.grad(sum(losses), inputs, create_graph=True)
    expected = torch.autograd.grad(sum(loss_of(each, number) for number, each in enumerate(gradients)), inputs)[rank]
    mine = inputs[rank].detach().requires_grad_()
    loss = loss_of(hvd.allreduce(mine), rank) + loss_of(hvd.alltoall(mine), rank)
    (gradient,) = torch.autograd.grad(loss, mine, create_graph=True)
    loss_of(gradient, rank).backward()
    torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-12)


@each_rank_of(2)
def test_gradients_that_are_views():
    """Conjugated, negated or expanded: autograd makes no copy of these."""
    x = torch.zeros(2, 3, dtype=torch.complex64, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).conj().backward(torch.full((2, 3), 1 + 2j) * (1 + hvd.rank()))
    assert torch.equal(x.grad, torch.full((2, 3), 3 - 6j))
    x.grad = None
    hvd.allreduce(x, op=hvd.Sum).conj().imag.backward(torch.full((2, 3), 1.0 + hvd.rank()))
    assert torch.equal(x.grad, torch.full((2, 3), -3j))
    x.grad = None
    hvd.allreduce(x, op=hvd.Sum).sum(0).real.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2 + 0j))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, at its first dual tensor
def test_forward_mode_is_refused_and_loses_no_tangent_in_silence():
    def program():
        dual = forward_ad.make_dual(torch.ones(3), torch.full((3,), 2.0))
        for collective in (hvd.allreduce, hvd.allgather, lambda each: hvd.broadcast(each, 0)):
            with pytest.raises(NotImplementedError, match="jvp"):
                collective(dual)
        return hvd.allreduce(torch.ones(2) + hvd.rank()).tolist()

    with forward_ad.dual_level():
        assert run_ranks(2, program) == [[1.5, 1.5]] * 2


@each_rank_of(2)
def test_gradients_through_a_tree():
    weight, bias = (torch.full((n,), 1.0 + hvd.rank(), requires_grad=True) for n in (2, 3))
    result = hvd.allreduce({"w": weight, "rest": [bias, torch.tensor(hvd.rank()), None]}, op=hvd.Sum, name="tree")
    assert (result["w"].tolist(), result["rest"][1].item(), result["rest"][2]) == ([3, 3], 1, None)
    (result["w"].sum() + 2 * result["rest"][0].sum()).backward()
    assert (weight.grad.tolist(), bias.grad.tolist()) == ([2, 2], [4, 4, 4])
    names = r"allreduce 'rest.0' .*: float32\[4\], but rank 0 has float32\[3\]"
    with pytest.raises(hvd.MismatchError, match=names):
        hvd.allreduce({"w": weight, "rest": [torch.ones(3 + hvd.rank(), requires_grad=True)]})


@each_rank_of(2)
def test_where_autograd_has_no_part():
    leaf = torch.full((3,), 1.0 + hvd.rank(), requires_grad=True)
    assert hvd.allreduce(leaf).requires_grad
    assert not hvd.allreduce(leaf.detach()).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(leaf).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(leaf)).requires_grad
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert hvd.synchronize(hvd.broadcast_async_(leaf, 1)) is leaf
    assert leaf.is_leaf
    assert leaf.requires_grad
    result = hvd.allreduce(leaf)
    result /= 2  # the result is the caller's own
    result.sum().backward()
    assert (leaf.tolist(), leaf.grad.tolist()) == ([3, 3, 3], [0.5] * 3)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum], **readable)
@each_rank_of(2)
def test_other_ops_have_no_gradient(op):
    result = hvd.allreduce(torch.ones(3, requires_grad=True), op=op)
    with pytest.raises(ValueError, match=f"op={op!r} has no gradient; expected Average or Sum, or tensor.detach"):
        result.sum().backward()
    return hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=op)


# Sparse tensors


def sparse(rank, dtype=torch.float64):
    """Of 0, 2, 4, … values, an index of them given twice; values are rows of 3."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 5, (2, 2 * rank), generator=generator)
    if rank:
        indices[:, 1] = indices[:, 0]
    values = torch.randn(2 * rank, 3, generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 6, 3), check_invariants=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
@each_rank_of("size")
def test_sparse_allreduce(size, dtype):
    mine, total = sparse(hvd.rank(), dtype), sum(sparse(rank, dtype).to_dense() for rank in range(size))
    first = hvd.sparse_allreduce_async(mine, "layer.weight", hvd.Sum)
    second = hvd.sparse_allreduce_async(mine.coalesce(), name="other", op=hvd.Average)
    average, added = second(), hvd.synchronize(first)
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {}
    assert average.layout is added.layout is torch.sparse_coo
    assert added._nnz() == sum(2 * rank for rank in range(size))
    torch.testing.assert_close(added.to_dense(), total, **tolerance)
    torch.testing.assert_close(average.to_dense(), total / size, **tolerance)


@each_rank_of(3, process_sets=[[0, 2]])
def test_sparse_allreduce_in_a_process_set_and_of_gradients():
    if hvd.rank() == 1:
        return
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([hvd.rank(), 3])).sum().backward()
    result = hvd.sparse_allreduce_async(embedding.weight.grad, "e", hvd.Average, known([0, 2], 1))().to_dense()
    assert torch.equal(result, torch.tensor([[0.5, 0.5], [0, 0], [0.5, 0.5], [1, 1]]))


# What is refused

WRONG = [
    (
        lambda: hvd.allreduce(torch.ones(3, dtype=torch.float8_e4m3fn)),
        r"float8_e4m3fn can be moved, but not reduced: .*\.to\(torch.float32",
    ),
    (lambda: hvd.allreduce(torch.eye(3).to_sparse()), r"torch.sparse_coo is not dense; pass tensor.to_dense\(\)"),
    (lambda: hvd.allreduce(torch.ones(3, device="meta")), "a tensor on meta cannot be communicated"),
    (lambda: hvd.alltoall(torch.tensor(1.0)), "alltoall: a 0-d tensor has no rows"),
    (lambda: hvd.alltoall(torch.ones(3)), "alltoall: 3 rows cannot be split equally among 2 ranks"),
    (lambda: hvd.alltoall(torch.ones(4), torch.tensor([1, 1])), "splits of type torch.int64; expected torch.int32"),
    (lambda: hvd.alltoall(torch.ones(4), [1, 1, 1]), r"splits=\[1, 1, 1\]; expected 2 whole numbers"),
    (lambda: hvd.alltoall(torch.ones(4), [0.5, 1.5]), r"splits=\[0.5, 1.5\]; expected 2 whole numbers"),
    (lambda: hvd.alltoall(torch.ones(4), [[1, 1], [1, 1]]), "expected 2 whole numbers of 0 or more"),
    (lambda: hvd.alltoall(torch.ones(4), process_set=3), "alltoall: process_set=3; expected a ProcessSet"),
    (lambda: hvd.alltoall(torch.ones(4), process_set=hvd.ProcessSet([0])), "was not added, or was removed"),
    (lambda: hvd.sparse_allreduce_async(torch.ones(3), "n", hvd.Sum), r"layout torch.strided; pass tensor.to_sparse"),
    (lambda: hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "n", hvd.Max), "op=.*; expected Average or Sum"),
    (
        lambda: hvd.sparse_allreduce_async(torch.eye(3).int().to_sparse(), "n", hvd.Average),
        "torch.int32 values cannot be averaged; pass op=Sum",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
@each_rank_of(2)
def test_a_wrong_argument_is_told_and_the_job_goes_on(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum).item() == 3


@each_rank_of(2)
def test_a_mismatch_backward_names_the_gradient_and_the_line():
    total = hvd.allreduce(torch.ones(3, requires_grad=True), name="w").sum()
    message = (
        r"rank 1 of 2, allreduce 'w.gradient' \(test_ops.py:\d+\): float32\[4\], but rank 0 has "
        r"float32\[3\] \(test_ops.py:\d+\)"
    )
    with pytest.raises(hvd.HorovodInternalError, match=message):
        hvd.allreduce(torch.ones(4), name="w.gradient") if hvd.rank() else total.backward()
    assert hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum).item() == 3
