"""Plain or streaming stores for large operations in a host's memory: those which are faster now, found while they run.

A plain store first gets its cache line, from another core's cache if need be; a streaming one goes past all caches to
memory. Plain ones are faster where the ranks' cores share a cache, streaming ones where they do not: between the chips
of some processors, and between sockets. Virtual cores move from the one to the other within minutes.

So each rank keeps the way that was fastest, and tries the others in turn, now and then:

    operation of a class   0    1    2    3    4    5    6 ... 63    64   65 ...
    way                  in use A  in use A  in use A   in use     in use B

All ranks try the same way in the same operation, for its time says how their ways go together: what one streams, the
others read from memory. Each decides by its own clock, without a message; results have the same bits either way. Cores
that move make operations slower, which all ranks see: then each tries at once, as good as together.
"""

from __future__ import annotations

import math

PLAIN, SLOTS, RESULTS = 0, 1, 2  # bits, as in kernels/native.c: what is streamed
WAYS = 4
NAMES = ("plain", "slots streaming", "results streaming", "streaming")
LARGE_BYTES = 256 << 10
"""From so many bytes of an operation on; what is shorter mostly goes through one slot (execution/in_slot.py)."""
CLASSES = 5  # of sizes, each from four times as many bytes on
FIRST_ORDER = SLOTS | RESULTS, SLOTS, RESULTS
"""In which they are tried at first, beside plain ones: one that is worse by far costs as much as several operations."""
ORDER = SLOTS | RESULTS, PLAIN, SLOTS, SLOTS | RESULTS, PLAIN, RESULTS
"""In which they are tried from then on: more often the two that are best where cores are near or far."""
FIRST = 8  # every so many operations another way is tried, until all have been once
EVERY = 64  # then every so many
TRIALS = 3  # operations of a way that is tried, turn about with the way in use: the fastest of each count
FASTER, SLOWER = 0.95, 1.3  # how its time compares: it is taken, or not tried again this time
JUMP, IN_A_ROW = 1.4, 3  # so many times as slow as usual, so many operations in a row: cores may have moved
LEAP = 3  # so many times as slow as usual: counts as two of them
FORGETS = 1.1  # what is usual grows by this with each operation, unless that is faster


class Stores:
    """The way for operations of one class of sizes, on one rank."""

    def __init__(self) -> None:
        self.way = PLAIN
        self.count = 0  # of operations
        self._tried, self._since, self._in_turn = PLAIN, 0, True
        self._best = [math.inf, math.inf]  # µs a byte: of the way in use, and of the one that is tried
        self._usual, self._slow = math.inf, 0
        self._queue: list[int] = []  # to be tried as soon as no trial runs

    def begin(self) -> int:
        """The way of the next operation."""
        number = self.count
        every, order = (FIRST, FIRST_ORDER) if number < len(FIRST_ORDER) * FIRST else (EVERY, ORDER)
        if number % every == 0 and (self._in_turn or not self._tries(number)):
            self._try(order[number // every % len(order)], number, in_turn=True)
        self.count += 1
        return self._tried if self._tries(number) and (number - self._since) % 2 else self.way

    def _tries(self, number: int) -> bool:
        """Whether this operation is one of a trial: turn about in the way in use, and in the other."""
        return self._tried != self.way and number - self._since < 2 * TRIALS

    def _try(self, way: int, since: int, in_turn: bool) -> None:
        self._tried, self._since, self._in_turn, self._best = way, since, in_turn, [math.inf, math.inf]

    def end(self, us_per_byte: float) -> None:
        """What the operation took that has begun last."""
        number = self.count - 1
        at = number - self._since
        tries = self._tries(number)
        if not (tries and at % 2):
            slow = self._slow + 1 + (us_per_byte > LEAP * self._usual) if us_per_byte > JUMP * self._usual else 0
            if self._slow < IN_A_ROW <= slow:
                self._queue = [way for way in (PLAIN, SLOTS | RESULTS) if way != self.way]
            self._slow = slow
            self._usual = min(us_per_byte, FORGETS * self._usual)
        if tries:
            self._best[at % 2] = min(us_per_byte, self._best[at % 2])
            used, tried = self._best
            moved = at == 2 and not self._in_turn and tried < used / 2  # operations in use were as slow before
            if at and tried > SLOWER * used:
                self._tried = self.way
            elif moved or (at == 2 * TRIALS - 1 and tried < FASTER * used):
                self.way, self._usual = self._tried, tried
        while self._queue and not self._tries(self.count):
            self._try(self._queue.pop(), self.count - 1, in_turn=False)  # the next operation is the first in this way


class StoresBySize:
    """Of one region, on one rank."""

    def __init__(self) -> None:
        self.classes = [Stores() for _ in range(CLASSES)]
        self._last = self.classes[0]

    def of(self, nbytes: int) -> Stores:
        """Those of an operation of at least LARGE_BYTES."""
        found = self.classes[min((nbytes // LARGE_BYTES).bit_length() - 1 >> 1, CLASSES - 1)]
        if not found.count:
            found.way = self._last.way  # cores that are far for one size are far for all
        self._last = found
        return found

    def __str__(self) -> str:
        """Such as `plain; from 16 MiB on streaming`, of the classes that there were."""
        said, last = [NAMES[PLAIN]], PLAIN
        for number, each in enumerate(self.classes):
            if each.count and each.way != last:
                last, kib = each.way, LARGE_BYTES << 2 * number >> 10
                size = f"{kib >> 10} MiB" if kib >> 10 else f"{kib} KiB"
                said.append(f"from {size} on {NAMES[last]}")
        return "; ".join(said)
