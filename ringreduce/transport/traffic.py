"""How many bytes a rank sends to each other rank by messages, and how long it has any under way to it."""

from __future__ import annotations

import collections
import time


class Traffic:
    """Of one transport; only the thread that polls changes it."""

    def __init__(self) -> None:
        self.nbytes: collections.Counter[int] = collections.Counter()  # by destination
        self.seconds: collections.Counter[int] = collections.Counter()
        self._under_way: collections.Counter[int] = collections.Counter()
        self._since_s: dict[int, float] = {}

    def begin(self, destination: int, nbytes: int) -> None:
        """A message is on its way."""
        self.nbytes[destination] += nbytes
        if not self._under_way[destination]:
            self._since_s[destination] = time.monotonic()
        self._under_way[destination] += 1

    def end(self, destination: int) -> None:
        """It has been sent."""
        self._under_way[destination] -= 1
        if not self._under_way[destination]:
            self.seconds[destination] += time.monotonic() - self._since_s[destination]  # type: ignore[assignment]
