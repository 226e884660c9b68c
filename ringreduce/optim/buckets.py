"""Gradients, and the buckets in which they are reduced together. See reducer.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.errors import InputError, MismatchError
from ringreduce.execution.submission import Ended, Handle
from ringreduce.optim.exchange import FROZEN, Exchange

UNKNOWN, DENSE = 0, 1
"""Layouts of a gradient; DENSE + n is sparse, with n indices an element."""
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 8 << 20
"""A bucket is closed when it has this many bytes; the first one early, so that moving begins early."""


class Gradient:
    """One parameter's gradient on its way through a step; an adapter's class says where it is kept."""

    may_be_sparse = False
    sparse_as_dense = False  # it travels as a dense one, so that ranks may differ

    def __init__(self, name: str) -> None:
        self.name = name
        self.bucket = GradientBucket([self])
        self.is_loose = True  # a bucket may be found for it
        self.position = -1  # in the order in which gradients are computed
        self.seen = 0  # backward passes since the step's beginning, or since it was reduced
        self.layout = UNKNOWN  # the one that all ranks agreed on
        self.layout_handle: Any = None  # the handle of that agreement
        self.pending: Any = None  # what stands for it until it has arrived

    @property
    def trains(self) -> bool:
        """False for that of a frozen parameter, which takes no part."""
        raise NotImplementedError

    @property
    def size_and_kind(self) -> tuple[int, object]:
        """Its bytes, and what it has in common with those that may share its bucket, such as type and device."""
        raise NotImplementedError

    @property
    def local_layout(self) -> int:
        """Of what this rank computed; UNKNOWN where it computed none."""
        raise NotImplementedError

    def count(self) -> None:
        """Count a backward pass."""
        self.seen += 1

    def load(self) -> tuple[int, Any]:
        """Its layout, and what this rank sends; zeros in the layout of the others where it computed none."""
        raise NotImplementedError

    def attach(self, array: Any) -> None:
        """Let what this rank sends stand for the gradient until that has arrived."""

    def begin_sparse(self, exchange: Exchange, array: Any) -> Handle[list[Any]]:
        """Begin to reduce a sparse one."""
        raise NotImplementedError

    def arrive(self, reduced: Any) -> None:
        """Put the reduced gradient into its place."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Forget that it was to be reduced."""
        self.seen, self.layout_handle = 0, None
        self.bucket.begun, self.bucket.parts = False, []

    def leave_bucket(self) -> None:
        """Be reduced by its own name, also in later steps."""
        begun = self.bucket.begun and (self.seen > 0 or self.trains)  # that it is frozen is still to be said
        self.bucket, self.is_loose = GradientBucket([self]), False
        self.bucket.begun = begun

    def ask_layout(self, exchange: Exchange) -> None:
        """Begin to agree on the layout, once: a rank without a gradient cannot know what the others send."""
        if self.layout_handle is not None:
            return
        if exchange.size == 1 or not self.may_be_sparse:
            self.layout = DENSE
        else:
            self.layout_handle = exchange.begin_maximum(f"{self.name}.layout", [self.local_layout])

    def check_layout(self) -> None:
        """Wait for the agreed layout, if ranks agree on it; raises MismatchError when this rank's is another."""
        if self.layout_handle is None:
            return
        layout_handle, self.layout_handle = self.layout_handle, None
        mine = self.local_layout
        self.take_layout(mine, int(layout_handle.wait()[0]))

    def take_layout(self, mine: int, agreed: int) -> None:
        """Have the layout that all ranks agreed on; raises MismatchError when this rank's is another."""
        self.layout = agreed
        if mine not in (UNKNOWN, agreed) and not self.sparse_as_dense:
            raise MismatchError(
                f"gradient {self.name!r}: {'dense' if mine == DENSE else 'sparse'} on this rank, but sparse of another "
                "form on others; it must be the same on all ranks, or pass sparse_as_dense=True"
            )


