"""Sparse gradients: gathered, also from ranks that have none and never had one."""

import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of
from tests.support.training import same_on_all

ROWS = {0: [1, 4, 4], 1: [4, 0]}
"""What ranks look up; others compute no gradient of the table."""


def make_table(sparse=True):
    table = torch.nn.Embedding(6, 3, sparse=sparse).double()
    table.weight.data = torch.arange(18.0, dtype=torch.float64).reshape(6, 3) / 10
    return table


def backward(table, head, rank, scale=1.0):
    out = table(torch.tensor(ROWS[rank])).square() @ head if rank in ROWS else head.sum() * (rank + 1)
    (out.sum() * scale).backward()


def expected(size, op):
    table, head = make_table(sparse=False), torch.ones(3, dtype=torch.float64, requires_grad=True)
    for rank in range(size):
        backward(table, head, rank, 1 / size if op is hvd.Average else 1.0)
    return table.weight.grad


def program(look=None, **options):
    table, head = make_table(), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight, head], lr=0.1), [("table", table.weight), ("head", head)], **options
    )
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        backward(table, head, hvd.rank())
        if look is not None:
            look(table.weight.grad)
        optimizer.synchronize()
        found.append(table.weight.grad)
        with optimizer.skip_synchronize():
            optimizer.step()
        table.weight.data = make_table().weight.data
        head.data.fill_(1.0)
    assert torch.equal(found[0].to_dense(), found[1].to_dense())
    return found[1]


def test_in_8_bits_only_as_dense_ones():
    def refused():
        with pytest.raises(
            ringreduce.InputError, match=r"gradient 'table': sparse, with compression=Compression\.int8; expec"
        ):
            program(compression=hvd.Compression.int8)
        hvd.barrier()  # else one that has left already is missed before its peer is refused

    run_ranks(2, refused)
    dense = run_ranks(2, lambda: program(compression=hvd.Compression.int8, sparse_as_dense=True).to_dense())
    torch.testing.assert_close(same_on_all(dense), expected(2, hvd.Average))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gathered(size, op):
    results = run_ranks(size, lambda: program(op=op))
    assert all(result.is_sparse and result.is_coalesced() for result in results)
    torch.testing.assert_close(same_on_all([result.to_dense() for result in results]), expected(size, op))
    assert results[0].indices().tolist() == [[1, 4] if size == 1 else [0, 1, 4]], "the rows that somebody looked up"


@pytest.mark.parametrize(
    "options",
    [
        {"sparse_as_dense": True},
        {"sparse_as_dense": True, "groups": 1},
        {"groups": 1},
        {"gradient_predivide_factor": 2.0},
    ],
    ids=str,
)
def test_with_other_options(options):
    """One rank computes no gradient of the table."""
    results = run_ranks(3, lambda: program(**options))
    assert all(result.is_sparse and result.is_coalesced() for result in results)
    torch.testing.assert_close(same_on_all([result.to_dense() for result in results]), expected(3, hvd.Average))


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_an_optimizer_that_wants_sparse_gradients(size, sparse_as_dense):
    """As Horovod's test_sparse_embeddings; the third rank looks nothing up."""

    def trained():
        table = make_table()
        optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)
        for _ in range(3):
            optimizer.zero_grad()
            if hvd.rank() in ROWS:
                table(torch.tensor(ROWS[hvd.rank()])).sum().backward()
            optimizer.step()
        return table.weight.data

    table = make_table()
    optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(min(size, 2)):
            (table(torch.tensor(ROWS[rank])).sum() / size).backward()
        optimizer.step()
    torch.testing.assert_close(same_on_all(run_ranks(size, trained)), table.weight.data)


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3)], ids=str)
@each_rank_of(2)
def test_sparse_on_one_rank_of_any_number_of_dimensions(shape):
    """torch.gather makes them."""
    weight = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    rows = torch.tensor([1, 3, 3]).reshape(-1, *[1] * (len(shape) - 1)).expand(3, *shape[1:])
    for step in range(3):
        optimizer.zero_grad()
        if step % 2 == hvd.rank():
            torch.gather(weight, 0, rows, sparse_grad=True).sum().backward()
        optimizer.step()
    expected = torch.tensor([1, -0.5, 1, -2], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    assert torch.equal(weight.detach(), expected)
    return weight.detach().numpy()


def test_looked_at_before_step():
    def look(gradient):
        assert gradient.shape == (6, 3)
        assert gradient.is_sparse
        assert gradient.indices().tolist() == [[0, 1, 4]]

    run_ranks(3, lambda: program(look))


@each_rank_of(2)
def test_accumulated_onto_the_zeros_that_were_shown():
    """Two losses: after the first the table has no gradient; the second adds one to what stands there."""
    table, head = make_table(), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, head], lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        head.square().sum().backward()
        table(torch.tensor(ROWS[hvd.rank()])).sum().backward()
        optimizer.step()
    counts = torch.tensor([0.5, 0.5, 0, 0, 1.5, 0], dtype=torch.float64)
    torch.testing.assert_close(table.weight.grad.to_dense(), counts[:, None].expand(6, 3))


@each_rank_of(2)
def test_dense_on_one_rank_and_sparse_on_another():
    table = make_table(sparse=hvd.rank() == 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
    table(torch.tensor([hvd.rank()])).sum().backward()
    if hvd.rank() == 0:
        with pytest.raises(ringreduce.MismatchError, match="gradient 'weight': dense on this rank, but sparse"):
            optimizer.step()
    else:
        with pytest.raises(ringreduce.PeerLostError):  # rank 0 has learnt it, and its program ends
            optimizer.step()
