"""Buckets: which gradients are reduced together. See reducer.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ringreduce.errors import InputError
from ringreduce.torch.gradient_transport import DENSE, UNKNOWN, Finish, GradientTransport

if TYPE_CHECKING:
    from ringreduce.torch.gradient import Gradient

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 8 << 20
"""A bucket is closed when it has this many bytes; the first one early, so that moving begins early."""


class Bucket:
    """Gradients that are reduced together, all or nothing."""

    def __init__(self, members: list[Gradient], splits: bool = False) -> None:
        self.members = members
        self.splits = splits  # False: one gradient, or a group of the user's, which stays together
        self.begun = False  # in this step
        self.parts: list[
            tuple[Sequence[Gradient], Finish]
        ] = []  # what is in flight: the dense ones, and each sparse one
        self.missing = 0  # backward passes that the hooks have not noted yet

    @property
    def name(self) -> str:
        """The same on all ranks, whatever is frozen."""
        first, more = self.members[0].name, len(self.members) - 1
        return f"{first} and {more} more" if more else first

    @property
    def trained(self) -> list[Gradient]:
        """Its members but for the frozen ones."""
        return [each for each in self.members if each.trains]

    def lacks(self, passes: int) -> bool:
        """True until so many backward passes have computed all of it."""
        return any(each.seen < passes and each.trains for each in self.members)

    def begin(self, transport: GradientTransport, line: str) -> None:
        """Send the dense ones together, sparse ones each on its own.  line: that called backward()."""
        self.begun, members = True, self.trained
        dense: list[tuple[Gradient, torch.Tensor]] = []
        parts: list[tuple[Sequence[Gradient], Finish]] = []
        for gradient, (layout, tensor) in zip(members, [each.load(transport) for each in members], strict=True):
            gradient.attach(tensor)
            if layout == DENSE:
                dense.append((gradient, tensor))
            elif layout == UNKNOWN:  # no rank has one
                parts.append(([gradient], functools.partial(list, [tensor])))
            else:
                parts.append(([gradient], transport.begin_sparse(gradient.name, tensor)))
        if dense:
            gradients, tensors = zip(*dense, strict=True)
            names = [each.name for each in gradients] if len(self.members) > 1 else None
            computed = any(each.seen for each in gradients)
            parts.append((gradients, self._begin_dense(transport, tensors, names, line if computed else None)))
        self.parts = parts

    def _begin_dense(
        self, transport: GradientTransport, tensors: Sequence[torch.Tensor], names: Any, line: str | None
    ) -> Finish:
        try:
            return transport.begin_dense(self.name, tensors, names, line)
        except InputError as exc:
            if "pending already" not in str(exc):
                raise
            raise InputError(
                f"{exc}. Has another DistributedOptimizer a parameter of this name? Then prefix the names of one: "
                "named_parameters=[('d.' + name, p) for name, p in model.named_parameters()]"
            ) from exc

    def finish(self) -> None:
        """Wait, and put the reduced gradients into their places."""
        parts, self.parts = self.parts, []
        for members, finish in parts:
            for member in members:
                member.check_layout()
            for member, reduced in zip(members, finish(), strict=True):
                member.detach_pending(reduced)
                member.seen = 0


def fill(gradients: Sequence[tuple[int, object]]) -> list[list[int]]:
    """Which of these (bytes, kind) share a bucket, each of one kind, in the order of their last ones.

    >>> fill([(1 << 19, "float32"), (1 << 19, "float32"), (8, "float16"), (8 << 20, "float32"), (8, "float32")])
    [[0, 1], [3], [2], [4]]
    """
    buckets: list[list[int]] = []
    open_ones: dict[object, tuple[list[int], int]] = {}
    for number, (nbytes, kind) in enumerate(gradients):
        members, filled = open_ones.pop(kind, ([], 0))
        members.append(number)
        if filled + nbytes >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            buckets.append(members)
        else:
            open_ones[kind] = members, filled + nbytes
    return buckets + [members for members, _ in open_ones.values()]
