"""Arrays that are divided among ranks, as the gradients and parameters of a ShardedOptimizer are.

As if the arrays stood one after the other, each rank owns an equal part of all their elements: of each array a piece,
which may be empty. `reduce` is the first half of an all-reduce, `gather` the second one; with the bytes of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, number_of
from ringreduce.arrays.buffer import Buffer, plain
from ringreduce.arrays.memory import Memory, in_common
from ringreduce.arrays.view import as_buffers
from ringreduce.collectives.ops import Adasum, ReduceOp
from ringreduce.collectives.partition import bounds_of, cut_together
from ringreduce.compression import Compression
from ringreduce.errors import InputError
from ringreduce.execution.submission import Ended, Handle
from ringreduce.optim.exchange import Exchange
from ringreduce.runtime.arguments import arguments_of
from ringreduce.runtime.submit import refused

IN_16_BITS = Compression.none, Compression.fp16, Compression.bf16


def exchange_of(op: ReduceOp, compression: Any, predivide: float, process_set: ProcessSet) -> Exchange:
    """The exchange of these options; raises InputError for what cannot be reduced in shards."""
    if op is Adasum:
        raise InputError("ShardedOptimizer: op=Adasum compares whole gradients; expected Average or Sum")
    if compression not in IN_16_BITS:
        raise InputError(
            f"ShardedOptimizer: compression={compression!r}; expected Compression.none, .fp16 or .bf16: for fewer bits "
            "use a DistributedOptimizer, which reduces whole gradients"
        )
    return Exchange(op, compression, predivide, process_set)


def check_apart(memory: Iterable[Memory]) -> None:
    """Raise InputError where two parameters have memory in common: their pieces would be stepped by different ranks."""
    if which := in_common(memory):
        raise InputError(
            f"ShardedOptimizer: parameters {which}; expected memory of their own, as each rank steps a piece of each: "
            "pass tied weights as one parameter, with the sum of their gradients, or use a DistributedOptimizer"
        )


def flat(arrays: Iterable[Any]) -> list[Any]:
    """Each in one dimension, in its memory where it is contiguous; as plain arrays: a matrix would keep two."""
    return [(plain(each) if isinstance(each, np.ndarray) else each).reshape(-1) for each in arrays]


class Shards:
    """How some arrays, of so many elements each, are divided among the ranks of an exchange.

    name, names: by which ranks match the arrays together, and each in messages.
    """

    def __init__(self, name: str, names: Sequence[str], counts: Sequence[int], exchange: Exchange) -> None:
        self.name, self.names = name, tuple(names)
        self.exchange, self.size, self.rank = exchange, exchange.size, exchange.process_set.rank() or 0
        self.bounds = [at[self.rank : self.rank + 2] for at in cut_together(counts, self.size)]
        self._reduced: Buffer | None = None

    def fits(self, exchange: Exchange) -> bool:
        """True while the ranks are those among which the arrays are divided."""
        return (self.size, self.rank) == (exchange.size, exchange.process_set.rank() or 0)

    def own(self, flat: Sequence[Any]) -> list[Any]:
        """This rank's pieces of these 1-D arrays, in their memory."""
        return [array[low:high] for array, (low, high) in zip(flat, self.bounds, strict=True)]

    def reduce(self, arrays: Sequence[Any], frozen: tuple[str, ...] = (), **options: Any) -> Handle[list[Any]]:
        """Begin to reduce arrays; the result is this rank's pieces, in memory that is used again the next time.

        frozen: those that no rank may train.  options: line and of_step, as of the engine's submit().
        """
        if self.size == 1:
            return Ended(flat(arrays))
        pairs = [self.exchange.compression.compress(each) for each in arrays]
        try:
            inputs = as_buffers([array for array, _ in pairs])
        except InputError as exc:
            raise self._named(exc) from exc.__cause__
        self._check_types(inputs)
        counts = [high - low for low, high in self.bounds]
        if self._reduced is None or self._reduced.element is not inputs[0].element:
            self._reduced = inputs[0].empty((sum(counts),))
        whole = self._reduced.array()
        arguments = arguments_of("allreduce", None, self.exchange.op, *self.exchange.scales)
        options |= {"details": (*arguments.details, ("frozen", frozen)), "check": arguments.check}

        def pieces(_: Any) -> list[Any]:
            parts = [whole[low:high] for low, high in itertools.pairwise(bounds_of(counts))]
            both = zip(parts, pairs, strict=True)
            return [self.exchange.compression.decompress(part, context) for part, (_, context) in both]

        return self._submit("reduce_shards", "", inputs, [self._reduced], **options).mapped(pieces)

    def _check_types(self, inputs: Sequence[Buffer]) -> None:
        for name, each in zip(self.names, inputs, strict=True):
            if each.element is not inputs[0].element:
                raise InputError(
                    f"ShardedOptimizer: the gradient of {name!r} is {each.element.name}, that of {self.names[0]!r} is "
                    f"{inputs[0].element.name}; expected one type, that of their parameters"
                )

    def gather(self, arrays: Sequence[Any], what: str = "") -> Handle:
        """Begin to give every rank's pieces of arrays to all, in place.  what: tells apart those at the same time."""
        if self.size == 1:
            return Ended(None)
        try:
            buffers = as_buffers(arrays, writable=True)
        except InputError as exc:
            raise self._named(exc) from exc.__cause__
        return self._submit("gather_shards", what, buffers, buffers)

    def _submit(
        self, kind: str, what: str, inputs: Sequence[Buffer], outputs: Sequence[Buffer], **options: Any
    ) -> Handle:
        number = number_of(self.exchange.process_set, "ShardedOptimizer")
        options |= {"inputs": inputs, "outputs": outputs, "names": self.names if len(self.names) > 1 else None}
        try:
            return runtime.current("ShardedOptimizer").engine.submit(kind, self.name + what, number, **options)
        except InputError as exc:
            raise self._named(exc) from exc.__cause__

    def _named(self, error: InputError) -> InputError:
        number = self.exchange.process_set.process_set_id
        return refused("ShardedOptimizer", error, number, self.name, self.names, len(self.names))
