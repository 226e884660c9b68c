"""Sets of ranks as text: `0,3-5`. Pure functions, for a flag and for the prefixes of folded lines."""

import re
from collections.abc import Iterable

from .errors import UsageError
from .spans import spans

_ITEM = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")
_EXPECTED = "expected are ranks and ranges of ranks with commas between them, as in 0,3-5"
_SHOWN_CHARACTERS = 20


def parse_ranks(text: str, size: int, flag: str) -> frozenset[int]:
    """Return the ranks that `text`, the value of `flag`, names; UsageError if they are not ranks of `size`.

    >>> sorted(parse_ranks("0,3-5", 8, "--ranks"))
    [0, 3, 4, 5]
    """
    ranks: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            what = f"{_shortened(item.strip())!r} is neither a rank nor a range" if item.strip() else "an empty item"
            raise UsageError(f"{flag} {_shortened(text)!r}: {what}; {_EXPECTED}")
        first = _rank(match[1], size, flag)
        last = _rank(match[2] or match[1], size, flag)
        if last < first:
            raise UsageError(f"{flag} {_shortened(text)!r}: the range {first}-{last} is reversed; write {last}-{first}")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def _rank(digits: str, size: int, flag: str) -> int:
    number = digits.lstrip("0") or "0"
    if len(number) > len(str(size)) or int(number) >= size:  # int() refuses thousands of digits
        there_are = "is only rank 0" if size == 1 else f"are ranks 0 to {size - 1}"
        raise UsageError(f"{flag}: there is no rank {_shortened(number)}; with -np {size} there {there_are}")
    return int(number)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def split_ranks(ranks: Iterable[int], max_characters: int) -> list[str]:
    """Return texts that together name `ranks`, in order, each of at most `max_characters` or of a single item.

    >>> split_ranks([0, 2, 4, 6, 8], 5)
    ['0,2,4', '6,8']
    """
    texts: list[str] = []
    for item in spans(ranks):
        if texts and len(texts[-1]) + 1 + len(item) <= max_characters:
            texts[-1] += f",{item}"
        else:
            texts.append(item)
    return texts
