"""XLA on the CPU calls a function of the host, which reads and writes XLA's own memory; no compiler is needed.

JAX's own callbacks copy every result, and take longer. XLA's C interface for such calls, the `c_api.h` that comes with
jaxlib, passes one struct a call. ctypes reads its first fields: later versions add theirs at the end.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import jax
import numpy as np

from ringreduce.errors import described

TARGET = "ringreduce"
VERSION = (0, 1)  # of the interface, that of jaxlib 0.7
METADATA = 1  # an extension of the call's struct: the question for the version
INTERNAL = 13  # an error's code
(TOKEN,) = jax.make_jaxpr(jax.lax.create_token)().out_avals

Host = Callable[[Sequence[Any], Sequence[Any]], object]
"""Gets the operands and the results, NumPy arrays that last as long as the call."""


def _struct(name: str, **fields: Any) -> Any:
    """The first fields of a struct of the interface."""
    begin = [("size", c_size_t), ("extension", c_void_p)]
    return type(name, (ctypes.Structure,), {"_fields_": [*begin, *fields.items()]})


class _Number(ctypes.Structure):
    _fields_ = (("type", c_int), ("value", POINTER(c_uint64)))


_Version = _struct("Version", major=c_int, minor=c_int)


class _Metadata(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("version", _Version))


class _Extension(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("kind", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)))


_Error = _struct("Error", message=c_char_p, code=c_int)
_Api = _struct("Api", version=_Version, internal=c_void_p, error=ctypes.CFUNCTYPE(c_void_p, POINTER(_Error)))
_Buffer = _struct("Buffer", type=c_int, address=c_void_p)
_Buffers = _struct("Buffers", count=c_int64, kinds=c_void_p, of=POINTER(POINTER(_Buffer)))
_Attributes = _struct("Attributes", count=c_int64, kinds=c_void_p, names=c_void_p, of=POINTER(POINTER(_Number)))
_parts = {"operands": _Buffers, "results": _Buffers, "attributes": _Attributes}
_Call = _struct("Call", api=POINTER(_Api), context=c_void_p, stage=c_int, **_parts)


def lowered(ctx: Any, host: Host, operands: Sequence[Any], token: Any) -> tuple[Sequence[Any], Any]:
    """A call of `host` in the program that JAX is making; returns its results, and the next token, if any."""
    inputs, outputs = _kinds(ctx.avals_in), _kinds(ctx.avals_out)

    def call(operands: Any, results: Any) -> None:
        host(_arrays(operands, inputs), _arrays(results, outputs))

    # JAX never calls it, but keeps it as long as the program, and waits for programs that have such callbacks. For
    # others it does not: their error would be that of the token, and come again at every later call.
    ctx.module_context.add_host_callback(call)
    lower = functools.partial(jax.ffi.ffi_lowering(TARGET, has_side_effect=True), address=np.uint64(id(call)))
    if token is None:
        return lower(ctx, *operands), None
    with_token = ctx.replace(avals_in=[*ctx.avals_in, TOKEN], avals_out=[*ctx.avals_out, TOKEN])
    *results, token = lower(with_token, *operands, token)
    return results, token


def _kinds(avals: Sequence[Any]) -> list[Any]:
    """Shape, type, and ctypes' type of the memory of each array."""
    return [(each.shape, each.dtype, ctypes.c_char * (each.size * each.dtype.itemsize)) for each in avals]


def _arrays(buffers: Any, kinds: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Views of XLA's memory; a token, which has none, is the last buffer."""
    memory = [memory.from_address(buffers.of[at].contents.address or 0) for at, (_, _, memory) in enumerate(kinds)]
    return [np.ndarray(shape, dtype, each) for each, (shape, dtype, _) in zip(memory, kinds, strict=True)]


def _called(pointer: Any) -> int | None:
    """What XLA calls; returns an error, or None."""
    call = pointer.contents
    if call.extension:
        extension = ctypes.cast(call.extension, POINTER(_Extension)).contents
        if extension.kind == METADATA:
            version = extension.metadata.contents.version
            version.major, version.minor = VERSION
        return None
    try:
        address = call.attributes.of[0].contents.value[0]
        ctypes.cast(address, ctypes.py_object).value(call.operands, call.results)
    except BaseException as exc:
        error = _Error(ctypes.sizeof(_Error), None, described(exc).encode(), INTERNAL)
        made: int = call.api.contents.error(ctypes.byref(error))
        return made
    return None


HANDLER = ctypes.CFUNCTYPE(c_void_p, POINTER(_Call))(_called)  # as long as XLA may call it
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(HANDLER), platform="cpu", api_version=1)
