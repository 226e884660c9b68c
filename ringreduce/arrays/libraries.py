"""What is done with the arrays of each library in its own way: one table. No library is imported here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import shares_elements
from ringreduce.arrays.gpu_buffer import uploaded
from ringreduce.errors import UnsupportedArrayError


class Library:
    """NumPy's arrays, and those that it can view; the base of the others."""

    def to_numpy(self, array: Any) -> Any:
        """The elements on the host, in the array's own memory where that is possible.

        Of bfloat16, with which NumPy cannot compute, as float32.
        """
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedArrayError("a masked array would lose its mask; pass array.filled(value)")
        array = np.asarray(array)
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array

    def as_kind(self, original: Any, values: Any) -> Any:
        """What `to_numpy` made of an array like the original, as one of its library and type, on its device."""
        dtype = getattr(original, "dtype", None)
        return values.astype(dtype, copy=False) if str(dtype) == "bfloat16" else values

    def trains(self, parameter: Any) -> bool:
        """True when a parameter may change."""
        return True

    def read(self, parameter: Any) -> Any:
        """A copy of its values, with 32 bits or more."""
        array = np.asarray(parameter)
        return array.astype(np.result_type(array.dtype, np.float32))

    def write(self, parameter: Any, values: Any) -> None:
        """Give it values as `read` has them, rounded to its type, in its own memory."""
        parameter[...] = values

    # In the memory of an elastic state's commit

    def fits(self, array: Any) -> bool:
        """True when its elements can be kept as bytes; others are pickled."""
        return not array.dtype.hasobject

    def kind(self, array: Any) -> Any:
        """What else `put` needs to make such an array where there is none, if anything; it can be pickled."""
        return None

    def room(self, memory: Any, dtype: Any, shape: tuple[int, ...], kind: Any) -> Any:
        """A view of bytes in `memory` that `keep` can copy an array into."""
        return memory.view(dtype).reshape(shape)

    def array(self, room: Any) -> Any:
        """The array that is kept there; of a library that cannot share host memory, a copy."""
        return room

    def keep(self, rooms: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Copy arrays into a commit's memory."""
        for room, array in zip(rooms, arrays, strict=True):
            np.copyto(room, array)

    def put(self, live: Any, saved: Any) -> Any:
        """What a restored variable holds: the `live` array with the elements of `saved` if it can, else a new one.

        It cannot where elements share memory, as in an expanded array.
        """
        is_alike = _alike(live, saved) and live.flags.writeable
        if not is_alike or shares_elements(live.shape, live.strides, live.itemsize):
            return saved.copy()
        live[...] = saved
        return live


class _Torch(Library):
    def to_numpy(self, array: Any) -> Any:
        array = array.detach().cpu()
        return (array.float() if array.dtype is sys.modules["torch"].bfloat16 else array).numpy()

    def as_kind(self, original: Any, values: Any) -> Any:
        return sys.modules["torch"].as_tensor(values, dtype=original.dtype, device=original.device)

    def trains(self, parameter: Any) -> bool:
        return bool(parameter.requires_grad)

    def read(self, parameter: Any) -> Any:
        torch = sys.modules["torch"]
        return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)

    def write(self, parameter: Any, values: Any) -> None:
        with sys.modules["torch"].no_grad():
            parameter.copy_(values)

    def fits(self, array: Any) -> bool:
        strided = sys.modules["torch"].strided
        return array.layout is strided and not array.is_quantized and array.device.type != "meta"

    def kind(self, array: Any) -> tuple[str, bool, bool]:
        is_parameter = isinstance(array, sys.modules["torch"].nn.Parameter)
        return str(array.device.type), is_parameter, bool(array.requires_grad)

    def room(self, memory: Any, dtype: Any, shape: tuple[int, ...], kind: Any) -> Any:
        room = sys.modules["torch"].from_numpy(memory).view(dtype).view(shape)
        room.kind = kind  # for `put`, on a rank that has no such tensor
        return room

    def keep(self, rooms: Sequence[Any], arrays: Sequence[Any]) -> None:
        torch = sys.modules["torch"]
        with torch.no_grad():
            torch._foreach_copy_(rooms, arrays)

    def put(self, live: Any, saved: Any) -> Any:
        is_alike = _alike(live, saved) and self.fits(live) and self.fits(saved)
        if is_alike and not shares_elements(live.shape, live.stride(), 1):
            live.detach().copy_(saved)
            return live
        if not hasattr(saved, "kind"):  # it was pickled, so it is what it should be, and in no commit's memory
            return saved
        torch, (device, is_parameter, requires_grad) = sys.modules["torch"], saved.kind
        is_there = device != "cuda" or torch.cuda.is_available()
        copy = torch.empty(saved.shape, dtype=saved.dtype, device=device if is_there else "cpu").copy_(saved)
        return torch.nn.Parameter(copy, requires_grad) if is_parameter else copy.requires_grad_(requires_grad)


class _CuPy(Library):
    def to_numpy(self, array: Any) -> Any:
        return super().to_numpy(array.get())

    def as_kind(self, original: Any, values: Any) -> Any:
        return uploaded(values, original.device.id)

    def read(self, parameter: Any) -> Any:
        return parameter.astype(np.result_type(parameter.dtype, np.float32))

    def array(self, room: Any) -> Any:
        return sys.modules["cupy"].asarray(room)

    def keep(self, rooms: Sequence[Any], arrays: Sequence[Any]) -> None:
        super().keep(rooms, [each.get() for each in arrays])

    def put(self, live: Any, saved: Any) -> Any:
        if not _alike(live, saved) or shares_elements(live.shape, live.strides, live.itemsize):
            return saved
        live[...] = saved
        return live


class _Jax(Library):
    """Its arrays cannot be changed, so a restored variable holds a new one."""

    def as_kind(self, original: Any, values: Any) -> Any:
        sharding = original.sharding if original.committed else None
        return sys.modules["jax"].device_put(values.astype(original.dtype), sharding)

    def fits(self, array: Any) -> bool:
        return bool(array.is_fully_addressable) and isinstance(array.dtype, np.dtype)

    def array(self, room: Any) -> Any:
        return sys.modules["jax"].numpy.array(room)

    def put(self, live: Any, saved: Any) -> Any:
        return saved


LIBRARIES = {"numpy": Library(), "torch": _Torch(), "cupy": _CuPy(), "jax": _Jax()}


def _library_of(kind: type) -> str:
    if kind is np.ndarray:
        return "numpy"
    for name, array in (("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array")):
        base = getattr(sys.modules.get(name), array, None)
        if base is not None and issubclass(kind, base):
            return name
    return ""


library_of: Callable[[type], str] = functools.cache(_library_of)
"""The key in LIBRARIES of a type of arrays; empty for other types."""


def _by_library(method: str) -> Callable[..., Any]:
    return lambda array, *more: getattr(LIBRARIES[library_of(type(array)) or "numpy"], method)(array, *more)


to_numpy, as_kind, trains, read, write = map(_by_library, ("to_numpy", "as_kind", "trains", "read", "write"))
"""The methods of any array's library; what is of none counts as NumPy's."""


def _alike(live: Any, saved: Any) -> bool:
    """True when `live` is of the library, shape and type of `saved`."""
    same = library_of(type(live)) == library_of(type(saved)) != ""
    return same and live.shape == saved.shape and live.dtype == saved.dtype
