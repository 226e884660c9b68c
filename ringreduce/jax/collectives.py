"""Each collective as the host runs it: NumPy arrays in, new NumPy arrays out; no JAX here.

They are static arguments of the primitive, so they are hashable, and equal where a compiled function can be reused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api import gather
from ringreduce.api.broadcast import submit_broadcast
from ringreduce.api.control import barrier
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.reduce import arguments_of, grouped_reducescatter
from ringreduce.api.world import rank
from ringreduce.arrays.view import as_buffer
from ringreduce.compression import Compression
from ringreduce.errors import InputError
from ringreduce.ops import Average, ReduceOp, Sum

Arrays = Sequence[Any]
Shape = tuple[int, ...]
ALIGNMENT = 64
"""Bytes; JAX takes over memory that is so aligned, and copies other."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective with its arguments.

    place: the line of the user's script. Inside jit it is the name of what has none: calls there run in a thread of
           XLA's, where numbers could be drawn in another order than on another rank.
    names: of the arrays, for error messages.
    """

    place: str
    name: str | None = None
    names: tuple[str, ...] | None = None
    process_set: ProcessSet = global_process_set

    @property
    def by_rows(self) -> bool:
        """True where dim 0 has a meaning."""
        return False

    def shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """The shapes of the results."""
        return shapes

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """Communicate, and wait for it; returns new arrays."""
        raise NotImplementedError

    def transposed(self, shapes: Sequence[Shape]) -> Collective:
        """What makes the gradients of inputs of these shapes from those of the results."""
        raise NotImplementedError

    def only(self, numbers: Sequence[int]) -> Collective:
        """The same for some of the arrays."""
        names = None if self.names is None else tuple(self.names[number] for number in numbers)
        return dataclasses.replace(self, names=names)

    def _of_gradient(self) -> dict[str, Any]:
        """The arguments that a gradient's collective has in common with this one."""
        name = None if self.name is None else f"{self.name}.gradient"
        place = f"{self.place}.gradient"
        return {"place": place, "name": name, "names": self.names, "process_set": self.process_set}


@dataclasses.dataclass(frozen=True)
class Allreduce(Collective):
    """Its gradient is the same allreduce, as Horovod's."""

    op: ReduceOp = Average
    scales: tuple[float, float] = (1.0, 1.0)

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """Straight from the memory of `arrays` into new memory."""
        arguments = arguments_of("allreduce", None, self.op, *self.scales, self.process_set)
        inputs = [as_buffer(each) for each in arrays]
        for each in inputs:
            arguments.check(each)
        results = [_like(each) for each in arrays]
        runtime.current("allreduce").engine.submit(
            "allreduce",
            name,
            arguments.process_set,
            sign=functools.partial(arguments.sign, inputs, self.names),
            inputs=inputs,
            outputs=[as_buffer(each, writable=True) for each in results],
            waits=True,
            line=self.place,
        ).wait()
        return results

    def transposed(self, shapes: Sequence[Shape]) -> Collective:
        """Itself."""
        if self.op not in (Average, Sum):
            raise InputError(
                f"allreduce ({self.place}): op={self.op!r} has no gradient; expected Average or Sum, or "
                "jax.lax.stop_gradient(array)"
            )
        return Allreduce(**self._of_gradient(), op=self.op, scales=self.scales)


@dataclasses.dataclass(frozen=True)
class Broadcast(Collective):
    """Its gradient is the results', averaged, on the root; zeros elsewhere."""

    root_rank: int = 0

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """Into new memory."""
        results = [_like(each) for each in arrays]
        inputs, outputs = [as_buffer(each) for each in arrays], [as_buffer(each, writable=True) for each in results]
        names = self.names or [f"{self.place}.{number}" for number in range(len(arrays))]
        submit_broadcast(
            inputs, outputs, self.root_rank, name, names, self.process_set, lambda _: None, waits=True
        ).wait()
        return results

    def transposed(self, shapes: Sequence[Shape]) -> Collective:
        """See the class."""
        return AverageOnRoot(**self._of_gradient(), root_rank=self.root_rank)


