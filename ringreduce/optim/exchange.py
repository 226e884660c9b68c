"""How gradients are reduced: compressed, scaled, submitted; and the options that say so, checked once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of, takes_part
from ringreduce.api.reduce import allreduce_async, grouped_allreduce, submit
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.view import as_buffers, to_write
from ringreduce.collectives.ops import Adasum, Average, Max, ReduceOp, Sum
from ringreduce.compression import AnyCompressor, Compression, check_compression
from ringreduce.errors import InputError
from ringreduce.execution.signature import calling_line
from ringreduce.execution.submission import Ended, Handle
from ringreduce.optim.powersgd import PowerSGD
from ringreduce.runtime.arguments import Details, arguments_of
from ringreduce.runtime.submit import like, refused, which_op, whole_number

CHANGE, CLEARED = "change of param_groups", "clearing of gradients in place of a step"
FROZEN = "frozen parameter"
"""What `Exchange.say` and `begin_saying` are called for."""


def check_passes(passes: int) -> int:
    """The `backward_passes_per_step`; raises InputError for one below 1."""
    return whole_number("backward_passes_per_step", passes, 1)


class Exchange:
    """What is done to every gradient of an optimizer.

    op:     Average, Sum or Adasum; with any_op others, too.
    factors: the adapter calls `begin` or `reduce`, which PowerSGD needs.
    compression, gradient_predivide_factor: see `ringreduce.DistributedOptimizer`.
    Raises: InputError (a ValueError) for wrong options. The world is not looked at; see `check_world`.
    """

    def __init__(
        self,
        op: ReduceOp = Average,
        compression: AnyCompressor | PowerSGD = Compression.none,
        gradient_predivide_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        any_op: bool = False,
        factors: bool = False,
    ) -> None:
        if which_op("DistributedOptimizer", None, op) not in (Average, Sum, Adasum) and not any_op:
            raise InputError(f"DistributedOptimizer: op={op!r}; expected Average, Sum or Adasum")
        predivide = gradient_predivide_factor
        if predivide != 1.0 and op is not Average:
            raise InputError(f"gradient_predivide_factor={predivide} with op={op!r}; it works with op=Average only")
        if not predivide > 0:
            raise InputError(f"gradient_predivide_factor={predivide}; expected a number above 0")
        check_compression(compression, not (isinstance(compression, type) and issubclass(compression, PowerSGD)))
        if isinstance(compression, PowerSGD) and not factors:
            compression.compress(None)
        if isinstance(compression, PowerSGD) and op not in (Average, Sum):
            raise InputError(f"compression={compression!r} with op={op!r}; it works with Average and Sum only")
        self.op, self.compression, self.process_set = op, compression, process_set
        self.scales = 1 / predivide, float(predivide)
        self._checked = arguments_of("allreduce", None, op, *self.scales, compression)
        methods = getattr(compression, "compress", None), getattr(compression, "decompress", None)
        self._compresses = methods != (Compression.none.compress, Compression.none.decompress)
        self._joins = 0, 0  # a world's number, and how often the set's ranks have joined in it
        self._sized: tuple[Any, int | None, int] = None, None, 1  # a world, the set's number in it, and its size
        scales = {"prescale_factor": self.scales[0], "postscale_factor": self.scales[1]}
        self.arguments: dict[str, Any] = {
            "compression": compression,
            "op": op,
            "process_set": process_set,
            **scales,
        }  # of an allreduce

    @property
    def _details(self) -> Details:
        """Of the reductions that it submits."""
        factored = isinstance(self.compression, PowerSGD)
        return (*self._checked.details, *((("compressor", repr(self.compression)),) if factored else ()))

    @property
    def size(self) -> int:
        """The ranks that take part; 1: there is nothing to do, as on a rank that is not in the process set."""
        world, number = runtime.current("DistributedOptimizer").world, self.process_set.process_set_id
        of_world, of_number, size = self._sized
        if of_world is not world or of_number != number or number is None:
            size = self.process_set.size() or 1 if self.takes_part else 1
            self._sized = world, number, size
        return size

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the process set; raises InputError where there is no such set any more."""
        return takes_part(self.process_set, "DistributedOptimizer")

    def elastic_parts(self, own: bool) -> dict[str, Any]:
        """See `PowerSGD.elastic_parts`; others keep nothing."""
        return self.compression.elastic_parts(own) if isinstance(self.compression, PowerSGD) else {}

    def check_world(self) -> None:
        """Raise InputError where the current world cannot do this; another init() may have changed its size."""
        number_of(self.process_set, "DistributedOptimizer")
        if self.op is Adasum and self.size & (self.size - 1):
            raise InputError(f"op=Adasum: {self.size} ranks; expected a power of two, such as 2, 4 or 8")

    def reduce(self, arrays: Sequence[Any], name: str | None = None, names: Sequence[str] | None = None) -> list[Any]:
        """The reduced arrays, new ones, all or none of them; the same ones where this rank takes no part.

        name, names: of the group, by which ranks match it, and of its members, for error messages.
        """
        if not self.takes_part:
            return list(arrays)
        if not isinstance(self.compression, PowerSGD):
            return grouped_allreduce(arrays, name=name, names=names, **self.arguments)
        names = names or [f"gradient {number}" for number in range(len(arrays))]
        with self._naming(name, names):
            buffers = [_copied(each) for each in as_buffers(arrays)]
            factors = self.size > 1 and arrays
            begun = self._begin_factors(self.compression, name, buffers, names) if factors else Ended(None)
        begun.wait()
        return [like(each, buffer) for each, buffer in zip(arrays, buffers, strict=True)]

    def begin(
        self, name: str, arrays: Sequence[Any], names: Sequence[str] | None = None, **options: Any
    ) -> Handle[list[Any]]:
        """Begin to reduce arrays, in their own memory where they are not compressed.

        names: of the members of a group, which is reduced all or nothing.
        options: line and of_step, as of the engine's submit().
        """
        if self.size == 1:
            return Ended(list(arrays))
        if isinstance(self.compression, PowerSGD):
            with self._naming(name, names or [name]):
                buffers, written = to_write(arrays)
                factors = self._begin_factors(self.compression, name, buffers, names or [name], **options)
            return factors.mapped(lambda _: written() or list(arrays))
        if not self._compresses:
            return submit(arrays, name, names, self._checked, self.process_set, in_place=True, **options)
        pairs = [self.compression.compress(each) for each in arrays]
        decompress = self.compression.decompress

        def decompressed(reduced: list[Any]) -> list[Any]:
            return [decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]

        packed = [array for array, _ in pairs]
        reduced = submit(packed, name, names, self._checked, self.process_set, in_place=True, **options)
        return reduced.mapped(decompressed)

    @contextlib.contextmanager
    def _naming(self, name: str | None, names: Sequence[str]) -> Iterator[None]:
        """An InputError in it names the gradient."""
        try:
            yield
        except InputError as exc:
            number = self.process_set.process_set_id
            raise refused("allreduce", exc, number, name, names, len(names)) from exc.__cause__

    def _begin_factors(
        self,
        compression: PowerSGD,
        name: str | None,
        buffers: Sequence[Buffer],
        names: Sequence[str],
        **options: Any,
    ) -> Handle[None]:
        """As PowerSGD.begin."""
        options["line"] = options.get("line") or calling_line(3)
        options |= {"details": self._details, "check": self._checked.check}
        engine, number = runtime.current("DistributedOptimizer").engine, number_of(self.process_set, "allreduce")
        state = engine.states.get(number)
        joins = engine.world.number, state.joins if state else 0
        if joins[1] and joins != self._joins:
            compression.agree(self.process_set)
        self._joins = joins

        def submit(name: str | None, names: Sequence[str], buffers: Sequence[Buffer], then: Any = None) -> Handle:
            own = {"names": tuple(names), "inputs": buffers, "outputs": buffers, "then": then}
            return engine.submit("allreduce", name, number, **own, **options)

        return compression.begin(submit, name, names, buffers, self.size if self.op is Sum else 1)

    def say(
        self, name: str | None, what: str, text: str, kind: str = "allreduce", details: Details | None = None
    ) -> None:
        """Wait until all ranks have said this of `what`, in place of the operation that they know by this name.

        A rank that has nothing to say submits that operation next, so that it is told, and nobody waits for ever.
        name, kind, details: of the operation; by default the details of a reduction.
        Raises: MismatchError on all ranks, with the text, unless all have said the same; see `is_disagreement`.
        """
        self.begin_saying(name, what, text, kind, details, waits=True).wait()

    def begin_saying(
        self,
        name: str | None,
        what: str,
        text: str,
        kind: str = "allreduce",
        details: Details | None = None,
        waits: bool = False,
    ) -> Handle[list[Any]]:
        """Begin to `say`; the result is empty.  waits: the caller does at once."""
        if self.size == 1:
            return Ended([])
        said = (*(self._details if details is None else details), (what, text))
        buffers = as_buffers([np.zeros(self.size, np.float32)] if name is not None else [])
        engine, number = runtime.current("DistributedOptimizer").engine, number_of(self.process_set, kind)
        made = engine.submit(kind, name, number, details=said, inputs=buffers, outputs=buffers, waits=waits)
        return made.mapped(lambda _: [])

    def refuse(self, name: str) -> None:
        """Let the group of this name fail on all ranks with MismatchError; nobody waits for this submission itself."""
        if self.size > 1:
            submit([np.empty(0, np.float32)], name, ["nothing"], self._checked, self.process_set, in_place=True)

    def begin_maximum(self, name: str, numbers: Sequence[int]) -> Handle:
        """Begin to find each number's largest value on any rank."""
        return allreduce_async(np.array(numbers, np.int32), name=name, op=Max, process_set=self.process_set)

    def forget(self, names: Iterable[str]) -> None:
        """The gradients of these names are gone, or another parameter's."""
        if isinstance(self.compression, PowerSGD):
            self.compression.forget(names)


def is_disagreement(error: Exception) -> bool:
    """True for the error of what not all ranks have said: no gradients differ."""
    return any(each in str(error) for each in (CHANGE, CLEARED))


def _copied(buffer: Buffer) -> Buffer:
    copy = buffer.empty(buffer.shape)
    copy.flat[...] = buffer.flat
    return copy
