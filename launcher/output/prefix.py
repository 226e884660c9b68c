"""What stands before a line: the time, if wanted, and the number of its rank, or those of all that printed it."""

import time
from collections.abc import Sequence

from ..text import split_ranks

_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_BOLD = 1  # several ranks have no colour of their own
_RESET = b"\x1b[0m"
_MAX_CHARACTERS = 20


class Prefix:
    """`[rank] `, as wide for every rank; with `fold`, as wide as `[0-7] ` for single ranks too."""

    def __init__(self, size: int, *, colour: bool, fold: bool = False) -> None:
        digits = len(str(size - 1))
        self._width = 2 * digits + 1 if fold and size > 1 else digits
        self._colour = colour
        self._single = [self._make((rank,)) for rank in range(size)]  # made once, used for every line

    def of(self, *ranks: int) -> list[bytes]:
        """Return the prefix of `ranks`, without the space after it; several if one would be too long to read."""
        return self._single[ranks[0]] if len(ranks) == 1 else self._make(ranks)

    def _make(self, ranks: tuple[int, ...]) -> list[bytes]:
        colour = _COLOURS[ranks[0] % len(_COLOURS)] if len(ranks) == 1 else _BOLD
        texts = [f"[{text:>{self._width}}]".encode() for text in split_ranks(ranks, _MAX_CHARACTERS)]
        return [b"\x1b[%dm%s%s" % (colour, text, _RESET) for text in texts] if self._colour else texts

    def apply(self, ranks: Sequence[int], line: bytes, time_text: bytes = b"") -> list[bytes]:
        """Return `line` with `time_text` and the prefix of `ranks`, without a newline; once for every prefix."""
        before = time_text + b" " if time_text else b""
        after = b" " + line if line else b""
        return [before + prefix + after for prefix in self.of(*ranks)]


def local_time(at_s: float) -> bytes:
    """Return the local time at `at_s`, in seconds since the epoch: `2026-03-29 14:05:09.250`."""
    whole_s, milliseconds = divmod(int(at_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(whole_s))}.{milliseconds:03d}".encode()
