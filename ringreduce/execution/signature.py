"""Signatures of submissions, which ranks compare, and the message for a mismatch."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ringreduce.arrays.buffer import Buffer

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
CALLERS = ("torch", "jax", "tensorflow", "keras")  # libraries, also where they stand in a clone
STANDARD_LIBRARY = f"{os.path.dirname(os.__file__)}{os.sep}"
SCRIPTS = f"{os.path.join(sys.prefix, 'bin')}{os.sep}"  # that pip makes, to start a package
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
TYPED = "<stdin>", "<string>", "<console>", "<input", "<ipython", "<doctest"  # <frozen ...> is none of a user's
REFUSED = "refused"  # a detail
SPANS = 16  # most spans of ranks named in a text


class TensorSignature(NamedTuple):
    """The properties of a tensor that must be equal on all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # the whole shape for a reduction; without dim 0 for an allgather
    device: str  # the kind of device: cuda:0 on one rank and cuda:1 on another is fine


class Signature(NamedTuple):
    """An operation and its arguments, which must be equal on all ranks."""

    kind: str  # such as allreduce
    name: str
    tensors: tuple[TensorSignature, ...] = ()
    details: tuple[tuple[str, Any], ...] = ()  # such as ("op", "Sum"), ("root_rank", 0)
    numbered: bool = False  # true: its name, but not its tensors' names, ends with a number that does not recur

    @property
    def unnumbered(self) -> Signature:
        """The signature without its number, if it has one: what unnamed submissions have in common."""
        if not self.numbered:
            return self
        kind, name, tensors, details, numbered = self  # half as long as `_replace`
        return Signature(kind, name.rpartition(".")[0], tensors, details, numbered)

    @property
    def key(self) -> str:
        """Equal for signatures that are compared with each other, such as allreduce.layer3.w."""
        return self.name if self.numbered else f"{self.kind}.{self.name}"

    def detail(self, name: str) -> Any:
        """The value of one detail."""
        return dict(self.details)[name]

    @property
    def refused(self) -> str:
        """Why the rank refused the call that this stands for, if it did. See `engine.submitting.Submitting.refuse`."""
        return next((why for name, why in self.details if name == REFUSED), "")

    @property
    def text(self) -> str:
        """The operation in words, such as allreduce 'layer3.w', or allreduce of an unnamed tensor."""
        if not self.numbered:
            return f"{self.kind} {self.name!r}"
        names, count = self.names, len(self.tensors)
        if names:
            return f"{self.kind} of {names[0]!r}" + (f" and {count - 1} more" if count > 1 else "")
        return self.kind + (f" of {count} unnamed tensors" if count > 1 else " of an unnamed tensor" * count)

    def text_of(self, number: int) -> str:
        """Like `text`, for one of its tensors."""
        if self.names:
            return f"{self.kind} {self.names[number]!r}"
        return self.text + (f", tensor {number + 1} of {len(self.tensors)}" if len(self.tensors) > 1 else "")

    @property
    def names(self) -> list[str]:
        """The names that the caller gave its tensors; none where `names_of` made them."""
        names = [each.name for each in self.tensors]
        return [] if names == names_of(self.unnumbered.name, None, len(names)) else names


class SubmissionRecord(NamedTuple):
    """One rank's signature, and the line that submitted it."""

    signature: Signature
    line: str
    waits: bool = False  # the submitting thread waits for it at once
    waited_s: int = 0  # whole seconds since it was submitted
    step: int = -1  # see Submission


def sign(tensor: Buffer, name: str, shape: tuple[int, ...] | None = None) -> TensorSignature:
    """The signature of a buffer; `shape` replaces its own where only a part must be equal."""
    kind = kind_of_device(tensor.device)
    return TensorSignature(name, tensor.element.name, tensor.shape if shape is None else shape, kind)


def kind_of_device(device: str) -> str:
    """The kind of a device, such as cuda for cuda:1."""
    return device.partition(":")[0]


def mismatch_message(records: Mapping[int, SubmissionRecord], size: int) -> str:
    """The message of a MismatchError: the first rank that differs from the lowest rank, and the values of both.

    records: by rank of the world, which has `size` ranks.
    """
    if refusals := [rank for rank in sorted(records) if records[rank].signature.refused]:
        return _refusal_message(refusals[0], records, size)
    first = min(records)
    differing = [rank for rank in sorted(records) if records[rank].signature != records[first].signature]
    mine, theirs = records[differing[0]], records[first]
    subject, value, expected, field = _first_difference(mine.signature, theirs.signature)
    text = (
        f"rank {differing[0]} of {size}, {subject} ({mine.line}): {value}, but rank {first} has {expected} "
        f"({theirs.line}); all ranks must {field}"
    )
    if len(differing) > 1:
        text += f" ({ranks_text(differing)} differ from rank {first})"
    if mine.signature.numbered:
        text += "; unnamed tensors are numbered in order, so an extra call on a rank shifts all later ones: pass name="
    return text


