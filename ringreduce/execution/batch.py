"""Batches: tensors that can be fused, and the submissions that own them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.arrays.buffer import Buffer
from ringreduce.collectives import fusion
from ringreduce.execution.signature import kind_of_device
from ringreduce.execution.submission import Submission


class Batch(NamedTuple):
    """Tensors of one element type on one kind of device."""

    inputs: list[Buffer]
    outputs: list[Buffer]
    owners: list[Submission]

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple([each.count for each in self.inputs])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.counts) * self.inputs[0].element.itemsize

    @property
    def on_gpu(self) -> bool:
        """True for all of them or none."""
        return self.inputs[0].on_gpu

    def expect(self, buckets: Sequence[fusion.Bucket] | None) -> None:
        """Count the pieces that each owner waits for.  None: every tensor is one."""
        pieces = [self.owners] if buckets is None else map(self.owners_of, buckets)
        for owner in itertools.chain.from_iterable(pieces):
            owner.missing_pieces += 1

    def owners_of(self, bucket: fusion.Bucket) -> list[Submission]:
        """The submission of each piece of a bucket."""
        return [self.owners[piece.tensor] for piece in bucket.pieces]


def batches(submissions: Sequence[Submission]) -> list[Batch]:
    """The tensors by element type and kind of device; the caller settles each submission once after planning."""
    found: dict[tuple[str, str], Batch] = {}
    element, device = None, ""
    inputs, outputs, owners = Batch([], [], [])
    for submission in submissions:
        for source, target in zip(submission.inputs, submission.outputs):  # noqa: B905, as many; strict=True takes time
            if source.element is not element or source.device != device:
                element, device = source.element, source.device
                key = element.name, kind_of_device(device)
                inputs, outputs, owners = found.setdefault(key, Batch([], [], []))
            inputs.append(source)
            outputs.append(target)
            owners.append(submission)
    return list(found.values())
