"""What a compiled program calls on the host, with NumPy arrays: a collective, as often as the program runs.

Programs of XLA call it in another thread than the user's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api import gather
from ringreduce.api.broadcast import submit_broadcast
from ringreduce.api.control import barrier
from ringreduce.api.process_sets import number_of
from ringreduce.api.reduce import grouped_reducescatter
from ringreduce.api.world import rank
from ringreduce.arrays.view import as_buffer, as_buffers
from ringreduce.collectives.ops import Sum
from ringreduce.errors import InputError
from ringreduce.execution.signature import called_from
from ringreduce.frameworks.collective import Collective
from ringreduce.runtime.arguments import arguments_of
from ringreduce.runtime.submit import refused

Arrays = Sequence[Any]
IN_SHAPE = "allreduce", "broadcast", "average on root"  # their results have the shapes of the arguments
Shape = tuple[int, ...]
ALIGNMENT = 64
"""Bytes; JAX takes over memory that is aligned so, and copies other memory."""


@dataclasses.dataclass(frozen=True)
class HostCollective(Collective):
    """A collective that the host runs.

    place:  inside jit the name of what has none is made of it: calls there run in a thread of XLA's, where numbers
            could be drawn in another order than on another rank.
    rows:   of an allgather's results; by default all ranks have as many.
    """

    rows: tuple[int, ...] | None = None

    def shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """The shapes of this rank's results."""
        size, own = self.process_set.size() or 1, self.process_set.rank() or 0
        if self.kind == "allgather":
            rows = self.rows or [each[0] * size for each in shapes]
        elif self.kind == "reducescatter":  # the first ranks have one more where they do not come out even
            rows = [each[0] // size + (own < each[0] % size) for each in shapes]
        else:
            return shapes
        return [(count, *each[1:]) for count, each in zip(rows, shapes, strict=True)]

    def run_into(self, arrays: Arrays, results: Arrays, name: str) -> None:
        """Communicate, and wait for it, in a thread of XLA's; `results` have the shapes that were compiled."""
        with called_from(self.place):
            found = self.run(arrays, name, results)
        for target, each in zip(results, found, strict=True):
            if each.shape != target.shape:
                raise InputError(
                    f"{self.kind} ({self.place}): the result has shape {each.shape}, but {target.shape} was compiled; "
                    "inside jax.jit all ranks must pass the same number of rows, and what was compiled before "
                    "another init() "
                    "must be compiled again: jax.clear_caches()"
                )
            if each is not target:
                target[...] = each

    def run(self, arrays: Arrays, name: str | None, results: Arrays | None = None) -> Arrays:
        """Communicate, and wait for it; returns `results`, where they can be used, else new arrays."""
        found = self._run(arrays, name, results)
        self.ended()
        return found

    def _run(self, arrays: Arrays, name: str | None, results: Arrays | None) -> Arrays:
        if results is None and self.kind in IN_SHAPE:
            results = [_like(each) for each in arrays]
        match self.kind:
            case "allreduce":
                return _allreduce(self, arrays, name, results)
            case "broadcast":
                return _broadcast(self, arrays, name, results)
            case "average on root":
                averages = _allreduce(self, arrays, name, results)  # on all ranks, though only one asks for it
                return averages if rank() == self.root_rank else [np.zeros_like(each) for each in averages]
            case "allgather":
                gathered = gather.grouped_allgather(arrays, name, self.process_set)
                factor = math.prod(self.scales) * ((self.process_set.size() or 1) if self.op is Sum else 1)
                with np.errstate(all="ignore"):
                    return gathered if factor == 1.0 else [each * each.dtype.type(factor) for each in gathered]
            case "reducescatter":
                return grouped_reducescatter(arrays, name, self.compression, self.op, self.process_set, *self.scales)
            case "alltoall":
                names = self.names or [str(number) for number in range(len(arrays))]
                own = [None if name is None else f"{name}.{each}" for each in names]
                pairs = zip(arrays, own, strict=True)
                handles = [gather.alltoall_async(array, None, each, self.process_set) for array, each in pairs]
                return [handle.wait() for handle in handles]
            case _:
                barrier(self.process_set)
                return []

    def only(self, numbers: Sequence[int]) -> HostCollective:
        """The same for some of the arrays."""
        rows = self.rows and tuple(self.rows[number] for number in numbers)
        return dataclasses.replace(super().only(numbers), rows=rows)

    def gradient(self, shapes: Sequence[Shape]) -> HostCollective:
        """What makes the gradients of inputs of these shapes from those of the results."""
        back = self.transposed("jax.lax.stop_gradient(array)")
        rows = tuple(each[0] for each in shapes) if back.kind == "allgather" else None
        return dataclasses.replace(back, rows=rows)


def _allreduce(it: HostCollective, arrays: Arrays, name: str | None, results: Any) -> Arrays:
    """Straight from the memory of `arrays` into that of the results."""
    arguments = arguments_of("allreduce", None, it.op, *it.scales, it.compression)
    number = number_of(it.process_set, "allreduce")
    try:
        handle = runtime.current("allreduce").engine.submit(
            "allreduce",
            name,
            number,
            details=arguments.details,
            names=None if it.names is None else tuple(it.names),
            check=arguments.check,
            inputs=as_buffers(arrays),
            outputs=[as_buffer(each, writable=True) for each in results],
            waits=True,
            line=it.place,
        )
    except InputError as exc:
        raise refused("allreduce", exc, number, name, it.names, len(arrays)) from exc.__cause__
    handle.wait()
    return results  # type: ignore[no-any-return]


def _broadcast(it: HostCollective, arrays: Arrays, name: str | None, results: Any) -> Arrays:
    inputs, outputs = [as_buffer(each) for each in arrays], [as_buffer(each, writable=True) for each in results]
    names = it.names or [f"{it.place}.{number}" for number in range(len(arrays))]
    submit_broadcast(inputs, outputs, it.root_rank, name, names, it.process_set, waits=True).wait()
    return results  # type: ignore[no-any-return]


def _like(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array of this shape and type, aligned."""
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    result: np.ndarray[Any, Any] = memory[start : start + nbytes].view(array.dtype).reshape(array.shape)
    return result
