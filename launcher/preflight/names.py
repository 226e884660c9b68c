"""Many hosts' names in few words: `n[1-4],login`, as Slurm writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..spans import format_spans

_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)


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
    """Return spans of numbers; those with zeros in front are told by themselves for each width: `001-012`."""
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
