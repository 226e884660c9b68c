"""Before data moves, all ranks make sure that they mean the same operation.

Each rank describes what it is about to do. Digests of the descriptions travel first, with one number a rank (rows,
bytes); only when they differ do the descriptions follow, and every rank raises the same MismatchError, which names the
ranks, their values and the lines that called. Nothing else has moved then, so the job can go on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringreduce.collectives import bruck
from ringreduce.errors import MismatchError
from ringreduce.transport.base import Transport

DIGEST_BYTES = 16
PACKAGE = str(Path(__file__).parent)


class Description(NamedTuple):
    """What one rank is about to do with one tensor; fields that do not matter for an operation are equal for all."""

    operation: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """All of it for a reduction; without dim 0 for an allgather."""
    device: str = ""
    details: tuple[tuple[str, str], ...] = ()
    """Such as ("op", "Sum"), ("root_rank", "0")."""


def agree(transport: Transport, descriptions: Sequence[Description], number: int = 0) -> list[int]:
    """Make sure that all ranks describe the same; returns every rank's `number`, by rank.

    Cost:   log2(size) messages a rank, rounded up, of 24 bytes times the ranks heard of so far.
    Raises: MismatchError on every rank when descriptions differ.
    """
    text = json.dumps(descriptions)
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
    block = np.frombuffer(digest + np.int64(number).tobytes(), np.uint8)
    blocks = bruck.allgather(block, transport)
    if (blocks[:, :DIGEST_BYTES] != blocks[0, :DIGEST_BYTES]).any():
        _raise_mismatch(transport, descriptions)
    return [int(value) for value in blocks[:, DIGEST_BYTES:].copy().view(np.int64).reshape(-1)]


def _raise_mismatch(transport: Transport, descriptions: Sequence[Description]) -> None:
    mine = json.dumps([calling_line(), descriptions]).encode()
    lengths = bruck.allgather(np.array([len(mine)], np.int64), transport).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = bruck.allgather(padded, transport)
    told = [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
    lines = [line for line, _ in told]
    calls = [[_from_json(each) for each in each_rank] for _, each_rank in told]
    raise MismatchError(explain(calls, lines))


def _from_json(fields: list[object]) -> Description:
    operation, name, dtype, shape, device, details = fields
    pairs = tuple((key, value) for key, value in details)  # type: ignore[attr-defined]
    return Description(operation, name, dtype, tuple(shape), device, pairs)  # type: ignore[arg-type]


def explain(calls: Sequence[Sequence[Description]], lines: Sequence[str]) -> str:
    """The message of a MismatchError: the first rank that differs from rank 0, its values and rank 0's.

    calls: by rank, what it described;  lines: by rank, the line that called.
    """
    differing = [rank for rank in range(len(calls)) if list(calls[rank]) != list(calls[0])]
    rank = differing[0]
    mine, his = calls[rank], calls[0]
    who = f"rank {rank} of {len(calls)}"
    if len(mine) != len(his):
        operation = (mine or his)[0].operation
        text = f"{who}, {operation} ({lines[rank]}): {len(mine)} tensors, but rank 0 has {len(his)} ({lines[0]})"
        text += "; all ranks must pass equally many"
    else:
        one, other = next((a, b) for a, b in zip(mine, his, strict=True) if a != b)
        field, value, expected = _first_difference(one, other)
        text = f"{who}, {one.operation} {one.name!r} ({lines[rank]}): {value}, but rank 0 has {expected} ({lines[0]})"
        text += f"; all ranks must pass equal {field}"
    if len(differing) > 1:
        text += f" (ranks {', '.join(map(str, differing))} differ from rank 0)"
    return text


def _first_difference(mine: Description, theirs: Description) -> tuple[str, str, str]:
    """The field that differs first, in words, and both values."""
    if mine.operation != theirs.operation:
        return "operations", f"{mine.operation} {mine.name!r}", f"{theirs.operation} {theirs.name!r}"
    if mine.name != theirs.name:
        return "names", f"name {mine.name!r}", f"name {theirs.name!r}"
    if mine.dtype != theirs.dtype:
        return "dtypes", tensor_text(mine), tensor_text(theirs)
    if mine.shape != theirs.shape:
        return "shapes", tensor_text(mine), tensor_text(theirs)
    if mine.device != theirs.device:
        return "kinds of device", f"a tensor on {mine.device}", f"one on {theirs.device}"
    for (key, ours), (_, his) in zip(mine.details, theirs.details, strict=True):
        if ours != his:
            return f"values of {key}", f"{key}={ours}", f"{key}={his}"
    raise AssertionError("called with equal descriptions")


def tensor_text(description: Description) -> str:
    """Such as float32[1000, 3]."""
    return f"{description.dtype}[{', '.join(map(str, description.shape))}]"


def calling_line() -> str:
    """The nearest line outside this package that led here, as file.py:41."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
