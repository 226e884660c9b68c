"""Requests and replies between a worker and a server: a header, an outline, and the bytes of all arrays."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ringreduce.api.ordered import Ordered
from ringreduce.compression import Compressor
from ringreduce.execution.submission import Handle

BEGIN, PUSH, PULL, DONE, REPLY = range(5)
"""Kinds; BEGIN brings the values to start from."""
_TAG = 1


class Message(NamedTuple):
    """What one rank tells another."""

    kind: int
    arrays: dict[str, Any]
    nbytes: int  # on the wire


Packed = list[Any]
"""The parts of a message, NumPy arrays."""


def pack(kind: int, arrays: Mapping[str, Any], compression: type[Compressor]) -> Packed:
    """A message with copies of the arrays."""
    outline, parts = [], []
    for name, array in arrays.items():
        compressed, context = compression.compress(array)
        flat = np.ascontiguousarray(compressed).reshape(-1).view(np.uint8)
        outline.append((name, compressed.shape, compressed.dtype, context))
        parts.append(flat)
    described = np.frombuffer(pickle.dumps(outline) if outline else b"", np.uint8)
    header = np.array([kind, described.size, sum(each.size for each in parts)], np.int64)
    return [header, described, np.concatenate(parts)] if outline else [header]


def send(channel: Ordered, rank: int, packed: Packed) -> list[Handle]:
    """Begin to send; returns what to wait for."""
    return [channel.send_async(each, rank, _TAG) for each in packed]


def receive(channel: Ordered, rank: int, compression: type[Compressor]) -> Message:
    """Wait for the next message of this rank."""
    header = channel.recv(np.empty(3, np.int64), rank, _TAG)
    kind, described, size = header.tolist()
    arrays: dict[str, Any] = {}
    if described:
        outline = pickle.loads(channel.recv(np.empty(described, np.uint8), rank, _TAG).data)  # noqa: S301 - a rank's
        data, at = channel.recv(np.empty(size, np.uint8), rank, _TAG), 0
        for name, shape, dtype, context in outline:
            nbytes = math.prod(shape) * dtype.itemsize
            arrays[name] = compression.decompress(data[at : at + nbytes].view(dtype).reshape(shape), context)
            at += nbytes
    return Message(kind, arrays, header.nbytes + described + size)