@dataclasses.dataclass(frozen=True)
class AverageOnRoot(Allreduce):
    """The gradient of a broadcast."""

    root_rank: int = 0

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """An allreduce, and zeros where nobody asks for its result."""
        averages = super().run(arrays, name)
        return averages if rank() == self.root_rank else [np.zeros_like(each) for each in averages]

    def transposed(self, shapes: Sequence[Shape]) -> Collective:
        """See the class."""
        return Broadcast(**self._of_gradient(), root_rank=self.root_rank)


@dataclasses.dataclass(frozen=True)
class _OfRows(Collective):
    @property
    def by_rows(self) -> bool:
        return True

    def _size(self) -> int:
        return self.process_set.size() or 1


@dataclasses.dataclass(frozen=True)
class Allgather(_OfRows):
    """Its gradient is this rank's rows of the results', averaged.

    rows:   of the results; by default all ranks have as many.
    factor: multiplies the results.
    """

    rows: tuple[int, ...] | None = None
    factor: float = 1.0

    def shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """All ranks' rows."""
        rows = self.rows or [each[0] * self._size() for each in shapes]
        return [(count, *each[1:]) for count, each in zip(rows, shapes, strict=True)]

    def only(self, numbers: Sequence[int]) -> Collective:
        """The same for some of the arrays."""
        rows = None if self.rows is None else tuple(self.rows[number] for number in numbers)
        return dataclasses.replace(super().only(numbers), rows=rows)  # type: ignore[call-arg]

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """Gather, and scale."""
        gathered = gather.grouped_allgather(arrays, name, self.process_set)
        return gathered if self.factor == 1.0 else [each * each.dtype.type(self.factor) for each in gathered]

    def transposed(self, shapes: Sequence[Shape]) -> Collective:
        """See the class."""
        return Reducescatter(**self._of_gradient(), scales=(self.factor, 1.0))


@dataclasses.dataclass(frozen=True)
class Reducescatter(_OfRows):
    """Its gradient is an allgather of the results', times both scales, and for Sum times the number of ranks."""

    op: ReduceOp = Average
    scales: tuple[float, float] = (1.0, 1.0)

    def shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """This rank's rows; the first ranks have one more where they do not come out even."""
        size, own = self._size(), self.process_set.rank() or 0
        return [(each[0] // size + (own < each[0] % size), *each[1:]) for each in shapes]

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """Reduce and scatter."""
        return grouped_reducescatter(arrays, name, Compression.none, self.op, self.process_set, *self.scales)

    def transposed(self, shapes: Sequence[Shape]) -> Collective:
        """See the class."""
        factor = self.scales[0] * self.scales[1] * (self._size() if self.op is Sum else 1)
        return Allgather(**self._of_gradient(), rows=tuple(each[0] for each in shapes), factor=factor)


@dataclasses.dataclass(frozen=True)
class Alltoall(_OfRows):
    """Equal parts; its gradient goes back where the rows came from."""

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """All at once."""
        names = self.names or [str(number) for number in range(len(arrays))]
        handles = [
            gather.alltoall_async(array, None, None if name is None else f"{name}.{own}", self.process_set)
            for array, own in zip(arrays, names, strict=True)
        ]
        return [handle.wait() for handle in handles]

    def transposed(self, shapes: Sequence[Shape]) -> Collective:
        """Itself."""
        return Alltoall(**self._of_gradient())


@dataclasses.dataclass(frozen=True)
class Barrier(Collective):
    """No arrays."""

    def run(self, arrays: Arrays, name: str | None) -> Arrays:
        """Wait for all ranks."""
        barrier(self.process_set)
        return []


def _like(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array, aligned as JAX's."""
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    result: np.ndarray[Any, Any] = memory[start : start + nbytes].view(array.dtype).reshape(array.shape)
    return result
