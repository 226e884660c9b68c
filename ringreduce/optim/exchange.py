"""How gradients are reduced: compressed, scaled, dense or sparse; and the options that say so, checked once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.api.gather import grouped_allgather_async
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.reduce import allreduce_async, arguments_of, grouped_allreduce, submit
from ringreduce.api.submit import which_op
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.ops import Adasum, Average, Max, ReduceOp, Sum

Finish = Callable[[], list[Any]]  # waits, and returns the reduced arrays


def check_passes(passes: int) -> int:
    """The `backward_passes_per_step`; raises InputError for one below 1."""
    if passes < 1:
        raise InputError(f"backward_passes_per_step={passes}; expected 1 or more")
    return passes


class Exchange:
    """What is done to every gradient of an optimizer.

    op:     Average, Sum or Adasum; with any_op others, too.
    gradient_predivide_factor: f: Average divides by f before the sum and by size / f after it.
    Raises: InputError (a ValueError) for wrong options. The world is not looked at; see `check_world`.
    """

    def __init__(
        self,
        op: ReduceOp = Average,
        compression: type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        *,
        any_op: bool = False,
    ) -> None:
        if which_op("DistributedOptimizer", None, op) not in (Average, Sum, Adasum) and not any_op:
            raise InputError(f"DistributedOptimizer: op={op!r}; expected Average, Sum or Adasum")
        predivide = gradient_predivide_factor
        if predivide != 1.0 and op is not Average:
            raise InputError(f"gradient_predivide_factor={predivide} with op={op!r}; it works with op=Average only")
        if not predivide > 0:
            raise InputError(f"gradient_predivide_factor={predivide}; expected a number above 0")
        if not all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
            raise InputError(
                f"compression={compression!r}; expected Compression.none, .fp16, .bf16, or a class with the static "
                "methods compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx)"
            )
        self.op, self.compression, self.process_set = op, compression, process_set
        self.scales = 1 / predivide, float(predivide)
        scales = {"prescale_factor": self.scales[0], "postscale_factor": self.scales[1]}
        self.arguments: dict[str, Any] = {
            "compression": compression,
            "op": op,
            "process_set": process_set,
            **scales,
        }  # of an allreduce

    @property
    def size(self) -> int:
        """The ranks that take part; 1: there is nothing to do, as on a rank that is not in the process set."""
        return (self.process_set.size() or 1) if self.process_set.included() else 1

    def check_world(self) -> None:
        """Raise InputError where the current world cannot do this; another init() may have changed its size."""
        number_of(self.process_set, "DistributedOptimizer")
        if self.op is Adasum and self.size & (self.size - 1):
            raise InputError(f"op=Adasum: {self.size} ranks; expected a power of two, such as 2, 4 or 8")

    def reduce(self, arrays: Sequence[Any], name: str | None = None, names: Sequence[str] | None = None) -> list[Any]:
        """The reduced arrays, new ones, all or none of them; the same ones where this rank takes no part.

        name, names: of the group, by which ranks match it, and of its members, for error messages.
        """
        if not self.process_set.included():
            return list(arrays)
        return grouped_allreduce(arrays, name=name, names=names, **self.arguments)

    def begin(
        self,
        name: str,
        arrays: Sequence[Any],
        names: Sequence[str] | None = None,
        *,
        in_place: bool = False,
        line: str | None = None,
    ) -> Finish:
        """Begin to reduce arrays; those of a group, which have `names`, all or nothing.

        in_place: what is not compressed is reduced in its own memory. line: the user's, where the caller knows it.
        """
        if self.size == 1:
            return lambda: list(arrays)
        pairs = [self.compression.compress(each) for each in arrays]
        options: dict[str, Any] = {"in_place": in_place, "line": line}
        handle = submit([array for array, _ in pairs], name, names, self._arguments(), self.process_set, **options)
        return functools.partial(self._finish, handle, [context for _, context in pairs])

    def _finish(self, handle: Handle, contexts: list[Any]) -> list[Any]:
        reduced = zip(handle.wait(), contexts, strict=True)
        return [self.compression.decompress(each, context) for each, context in reduced]

    def _arguments(self) -> Any:
        return arguments_of("allreduce", None, self.op, *self.scales)

    def refuse(self, name: str) -> None:
        """Let the group of this name fail on all ranks with MismatchError; nobody waits for this submission itself."""
        if self.size > 1:
            submit([np.empty(0, np.float32)], name, ["nothing"], self._arguments(), self.process_set, in_place=True)

    def begin_maximum(self, name: str, numbers: Sequence[int]) -> Handle:
        """Begin to find each number's largest value on any rank."""
        return allreduce_async(np.array(numbers, np.int32), name=name, op=Max, process_set=self.process_set)


def begin_rows(
    function: str, name: str | None, indices: Any, values: Any, op: ReduceOp, process_set: ProcessSet
) -> Callable[[], tuple[Any, Any]]:
    """Begin to reduce a sparse array: the rows of all ranks are gathered. Returns what waits for indices and values.

    indices, values: as many rows on this rank; a row that several ranks have is in the result several times.
    Cost:   two allgathers, as one group; not compressed.
    Raises: InputError (a ValueError) for another op than Average and Sum, and as `allgather`.
    """
    if op not in (Average, Sum):
        raise InputError(f"{function}: op={op!r}; expected Average or Sum")
    handle = grouped_allgather_async([indices, values], name, process_set)

    def finish() -> tuple[Any, Any]:
        indices, values = handle.wait()
        return indices, values / (process_set.size() or 1) if op is Average else values

    return finish