class GradientBucket:
    """Gradients that are reduced together, all or nothing."""

    def __init__(self, members: Sequence[Gradient], splits: bool = False) -> None:
        self.members = members
        self.splits = splits  # False: one gradient, or a group of the user's, which stays together
        self.begun = False  # in this step
        self.has_told = False  # the other ranks that all of it is frozen
        self.parts: list[tuple[Sequence[Gradient], Handle]] = []  # in flight: the dense ones, and each sparse one
        self.missing = 0  # backward passes that have not been reported yet

    @property
    def name(self) -> str:
        """The same on all ranks, whatever is frozen."""
        first, more = self.members[0].name, len(self.members) - 1
        return f"{first} and {more} more" if more else first

    @property
    def trained(self) -> list[Gradient]:
        """Its members but for the frozen ones."""
        return [each for each in self.members if each.seen or each.trains]

    @property
    def unknown(self) -> list[Gradient]:
        """Those whose layout the ranks have not agreed on; none of them is frozen."""
        return [each for each in self.members if each.layout == UNKNOWN and (each.seen or each.trains)]

    def lacks(self, passes: int) -> bool:
        """True until so many backward passes have computed all of it."""
        return bool([each for each in self.members if each.seen < passes and each.trains])

    def begin(self, exchange: Exchange, line: str) -> None:
        """Send the dense ones together, sparse ones each on its own.  line: that called backward()."""
        members = self.trained
        if not members:
            self._begin_frozen(exchange, "allreduce")
            return
        self.begun, self.has_told = True, False
        loaded = [each.load() for each in members]
        dense: list[tuple[Gradient, Any]] = []
        parts: list[tuple[Sequence[Gradient], Handle]] = []
        for gradient, (layout, array) in zip(members, loaded, strict=True):
            gradient.attach(array)
            if layout == DENSE:
                dense.append((gradient, array))
            elif layout == UNKNOWN:  # no rank has one
                parts.append(([gradient], Ended([array])))
            else:
                parts.append(([gradient], gradient.begin_sparse(exchange, array)))
        if dense:
            gradients, arrays = zip(*dense, strict=True)
            parts.append((gradients, self._begin_dense(exchange, gradients, arrays, line)))
        self.parts = parts

    def _begin_frozen(self, exchange: Exchange, kind: str) -> None:
        """Say that all is frozen, in place of the operation that ranks submit that train it, and would wait for it."""
        self.begun = self.has_told = True
        for member in self.members:
            if member.layout == UNKNOWN:
                member.ask_layout(exchange)
        self.parts = [([], exchange.begin_saying(self.name, FROZEN, f"{self.name!r} (requires_grad=False)", kind))]

    def _begin_dense(
        self, exchange: Exchange, gradients: Sequence[Gradient], arrays: Sequence[Any], line: str
    ) -> Handle[list[Any]]:
        names = [each.name for each in gradients] if len(self.members) > 1 else None
        of_backward = line if max([each.seen for each in gradients]) else None
        try:
            return exchange.begin(self.name, arrays, names, line=of_backward, of_step=True)
        except InputError as exc:
            if "already pending" not in str(exc):
                raise
            raise InputError(
                f"{exc}. Does another DistributedOptimizer have a parameter of this name? Then prefix the names of "
                "one: named_parameters=[('d.' + name, p) for name, p in model.named_parameters()]"
            ) from exc

    @property
    def handles(self) -> list[Handle]:
        """Of what it waits for first: where ranks agree on layouts, those are looked at before the gradients."""
        members = [each for members, _ in self.parts for each in members if each.layout_handle is not None]
        return [each.layout_handle for each in members] if members else [handle for _, handle in self.parts]

    def finish(self) -> None:
        """Wait, and put the reduced gradients into their places."""
        parts, self.parts = self.parts, []
        for members, handle in parts:
            for member in members:
                if member.layout_handle is not None:
                    member.check_layout()
            for member, reduced in zip(members, handle.wait(), strict=True):
                member.arrive(reduced)
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
