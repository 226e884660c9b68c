"""DistributedSampler: this rank's items of a dataset, for NumPy users and torch's DataLoader; gather_for_metrics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce import runtime
from ringreduce.api import gather
from ringreduce.errors import InputError
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.runtime.submit import prepared, refused, taken_apart, whole_number

Indices = npt.NDArray[np.int64]


class DistributedSampler:
    """Splits the indices of a dataset equally among the ranks, in an order that changes every epoch.

        sampler = rr.DistributedSampler(len(images))
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in sampler.batches(32):
                loss, grads = loss_and_grads(params, images[batch], labels[batch])

    All ranks draw the same order, and rank r takes items r, r + size, r + 2 size, … of it. So batch k of all ranks
    together is batch k of a single process whose batches are `size` times as long. Nothing is communicated.

    dataset:          anything that has a length, or the number of its items.
    num_replicas:     number of parts; by default size().
    rank:             the index of this part; by default rank().
    shuffle:          a new order every epoch; False: the order of the dataset.
    seed:             of the order; 0 or more, the same on all ranks.
    drop_last:        what happens to the last count % num_replicas items: True leaves them out; False gives every rank
                      one item more, and repeats the first items of the order to fill up.

    Raises: InputError (a ValueError) for a wrong argument; NotInitializedError when size() or rank() is needed.
    Source: torch.utils.data.DistributedSampler, which it can replace; the shuffled order is NumPy's own.

    >>> [list(DistributedSampler(7, num_replicas=3, rank=rank, shuffle=False)) for rank in range(3)]
    [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        count = len(dataset) if hasattr(dataset, "__len__") else dataset
        self.count = _whole("count", count, 0, ", or a dataset that has a length")
        self._divide(num_replicas, rank)
        self.shuffle = bool(shuffle)
        self.seed = _whole("seed", seed, 0)
        self.drop_last = bool(drop_last)
        self.epoch = 0
        self._first = 0  # items of the epoch's order before this one are left out

    def _divide(self, num_replicas: int | None = None, rank: int | None = None) -> None:
        """Set the number of parts, and which is this rank's."""
        if num_replicas is None:
            num_replicas = runtime.current_world("DistributedSampler").size
        if rank is None:
            rank = runtime.current_world("DistributedSampler").rank
        self.num_replicas = _whole("num_replicas", num_replicas, 1)
        self.rank = _whole("rank", rank, 0)
        if self.rank >= self.num_replicas:
            raise InputError(
                f"DistributedSampler: rank={self.rank} of num_replicas={self.num_replicas}; expected 0 to "
                f"{self.num_replicas - 1}"
            )

    @property
    def num_samples(self) -> int:
        """The number of items of each rank, as len()."""
        return len(self)

    @property
    def total_size(self) -> int:
        """The number of items of all ranks together, repeated ones too."""
        return len(self) * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 or more, that sets the order; call it on all ranks before each epoch."""
        self.epoch = _whole("epoch", epoch, 0)

    def indices(self) -> Indices:
        """This rank's indices for this epoch, in order; (len(self),), int64."""
        left = self._order()[self._first :]
        return np.resize(left, self.total_size)[self.rank :: self.num_replicas]  # resize cuts off, or begins again

    def _order(self) -> Indices:
        """All items in the order of this epoch."""
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.count)

    def batches(self, batch_size: int) -> Iterator[Indices]:
        """This rank's indices, `batch_size` at a time; the last may be fewer. Equally many batches on all ranks."""
        length = _whole("batch_size", batch_size, 1)
        mine = self.indices()
        return (mine[start : start + length] for start in range(0, len(mine), length))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        """The number of items of each rank: count / num_replicas, rounded up, or down with drop_last."""
        left = self.count - self._first
        return left // self.num_replicas if self.drop_last else math.ceil(left / self.num_replicas)


def gather_for_metrics(values: Any, sampler: Any, start: int = 0) -> Any:
    """Gather what all ranks have computed for their items, in the order of the epoch, each item once.

        for number, batch in enumerate(sampler.batches(32)):
            scores = rr.gather_for_metrics(score(images[batch]), sampler, start=32 * number)

    A sampler repeats items so that all ranks get as many; here such rows are left out, so that a metric of all of them
    is that of one process. With shuffle=False row i belongs to item i of the dataset.

    values:  an array or tensor whose rows, dim 0, belong to this rank's items, or dicts, lists and tuples of these; as
             many rows on all ranks.
    sampler: the one that gave the items, `DistributedSampler` or torch's own.
    start:   how many items each rank has had in this epoch before these.

    Cost:   a `grouped_allgather`, and a copy.
    Raises: InputError (a ValueError) where ranks have different numbers of rows, or more than the sampler gave.
    Source: gather_for_metrics of Hugging Face's accelerate.
    """
    own = functools.partial(_own_rows, values, sampler, start)
    tensors, whole, rows, items = prepared("allgather", "gather_for_metrics", GLOBAL, own)
    gathered = gather.grouped_allgather(tensors, "gather_for_metrics")
    return whole([_in_order(each, sampler.num_replicas, rows, items) for each in gathered])


def _own_rows(values: Any, sampler: Any, start: int) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any], int, int]:
    """The arrays of a tree, what makes one of as many results, their rows, and how many of all ranks' count."""
    tensors, names, whole = taken_apart(values)
    ranks, first = sampler.num_replicas, getattr(sampler, "_first", 0)
    count = sampler.count if isinstance(sampler, DistributedSampler) else len(sampler.dataset)
    items = sampler.total_size if sampler.drop_last else count - first
    try:
        given = [each.shape[0] for each in gather.with_rows(tensors)]
    except InputError as exc:
        raise refused("gather_for_metrics", exc, None, None, names, len(tensors)) from exc.__cause__
    if len(set(given)) > 1 or (given and start + given[0] > len(sampler)):
        raise InputError(
            f"gather_for_metrics: {given} rows after {start}; expected the same number of rows on all ranks, one for "
            f"each item, and "
            f"no more than the sampler has on each rank, {len(sampler)}"
        )
    return tensors, whole, max(given, default=0), items - start * ranks


def _in_order(array: Any, ranks: int, rows: int, left: int) -> Any:
    """Item by item what came rank by rank: (ranks * rows, …), of which `left` count."""
    if len(array) != ranks * rows:
        raise InputError(
            f"gather_for_metrics: got {len(array)} rows from {ranks} ranks; expected {rows} from each, as on this rank"
        )
    shape = array.shape[1:]
    return array.reshape(ranks, rows, *shape).swapaxes(0, 1).reshape(ranks * rows, *shape)[: max(0, left)]


def _whole(name: str, value: Any, least: int, otherwise: str = "") -> int:
    return whole_number(f"DistributedSampler: {name}", value, least, otherwise)
