"""Requests and replies between a worker and a server: a header, an outline, and the bytes of all arrays."""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ringreduce.api.objects import unpickled
from ringreduce.api.ordered import Ordered
from ringreduce.arrays.dtypes import element_type
from ringreduce.compression import AnyCompressor, Quantized, wire_of
from ringreduce.execution.submission import Handle
from ringreduce.kernels import quantized
from ringreduce.runtime.arguments import check_encoded

BEGIN, PUSH, PULL, DONE, REPLY = range(5)
"""Kinds; BEGIN brings the values to start from."""
_TAG = 1


class Message(NamedTuple):
    """What one rank tells another."""

    kind: int
    arrays: dict[str, Any]
    nbytes: int  # on the wire


class _Encoded(NamedTuple):
    """What has been made blocks."""

    bits: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Packed = list[Any]
"""The parts of a message, NumPy arrays."""


def pack(kind: int, arrays: Mapping[str, Any], compression: AnyCompressor) -> Packed:
    """A message with copies of the arrays. 8 or 4 bits are for gradients: parameters travel as they are."""
    outline, parts = [], []
    wire = wire_of(compression) if kind == PUSH else None
    for name, array in arrays.items():
        compressed, context = compression.compress(array) if wire is None else _encoded(array, wire)
        flat = np.ascontiguousarray(compressed).reshape(-1).view(np.uint8)
        outline.append((name, compressed.shape, compressed.dtype, context))
        parts.append(flat)
    described = np.frombuffer(pickle.dumps(outline) if outline else b"", np.uint8)
    header = np.array([kind, described.size, sum(each.size for each in parts)], np.int64)
    return [header, described, np.concatenate(parts)] if outline else [header]


def _encoded(array: Any, wire: Quantized) -> tuple[Any, _Encoded]:
    check_encoded(element_type(array.dtype), wire)
    flat, blocks = np.ascontiguousarray(array, np.float32).reshape(-1), wire.blocks(array.size)
    quantized.encode(wire.bits, flat, blocks, zlib.crc32(flat.data) if wire.is_stochastic else None)
    return blocks, _Encoded(wire.bits, array.shape, array.dtype)


def _decoded(blocks: Any, of: _Encoded) -> Any:
    flat = np.empty(math.prod(of.shape), np.float32)
    quantized.decode(of.bits, blocks, flat)
    return flat.astype(of.dtype, copy=False).reshape(of.shape)


def send(channel: Ordered, rank: int, packed: Packed) -> list[Handle]:
    """Begin to send; returns what to wait for."""
    return [channel.send_async(each, rank, _TAG) for each in packed]


def receive(channel: Ordered, rank: int, compression: AnyCompressor) -> Message:
    """Wait for the next message of this rank."""
    header = channel.recv(np.empty(3, np.int64), rank, _TAG)
    kind, described, size = header.tolist()
    arrays: dict[str, Any] = {}
    if described:
        outline = unpickled(channel.recv(np.empty(described, np.uint8), rank, _TAG), f"ps: what rank {rank} sent")
        data, at = channel.recv(np.empty(size, np.uint8), rank, _TAG), 0
        for name, shape, dtype, context in outline:
            nbytes = math.prod(shape) * dtype.itemsize
            array = data[at : at + nbytes].view(dtype).reshape(shape)
            is_encoded = isinstance(context, _Encoded)
            arrays[name] = _decoded(array, context) if is_encoded else compression.decompress(array, context)
            at += nbytes
    return Message(kind, arrays, header.nbytes + described + size)
