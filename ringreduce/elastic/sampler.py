"""ElasticSampler: this rank's items of a dataset, of which some are done when the ranks change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringreduce.api.sampler import DistributedSampler
from ringreduce.errors import InputError
from ringreduce.runtime.submit import whole_number


class ElasticSampler(DistributedSampler):
    """Divides what is left of an epoch among the remaining ranks; make it an attribute of the state.

        state = TorchState(model, optimizer, sampler=ElasticSampler(dataset), epoch=0)
        loader = DataLoader(dataset, batch_size=32, sampler=state.sampler)
        for batch_idx, batch in enumerate(loader):
            ...
            state.sampler.record_batch(batch_idx, 32)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)

    All ranks record batches of one size, in the order in which they get them. Ranks that go back to a commit go back to
    what was recorded then; items that were recorded do not come again in this epoch, those of a rank that died neither.

    processed_num: how many items all ranks have recorded in this epoch.
    Raises: see DistributedSampler.
    Source: Horovod's ElasticSampler, whose set_epoch always forgets; without `shuffle` the order is Horovod's, too.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, shuffle=shuffle, seed=seed)
        self.processed_num = 0
        self._begins_anew = False
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """The items that all ranks have recorded in this epoch."""
        return set(self._order()[: self.processed_num].tolist())

    @property
    def remaining_indices(self) -> list[int]:
        """The items that were left at the last `reset`, of all ranks, in order."""
        remaining: list[int] = self._order()[self._first :].tolist()
        return remaining

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which sets the order; call it on all ranks, at the end of the one before or at its beginning.

        In the middle of this very epoch, such as one that a loss has broken off, it goes on with what is left: nothing,
        where all items were recorded and the loss came before the epoch was counted.
        """
        is_under_way = epoch == self.epoch and (self.processed_num < self.count or self._begins_anew)
        super().set_epoch(epoch)
        if not is_under_way:
            self.processed_num = 0
        self.reset()
        self._begins_anew = False

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank is done with a batch of so many items, the next in order."""
        self._record(whole_number("ElasticSampler: batch_size", batch_size, 0))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank is done with these items, its next in order, and every other with as many.

        Raises: InputError for other items.
        """
        mine, done = list(indices), (self.processed_num - self._first) // self.num_replicas
        expected = self.indices()[done : done + len(mine)].tolist()
        if sorted(mine) != sorted(expected):
            raise InputError(
                f"ElasticSampler: record_indices({mine}); expected this rank's next {len(mine)} items, {expected}"
            )
        self._record(len(mine))

    def _record(self, count: int) -> None:
        self.processed_num = min(self.processed_num + count * self.num_replicas, self.count)
        self._begins_anew = False

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The items of this rank's batch number `batch_idx` since the last `reset`."""
        batch: list[int] = self.indices()[batch_idx * batch_size : (batch_idx + 1) * batch_size].tolist()
        return batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how much of it is done."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where `state_dict` says, with the ranks that there are; raises InputError for another dataset's."""
        epoch, done = state_dict["epoch"], state_dict["processed_num"]
        if done > self.count:
            raise InputError(
                f"ElasticSampler: load_state_dict() of an epoch of which {done} items are done; expected at most "
                f"{self.count}, as many as the dataset has"
            )
        self.epoch, self.processed_num = epoch, done
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the ranks that there are now."""
        self._divide()
        self._first = self.processed_num

    def elastic_begin(self) -> None:
        """The training function begins anew, with the ranks that there are now."""
        self.reset()
        self._begins_anew = True
