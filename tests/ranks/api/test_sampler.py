"""gather_for_metrics: all ranks' rows in the order of the epoch, without those that a sampler has repeated."""

import numpy as np
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ringreduce as rr
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of


@in_a_loop("count", [1, 6, 7, 8])
@in_a_loop("drop_last", [False, True])
@in_a_loop("shuffle", [False, True])
def test_a_metric_of_all_is_that_of_one_process(count, drop_last, shuffle):
    rows = 10.0 + np.arange(2 * count).reshape(count, 2)

    @each_rank_of(3)
    def check():
        sampler = rr.DistributedSampler(count, shuffle=shuffle, drop_last=drop_last)
        found = rr.gather_for_metrics(rows[sampler.indices()], sampler)
        kept = count // 3 * 3 if drop_last else count
        np.testing.assert_array_equal(found, rows[sampler._order()[:kept]])

    check()


@each_rank_of(2)
def test_batch_by_batch_in_torch_and_in_trees():
    sampler = TorchSampler(range(7), rr.size(), rr.rank(), shuffle=False)
    mine, found = torch.tensor(list(sampler)), []
    for start in range(0, len(mine), 3):
        batch = mine[start : start + 3]
        tree = rr.gather_for_metrics({"item": batch, "half": batch / 2}, sampler, start)
        assert torch.equal(tree["half"], tree["item"] / 2)
        found += tree["item"].tolist()
    assert found == list(range(7))


@each_rank_of(2)
def test_what_is_left_of_an_epoch():
    sampler = rr.elastic.ElasticSampler(range(7), shuffle=False)
    sampler.record_batch(0, 1)
    sampler.reset()
    assert rr.gather_for_metrics(sampler.indices(), sampler).tolist() == [2, 3, 4, 5, 6]


@each_rank_of(2)
def test_what_one_rank_refuses_is_the_others_error_and_later_calls_meet():
    sampler, rank = rr.DistributedSampler(4, shuffle=False), rr.rank()
    error, where = ((rr.InputError, "^"), (rr.MismatchError, "^rank 0 of 2, .*"))[rank]
    with pytest.raises(error, match=rf"{where}gather_for_metrics: \[3\] rows"):
        rr.gather_for_metrics(np.zeros(3 - rank), sampler)
    with pytest.raises(error, match=f"{where}gather_for_metrics 'a.1': a str is not an array"):
        rr.gather_for_metrics({"a": [np.zeros(2), np.zeros(2) if rank else "no"]}, sampler)
    assert rr.gather_for_metrics(10 * sampler.indices(), sampler).tolist() == [0, 10, 20, 30]


@each_rank_of(2)
def test_rows_that_belong_to_no_item_are_refused():
    sampler = rr.DistributedSampler(5)
    with pytest.raises(ValueError, match=r"gather_for_metrics: \[4\] rows after 0; expected .* on each rank, 3"):
        rr.gather_for_metrics(np.zeros(4), sampler)
    with pytest.raises(ValueError, match="rows after 2; expected"):
        rr.gather_for_metrics(np.zeros(2), sampler, start=2)
    with pytest.raises(ValueError, match=r"\[1, 2\] rows"):
        rr.gather_for_metrics([np.zeros(1), np.zeros(2)], sampler)
    with pytest.raises(ValueError, match=r"rows from 2 ranks; expected [12] from each, as on this rank"):
        rr.gather_for_metrics(np.zeros(1 + rr.rank()), sampler)
