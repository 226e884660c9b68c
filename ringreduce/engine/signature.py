"""What a rank wants done with a tensor, in a form that ranks can compare, and how two of these differ."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.buffers import Buffer

PACKAGE = str(Path(__file__).parents[1])
SPANS = 16
"""So many spans of ranks are named in a text."""


class TensorSignature(NamedTuple):
    """One tensor as all ranks must have it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """All of it for a reduction; without dim 0 for an allgather."""
    device: str
    """The kind only: cuda:0 here and cuda:1 there is how it is meant."""


class Signature(NamedTuple):
    """What one rank wants done; equal on all ranks, or it is not done."""

    kind: str
    """Such as allreduce."""
    name: str
    tensors: tuple[TensorSignature, ...] = ()
    details: tuple[tuple[str, Any], ...] = ()
    """Such as ("op", "Sum"), ("root_rank", 0)."""
    numbered: bool = False
    """The name is a number that will not come again: not worth remembering."""

    @property
    def key(self) -> str:
        """What makes two ranks' signatures meet, such as allreduce.layer3.w."""
        return self.name if self.numbered else f"{self.kind}.{self.name}"

    def detail(self, name: str) -> Any:
        """The value of one detail."""
        return dict(self.details)[name]


class SubmissionRecord(NamedTuple):
    """One rank's signature, and the line that submitted it."""

    signature: Signature
    line: str
    waits: bool = False
    """The submitting thread does nothing else until it is done."""


def sign(tensor: Buffer, name: str, shape: tuple[int, ...] | None = None) -> TensorSignature:
    """The signature of a buffer, with another shape than its own where not all of it must be equal."""
    kind = kind_of_device(tensor.device)
    return TensorSignature(name, tensor.element.name, tensor.shape if shape is None else shape, kind)


def kind_of_device(device: str) -> str:
    """Such as cuda, of cuda:1."""
    return device.partition(":")[0]


def mismatch_message(records: Mapping[int, SubmissionRecord], size: int) -> str:
    """The message of a MismatchError: the first rank that differs from the lowest, its values and the lowest's.

    records: by rank of the world, which has `size` ranks.
    """
    first = min(records)
    differing = [rank for rank in sorted(records) if records[rank].signature != records[first].signature]
    mine, theirs = records[differing[0]], records[first]
    subject, value, expected, field = _first_difference(mine.signature, theirs.signature)
    text = (
        f"rank {differing[0]} of {size}, {subject} ({mine.line}): {value}, but rank {first} has {expected} "
        f"({theirs.line}); all ranks must pass {field}"
    )
    if len(differing) > 1:
        text += f" ({ranks_text(differing)} differ from rank {first})"
    return text


def ranks_text(ranks: Iterable[int]) -> str:
    """Such as `rank 3`, `ranks 0,2-511`: short, however many they are."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ",".join("-".join(map(str, span)) for span in spans[:SPANS])
    text += f" and {len(spans) - SPANS} more spans" if len(spans) > SPANS else ""
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _first_difference(mine: Signature, theirs: Signature) -> tuple[str, str, str, str]:
    """What it is about, both values, and the field, in words."""
    subject = f"{mine.kind} {mine.name!r}"
    if mine.kind != theirs.kind:
        return subject, subject, f"{theirs.kind} {theirs.name!r}", "equal operations"
    if len(mine.tensors) != len(theirs.tensors):
        return subject, f"{len(mine.tensors)} tensors", f"{len(theirs.tensors)}", "equally many"
    for one, other in zip(mine.tensors, theirs.tensors, strict=True):
        if one != other:
            part = subject if one.name == mine.name else f"{mine.kind} {one.name!r}"
            return part, *_tensor_difference(one, other)
    for (key, ours), (_, his) in zip(mine.details, theirs.details, strict=True):
        if ours != his:
            return subject, f"{key}={_value(ours)}", f"{key}={_value(his)}", f"equal values of {key}"
    raise AssertionError("called with equal signatures")


def _tensor_difference(mine: TensorSignature, theirs: TensorSignature) -> tuple[str, str, str]:
    if mine.name != theirs.name:
        return f"name {mine.name!r}", f"name {theirs.name!r}", "equal names"
    if mine.dtype != theirs.dtype:
        return tensor_text(mine), tensor_text(theirs), "equal dtypes"
    if mine.shape != theirs.shape:
        return tensor_text(mine), tensor_text(theirs), "equal shapes"
    return f"a tensor on {mine.device}", f"one on {theirs.device}", "equal kinds of device"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def tensor_text(tensor: TensorSignature) -> str:
    """Such as float32[1000, 3]."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def calling_line() -> str:
    """The user's nearest line that led here, as file.py:41: outside this package, and torch, which records hooks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return _line(frame.f_code.co_filename, frame.f_lineno)


# Every submission asks for its line, and there are few files and lines in a program.


@functools.lru_cache(maxsize=32768)
def _is_of_library(path: str) -> bool:
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    return path.startswith((PACKAGE, os.path.dirname(torch_file)) if torch_file else PACKAGE)


@functools.lru_cache(maxsize=32768)
def _line(path: str, number: int) -> str:
    return f"{os.path.basename(path)}:{number}"


def names_of(name: str, names: Sequence[str] | None, count: int) -> Sequence[str]:
    """The names of `count` tensors that are submitted together as `name`."""
    if names is not None:
        return names
    return [name] if count == 1 else [f"{name}.{number}" for number in range(count)]
