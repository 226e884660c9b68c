"""Every item goes to some rank, every rank gets equally many, and all ranks draw one order; torch's agrees."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ringreduce.torch as hvd
from ringreduce.api.sampler import DistributedSampler
from ringreduce.testing import run_ranks
from tests.support.loops import in_a_loop

SIZES = range(1, 10)


def counts(size):
    return sorted({0, 1, size - 1, size, size + 1, 2 * size - 1, 100, 1003})


CASES = [
    (size, count, shuffle, drop_last)
    for size in SIZES
    for count in counts(size)
    for shuffle, drop_last in itertools.product([False, True], repeat=2)
]


def samplers(size, count, **options):
    return [DistributedSampler(count, size, rank, **options) for rank in range(size)]


@in_a_loop(("size", "count", "shuffle", "drop_last"), CASES)
def test_every_item_goes_to_some_rank_and_all_ranks_get_equally_many(size, count, shuffle, drop_last):
    ranks = samplers(size, count, shuffle=shuffle, drop_last=drop_last, seed=3)
    for epoch in range(3):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        shares = [list(sampler) for sampler in ranks]
        share = count // size if drop_last else -(-count // size)
        assert [len(each) for each in shares] == [len(sampler) for sampler in ranks] == [share] * size
        times = np.bincount(list(itertools.chain(*shares)), minlength=count)
        assert len(times) == count, "no index past the end"
        if drop_last:
            assert times.max(initial=0) <= 1
            assert times.sum() == count - count % size
        elif count:
            assert times.min() >= 1
            assert times.max() <= -(-share * size // count), "given twice no sooner than all were given once"


@in_a_loop("drop_last", [False, True])
@in_a_loop("size", SIZES)
def test_in_the_order_of_the_dataset_it_gives_what_torchs_gives(size, drop_last):
    for count in counts(size):
        for rank in range(size):
            options = {"num_replicas": size, "rank": rank, "shuffle": False, "drop_last": drop_last}
            assert list(DistributedSampler(count, **options)) == list(TorchSampler(range(count), **options))
            ours, torchs = (kind(dataset=range(count), **options) for kind in (DistributedSampler, TorchSampler))
            for name in ("num_samples", "total_size", "dataset"):
                assert getattr(ours, name) == getattr(torchs, name), name
            assert len(ours) == len(torchs)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_ranks_share_one_order_so_their_batches_make_up_those_of_one_process(shuffle):
    alone = samplers(1, 24, shuffle=shuffle)[0]
    for size in (2, 3, 4):
        parts = zip(*(sampler.batches(12 // size) for sampler in samplers(size, 24, shuffle=shuffle)), strict=True)
        for batch, shares in zip(alone.batches(12), parts, strict=True):
            assert batch.tolist() == np.stack(shares, axis=1).reshape(-1).tolist()


def orders(**options):
    sampler = DistributedSampler(50, 2, 1, **options)
    for epoch in range(4):
        sampler.set_epoch(np.int64(epoch))
        assert list(sampler) == list(sampler), "iterating twice"
        yield tuple(sampler)


def test_orders_differ_by_epoch_and_by_seed_and_come_again():
    assert list(orders(seed=5)) == list(orders(seed=5))
    assert len(set(orders(seed=0)) | set(orders(seed=1))) == 8, "epoch 1 of seed 0 is not epoch 0 of seed 1"
    assert set(orders(shuffle=False)) == {tuple(range(1, 50, 2))}


def test_batches_are_as_long_as_asked_but_for_the_last():
    sampler = DistributedSampler(20, 2, 1, shuffle=False)
    assert {type(index) for index in sampler} == {int}
    assert sampler.indices().dtype == np.int64
    assert [batch.tolist() for batch in sampler.batches(4)] == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19]]
    assert list(DistributedSampler(0, 2, 1).batches(4)) == []


@in_a_loop("dataset", [range(7), [5] * 7, np.zeros((7, 2)), torch.zeros(7, 2), "seven !", np.int32(7)])
def test_a_dataset_or_its_length(dataset):
    assert len(DistributedSampler(dataset, 2, 0)) == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [(3, 0, [0, 3, 6, 9]), (3, 1, [1, 4, 7, 0]), (3, 2, [2, 5, 8, 1])]),
        ({"num_replicas": 5}, [(5, 0, [0, 5]), (5, 1, [1, 6]), (5, 2, [2, 7])]),
        ({"rank": 1}, [(3, 1, [1, 4, 7, 0])] * 3),
    ],
    ids=str,
)
def test_rank_and_size_are_those_of_the_job_unless_they_are_given(given, expected):
    def program():
        sampler = DistributedSampler(10, shuffle=False, **given)
        return sampler.num_replicas, sampler.rank, list(sampler)

    assert run_ranks(3, program) == expected


@pytest.mark.parametrize("given", [{}, {"rank": 0}, {"num_replicas": 1}])
def test_before_init_both_must_be_given(given):
    with pytest.raises(hvd.NotInitializedError, match=r"DistributedSampler\(\): ringreduce has not been initialized"):
        DistributedSampler(10, **given)


@in_a_loop(
    ("arguments", "message"),
    [
        ({"dataset": -1}, "count=-1; expected a whole number of 0 or more, or a dataset that has a length"),
        ({"dataset": 2.5}, r"count=2\.5; expected a whole number of 0 or more, or a dataset"),
        ({"dataset": iter([1])}, "count=<list_iterator .*>; expected a whole number"),
        ({"num_replicas": 0}, "num_replicas=0; expected a whole number of 1 or more$"),
        ({"rank": 3}, "rank=3 of num_replicas=3; expected 0 to 2"),
        ({"rank": -1}, "rank=-1; expected a whole number of 0 or more"),
        ({"seed": -1}, "seed=-1; expected a whole number of 0 or more"),
        ({"seed": "x"}, "seed='x'; expected a whole number of 0 or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(hvd.InputError, match=f"^DistributedSampler: {message}"):
        DistributedSampler(**{"dataset": 10, "num_replicas": 3, "rank": 0} | arguments)


def test_wrong_epochs_and_batches_are_refused():
    sampler = DistributedSampler(10, 2, 0)
    with pytest.raises(hvd.InputError, match="epoch=-1; expected a whole number of 0 or more"):
        sampler.set_epoch(-1)
    with pytest.raises(hvd.InputError, match="batch_size=0; expected a whole number of 1 or more"):
        sampler.batches(0)


@pytest.mark.parametrize("kind", [DistributedSampler, TorchSampler])
def test_a_data_loader_takes_ours_and_torchs_own(kind):
    dataset = TensorDataset(torch.arange(10) ** 2)

    def program():
        sampler = kind(dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=4)
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append([batch.tolist() for (batch,) in loader])
        return epochs

    results = run_ranks(3, program)
    for epoch in range(2):
        batches = [result[epoch] for result in results]
        assert [[len(batch) for batch in each] for each in batches] == [[2, 2]] * 3
        seen = sorted(item for each in batches for batch in each for item in batch)
        assert len(seen) == 12
        assert set(seen) == {index**2 for index in range(10)}
    assert all(first != second for first, second in results)


def test_what_an_elastic_sampler_cannot_go_on_with_is_said():
    def program():
        sampler = hvd.elastic.ElasticSampler(range(3), shuffle=False)
        with pytest.raises(hvd.InputError, match="8 items are done; expected at most 3, as many as the dataset"):
            sampler.load_state_dict({"epoch": 1, "processed_num": 8})
        with pytest.raises(hvd.InputError, match=r"ElasticSampler: batch_size=2\.0; expected a whole number"):
            sampler.record_batch(0, 2.0)
        sampler.record_batch(0, np.int64(1))
        return sampler.state_dict()

    assert run_ranks(2, program) == [{"epoch": 0, "processed_num": 2}] * 2
