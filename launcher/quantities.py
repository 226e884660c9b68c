"""Numbers that flags are given, checked."""

import math

from .errors import UsageError

_MOST_DIGITS = 10
_MOST_RANKS = 999_999  # as hosts have slots


def parse_seconds(text: str, flag: str) -> float:
    """Return the seconds in `text`, the value of `flag`: more than none, and not for ever."""
    try:
        seconds = float(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: not a number of seconds") from None
    if not 0 < seconds < math.inf:
        raise UsageError(f"{flag} {text}: expected is a number of seconds above 0")
    return seconds


def parse_times(text: str, flag: str) -> int:
    """Return how often something is to be done, 0 or more."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS else -1
    if number < 0:
        raise UsageError(f"{flag} {text}: expected is how often, a whole number of 0 or more")
    return number


def parse_rank_count(text: str, flag: str) -> int | None:
    """Return how many ranks there are to be; None for auto."""
    if text == "auto":
        return None
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: neither a whole number nor auto") from None
    if count < 1:
        raise UsageError(f"{flag} {text}: at least 1 rank is needed")
    if count > _MOST_RANKS:
        raise UsageError(f"{flag} {text}: expected are at most {_MOST_RANKS} ranks")
    return count
