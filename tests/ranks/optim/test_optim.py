"""optim/ on ranks: gradients that come one by one, of a framework that is but NumPy; and those that come at once."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.optim import buckets
from ringreduce.optim.exchange import Exchange
from ringreduce.optim.reducer import Reducer
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of

SHAPES = {"a": (3,), "b": (40, 2), "c": (5, 5), "d": (2,)}


class Gradient(buckets.Gradient):
    """In `array`, a float64; None on ranks that computed none."""

    def __init__(self, name):
        super().__init__(name)
        self.array, self.shape = None, SHAPES[name]

    trains = True

    @property
    def size_and_kind(self):
        return 8 * int(np.prod(self.shape)), "float64"

    @property
    def local_layout(self):
        return buckets.UNKNOWN if self.array is None else buckets.DENSE

    def load(self):
        if self.array is None:
            self.array = np.zeros(self.shape)
        return buckets.DENSE, self.array

    def arrive(self, reduced):
        self.array = reduced


class OneByOne(Reducer):
    """What an adapter is, at the least."""

    def __init__(self, passes=1):
        super().__init__(passes, Exchange())
        self.gradients = {name: Gradient(name) for name in SHAPES}
        self._gradients = {id(each): each for each in self.gradients.values()}

    def computed(self, name, array):
        gradient = self.gradients[name]
        gradient.array = array if gradient.seen == 0 else gradient.array + array
        self._computed.append(gradient)
        self._count()
        self._begin_complete([gradient.bucket])

    def learning_rates(self):
        return [0.1]


def local(name, rank, step):
    return np.arange(np.prod(SHAPES[name])).reshape(SHAPES[name]) * (rank + 1.0) + step + len(name)


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_come_one_by_one_share_buckets(monkeypatch, passes):
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 100)

    def program():
        reducer, members = OneByOne(passes), []
        for step in range(3):
            # rank 1 never computes c, and all compute the others in another order than that of their names
            for _ in range(passes):
                for name in ("d", "b", "a") if rr.rank() == 1 else ("d", "c", "b", "a"):
                    reducer.computed(name, local(name, rr.rank(), step))
            reducer.synchronize()
            assert not reducer.pending
            for name, gradient in reducer.gradients.items():
                ranks = [rank for rank in range(3) if name != "c" or rank != 1]
                expected = passes * sum(local(name, rank, step) for rank in ranks) / 3
                np.testing.assert_allclose(gradient.array, expected, rtol=1e-14)
                gradient.array = None
            reducer.stepped()
            members.append([[each.name for each in bucket.members] for bucket in reducer._buckets])
        return members

    for members in run_ranks(3, program):
        assert members == [[["d", "b"], ["a", "c"]]] * 3  # in rank 0's order but for c, which one rank lacks


@each_rank_of(2)
def test_gradients_that_come_at_once():
    exchange = Exchange(compression=rr.Compression.fp16, gradient_predivide_factor=4.0)
    mine = [np.full(3, rr.rank() + 1.0), np.full((2, 2), 2.0 * rr.rank())]
    handle = exchange.begin("later", [each.copy() for each in mine], ["v", "w"])
    reduced = exchange.reduce(mine, names=["v", "w"])
    for one, other, expected in zip(reduced, handle.wait(), (1.5, 1.0), strict=True):
        assert one.dtype == other.dtype == np.float64
        assert np.all(one == expected)
        assert np.all(other == expected)
    assert np.all(mine[0] == rr.rank() + 1)  # the caller's own


@each_rank_of(3, settings=Settings(dynamic_process_sets=True))
def test_a_rank_that_takes_no_part_keeps_its_gradients():
    others = rr.add_process_set([0, 2])
    mine = [np.array([rr.rank() + 1.0])]
    (reduced,) = Exchange(process_set=others).reduce(mine)
    (begun,) = Exchange(process_set=others).begin("w", mine).wait()
    assert (float(reduced[0]), float(begun[0])) == (2.0, 2.0)