def _refusal_message(rank: int, records: Mapping[int, SubmissionRecord], size: int) -> str:
    signature, line, *_ = records[rank]
    text = f"rank {rank} of {size}, {signature.text} ({line}) was refused: {signature.refused}"
    for other, (theirs, its_line, *_) in records.items():
        if other != rank:
            return f"{text}; rank {other} has {theirs.text} ({its_line})"
    return text


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, such as `rank 3` or `ranks 0,2-511`, short for any number of ranks."""
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
    """The subject, both values, and the requirement, in words."""
    if mine.kind != theirs.kind:
        return mine.text, mine.text, theirs.text, "call the same operation"
    ours, his = dict(mine.details), dict(theirs.details)
    for key in {**ours, **his}:  # first: with other arguments, tensors may be of other shapes, too
        if ours.get(key) != his.get(key):
            same = f"pass the same {key}" if key.isidentifier() else "pass the same"
            return mine.text, _detail_text(key, ours), _detail_text(key, his), same
    if len(mine.tensors) != len(theirs.tensors):
        count = f"{len(mine.tensors)} tensors{_alone(mine, theirs)}"
        return mine.text, count, f"{len(theirs.tensors)}", "pass the same number"
    for number, (one, other) in enumerate(zip(mine.tensors, theirs.tensors, strict=True)):
        if one != other:
            return mine.text_of(number), *_tensor_difference(one, other)
    raise AssertionError("called with equal signatures")


def _detail_text(key: str, details: Mapping[str, Any]) -> str:
    value = details.get(key)
    if value is None and not key.isidentifier():  # no argument, but what is said in place of one
        return f"no {key}"
    return f"{key}={value if isinstance(value, str) else repr(value)}"


def _alone(mine: Signature, theirs: Signature) -> str:
    """The first tensor that one rank alone has, of a group whose tensors have their own names."""
    ours, his = ({each.name for each in one.tensors} for one in (mine, theirs))
    for name in mine.names:
        if name not in his:
            return f", {name!r} among them"
    return next((f" without {name!r}" for name in theirs.names if name not in ours), "")


def _tensor_difference(mine: TensorSignature, theirs: TensorSignature) -> tuple[str, str, str]:
    if mine.name != theirs.name:
        return f"name {mine.name!r}", f"name {theirs.name!r}", "pass the same name"
    if mine.dtype != theirs.dtype:
        return tensor_text(mine), tensor_text(theirs), "pass equal dtypes"
    if mine.shape != theirs.shape:
        return tensor_text(mine), tensor_text(theirs), "pass equal shapes"
    return f"a tensor on {mine.device}", f"one on {theirs.device}", "pass the same kind of device"


def tensor_text(tensor: TensorSignature) -> str:
    """A tensor in words, such as float32[1000, 3]."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def calling_line(skipped: int = 1, frame: FrameType | None = None) -> str:
    """The innermost line of the user's own code, as file.py:41: no library's, however it came to call this package.

    Where all is in packages, as with `python -m package.train`, it is that of the outermost one; in a thread of a
    library, such as a pool's, thread:NAME.

    skipped: how many functions, this one among them, are of this package for certain.  frame: of another thread.
    """
    innermost = frame = frame or sys._getframe(skipped)
    path = frame.f_code.co_filename
    while is_of_library(path):
        if frame.f_back is None:
            return getattr(_thread, "line", None) or _line_in_packages(innermost)
        frame = frame.f_back
        path = frame.f_code.co_filename
    return _line(path, frame.f_lineno)


def _line_in_packages(frame: FrameType | None) -> str:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    packages = [_package(each.f_code.co_filename) for each in frames]
    if outermost := next((each for each in reversed(packages) if each and each not in CALLERS), None):
        found = frames[packages.index(outermost)]
    elif (thread := threading.current_thread()) is not threading.main_thread():
        return f"thread:{thread.name}"
    else:
        found = next((each for each in frames if not each.f_code.co_filename.startswith(PACKAGE)), frames[0])
    return _line(found.f_code.co_filename, found.f_lineno)


_thread = threading.local()


@contextlib.contextmanager
def called_from(line: str) -> Iterator[None]:
    """Within it, `line` is the calling line in a library's thread, which no function of the user has called."""
    _thread.line = line
    try:
        yield
    finally:
        del _thread.line


# cached, since every submission needs its line


@functools.lru_cache(maxsize=32768)
def is_of_library(path: str) -> bool:
    """True for a file of this package, Python's library and installed packages, and for code that these generated."""
    if path.startswith("<"):
        return not path.startswith(TYPED)
    if _package(path) is not None or path.startswith((PACKAGE, STANDARD_LIBRARY, SCRIPTS)):
        return True
    files = [getattr(sys.modules.get(name), "__file__", None) for name in CALLERS]
    return path.startswith(tuple(f"{os.path.dirname(each)}{os.sep}" for each in files if each))


@functools.lru_cache(maxsize=32768)
def _package(path: str) -> str | None:
    """The installed package that a file is of; None for this one, and for files elsewhere."""
    found = INSTALLED.search(path)
    return None if found is None or path.startswith(PACKAGE) else found[1]


@functools.lru_cache(maxsize=32768)
def _line(path: str, number: int) -> str:
    return f"{os.path.basename(path)}:{number}"


def named(name: str | None, names: Sequence[str] | None, number: int, count: int) -> str:
    """Which of `count` tensors number `number` is, after the word for an operation; nothing for one without a name."""
    if names is not None and number < len(names):
        return f" {names[number]!r}"
    return (f" {name!r}" if name else "") + (f", tensor {number + 1} of {count}" if count > 1 else "")


def names_of(name: str, names: Sequence[str] | None, count: int) -> Sequence[str]:
    """The names of `count` tensors that are submitted together as `name`."""
    if names is not None:
        return names
    return [name] if count == 1 else [f"{name}.{number}" for number in range(count)]
