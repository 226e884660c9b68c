"""The buffer of any array: NumPy, CuPy, torch, and objects with DLPack or the CUDA array interface."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import Buffer, NotContiguousError, check_places, numpy_buffer, packed, plain
from ringreduce.arrays.cuda import cupy
from ringreduce.arrays.dlpack import a_kind_of, dlpack_buffer, foreign_gpu_buffer, is_on_gpu, is_traced
from ringreduce.arrays.dtypes import element_type
from ringreduce.arrays.gpu_buffer import cupy_buffer, is_cupy
from ringreduce.arrays.memory import Memory, overlapping
from ringreduce.arrays.torch_tensor import is_torch, torch_buffer, torch_packed
from ringreduce.errors import InputError, UnsupportedArrayError


def as_buffer(array: Any, writable: bool = False) -> Buffer:
    """A view of `array`, sharing its memory; a Python or NumPy number becomes a 0-d array.

    An array that is not C-contiguous is copied, unless it is to be written to: see `to_write`.
    Raises: UnsupportedArrayError when it is not an array, its element type is not supported, or it is to be written to
            and is read-only or not C-contiguous; MissingExtraError for GPU memory without CuPy.
    """
    if isinstance(array, np.ndarray):
        return numpy_buffer(array, writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        buffer = torch_buffer(array, writable)
        if writable and not array.is_inference():  # as see_changed: a call less for each gradient
            torch.autograd.graph.increment_version(array)
        return buffer
    if isinstance(array, bool | int | float | complex | np.generic):
        if writable:
            raise UnsupportedArrayError(
                f"{a_kind_of(array)} cannot be changed in place; pass an array, or use broadcast_object"
            )
        return numpy_buffer(np.asarray(array), writable)
    if is_cupy(array):
        return cupy_buffer(array, writable)
    if is_traced(array):
        raise UnsupportedArrayError(
            "a traced value of JAX has no elements yet; call this outside of jax.jit, or use ringreduce.jax"
        )
    if is_on_gpu(array):
        return foreign_gpu_buffer(array, writable)
    if hasattr(array, "__cuda_array_interface__"):
        return cupy_buffer(cupy().asarray(array), writable)
    if hasattr(type(array), "__dlpack__"):  # not through __getattr__: a container that forwards to its array is not one
        return dlpack_buffer(array, writable)
    raise UnsupportedArrayError(f"{a_kind_of(array)} is not an array; {_instead_of(array)}")


def host_array(array: Any) -> np.ndarray[Any, Any] | None:
    """A NumPy array of the same memory, if that takes no time; else None."""
    if type(array) is np.ndarray:
        return array
    if type(array).__module__ == "torch" and array.is_cpu and not array.requires_grad:
        with contextlib.suppress(TypeError, RuntimeError):  # of bfloat16; of a conjugated view
            found: np.ndarray[Any, Any] = array.numpy()
            return found
    return None


def see_changed(tensor: Any) -> None:
    """Let autograd, which may have saved this tensor of torch's, see that its elements change."""
    if not tensor.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(tensor)


def _instead_of(array: Any) -> str:
    """What to pass instead of something that is not an array."""
    if isinstance(array, Mapping):
        return "pass its arrays one by one; allreduce takes a dict"
    if isinstance(array, list | tuple):
        return "pass numpy.array(...) of numbers, or a list of arrays to allreduce"
    if isinstance(array, str):
        return (
            "for text use broadcast_object; if it is a key of a dict of arrays, pass that to allreduce, or "
            "list(d.values()) to grouped_allreduce"
        )
    if array is None:
        return "leave it out on all ranks, or pass zeros of the shape that the others pass"
    if hasattr(type(array), "__array__"):
        return "pass the numbers in it: numpy.asarray(...)"
    return "expected a NumPy, CuPy or torch array, or an object with __dlpack__ or __cuda_array_interface__"


def as_buffers(arrays: Sequence[Any], made: Callable[[Any], Any] | None = None, writable: bool = False) -> list[Buffer]:
    """As `as_buffer`, of each, or of what is made of it first; an error's `at` says of which."""
    buffers: list[Buffer] = []
    try:
        for array in arrays:
            buffers.append(as_buffer(array if made is None else made(array), writable))
    except UnsupportedArrayError as exc:
        exc.at = len(buffers)
        raise
    return buffers


def to_write(arrays: Sequence[Any]) -> tuple[list[Buffer], Callable[[], None]]:
    """Buffers for results that go into `arrays`, and a function to call when they are complete.

    The buffer of an array that is not C-contiguous (torch's channels_last, a transposed one) is a copy, which that
    function writes back when it is first called: each wait for a handle calls it, and then the array is the caller's.
    Raises: UnsupportedArrayError, whose `at` says of which; also where elements share memory.
    """
    buffers: list[Buffer] = []
    backs: list[Callable[[], None]] = []
    try:
        for array in arrays:
            try:
                buffers.append(as_buffer(array, True))
            except NotContiguousError:  # rare, so not checked first: that would cost every submission
                buffer, back = _packed(array)
                buffers.append(buffer)
                backs.append(back)
    except UnsupportedArrayError as exc:
        exc.at = len(buffers)
        raise
    return buffers, functools.partial(_call_once, backs, threading.RLock()) if backs else nothing


def takes(target: Any, source: np.ndarray[Any, Any], shape: tuple[int, ...]) -> bool:
    """Whether it is a NumPy array of this shape and the source's type, apart from the source."""
    if type(target) is not np.ndarray or target.shape != shape or target.dtype != source.dtype:
        return False
    own, other = target if target.base is None else target.base, source if source.base is None else source.base
    apart = own is not other and type(own) is type(other) is np.ndarray and own.flags.owndata and other.flags.owndata
    return apart or not np.may_share_memory(target, source)  # which takes longer than all else


def wrong_out(function: str, out: Any, made: Any) -> InputError:
    """The error of an array that was given for a result of another shape, as others' rows may make it."""
    return InputError(f"{function}: out has shape {out.shape}; expected {made.shape}")


def check_apart(buffers: Sequence[Buffer]) -> None:
    """Raise InputError where two of several arrays that are changed in place share memory: one would be changed twice.

    Its `at` says which comes second.
    """
    memory = (Memory(each.device, each.start, each.nbytes, str(number)) for number, each in enumerate(buffers))
    if found := overlapping(memory):
        first, second = sorted(int(each.name) for each in found)
        error = InputError(
            f"it shares memory with tensor {first + 1} of this call, and would be changed twice; pass each array only "
            "once, even if it has two names, or pass copies"
        )
        error.at = second
        raise error


def nothing() -> None:
    """Results are in place already."""


def _call_once(backs: list[Callable[[], None]], lock: threading.RLock) -> None:
    """Call each that was not called; of several threads none returns before all are done."""
    with lock:
        while backs:
            backs.pop(0)()


def _packed(array: Any) -> tuple[Buffer, Callable[[], None]]:
    """The buffer of a C-contiguous copy of a writable array that is not, and what writes it back."""
    if is_torch(array):
        if not array.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(array)
        return torch_packed(array)
    if isinstance(array, np.ndarray):
        memory = plain(array)
        element = element_type(memory.dtype)
        flat, back = packed(memory)
        return Buffer(flat.view(element.storage), element, array.shape, "cpu", memory.dtype), back
    if is_cupy(array):
        check_places(array.shape, array.strides, array.itemsize)
        copy = array.copy(order="C")
        return cupy_buffer(copy, True), functools.partial(array.__setitem__, ..., copy)
    return as_buffer(array, True), nothing
