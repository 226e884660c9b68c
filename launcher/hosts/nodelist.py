"""Slurm's notation for many hosts, `n[001-003,7],login-[1-2]x`: read, and written where messages name hosts."""

import itertools
import math
import re
from collections.abc import Sequence

from ..errors import UsageError
from ..text import format_spans, quoted
from .host import check_name

NODELIST = "SLURM_JOB_NODELIST"
MAX_NODES = 65536
"""As many as Slurm itself expands; a longer list is a mistake, and would fill memory."""

_NODE = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)


def expand_nodelist(text: str) -> list[str]:
    """Return the names in Slurm's compressed list, in its order; UsageError if it is no such list."""
    where = f"{NODELIST}={quoted(text)}"
    nodes = _NODE.findall(text)
    if not nodes or ",".join(nodes) != text:
        raise UsageError(f"{where}: expected names with ranges in brackets, as in n[001-003,7],m[1-2]x")
    names: list[str] = []
    for node in nodes:
        literals_and_ranges = _BRACKETS.split(node)
        choices = [_expand_ranges(ranges, where) for ranges in literals_and_ranges[1::2]]
        if len(names) + math.prod(map(len, choices)) > MAX_NODES:
            raise UsageError(f"{where}: more than {MAX_NODES} nodes")
        for numbers in itertools.product(*choices):
            parts = itertools.zip_longest(literals_and_ranges[::2], numbers, fillvalue="")
            names.append("".join(itertools.chain.from_iterable(parts)))
            check_name(names[-1], where)
    return names


def _expand_ranges(text: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise UsageError(f"{where}: expected a number or a rising range, as in 001-003, got {quoted(part)}")
        if len(numbers) + int(last) - int(first) >= MAX_NODES:
            raise UsageError(f"{where}: more than {MAX_NODES} nodes")
        numbers += (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def fold_names(names: Sequence[str]) -> str:
    """Return the names, those that differ in their last number only as one, in the order of their first.

    >>> fold_names(["n1", "n2", "n3", "login", "n5"])
    'n[1-3,5],login'
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        key = (match[1], match[3]) if match and ":" not in name else (name,)  # an IPv6 address is no counter
        groups.setdefault(key, []).append(match[2] if match and len(key) > 1 else name)
    return ",".join(_folded(key, members) for key, members in groups.items())


def _folded(key: tuple[str, ...], members: Sequence[str]) -> str:
    if len(key) == 1:
        return key[0]
    if len(members) == 1:
        return f"{key[0]}{members[0]}{key[1]}"
    return f"{key[0]}[{','.join(_number_spans(members))}]{key[1]}"


def _number_spans(numbers: Sequence[str]) -> list[str]:
    """Return spans of numbers; those with leading zeros separately for each width: `001-012`."""
    if not any(number.startswith("0") and len(number) > 1 for number in numbers):
        return [format_spans(map(int, numbers))]
    by_width: dict[int, list[int]] = {}
    for number in numbers:
        by_width.setdefault(len(number), []).append(int(number))
    parts = []
    for width, values in sorted(by_width.items()):
        spans = format_spans(values).split(",")
        parts += ["-".join(end.zfill(width) for end in span.split("-")) for span in spans]
    return parts
