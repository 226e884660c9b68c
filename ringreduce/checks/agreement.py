"""Which finding of all ranks is to be named: in one all-reduce of 8 bytes, and where there is one, another of its text.

All-reduces, as ranks that have joined take part in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.collectives.ops import Max
from ringreduce.engine.engine import Engine
from ringreduce.errors import CollectiveError
from ringreduce.execution.submission import Handle
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.runtime.arguments import details_of

TEXT_BYTES = 1024
WHEN_BITS, RANK_BITS = 45, 16
MOST_US = (1 << WHEN_BITS) - 1  # a year


class Finding(NamedTuple):
    """One rank's."""

    in_sum: bool  # only the sum has it
    when_us: int  # it was submitted, in rank 0's clock
    rank: int
    text: str

    @property
    def code(self) -> int:
        """The largest is that to name: not of a sum, then the earliest, as a NaN may come to others within the step."""
        earliness = MOST_US - min(self.when_us, MOST_US)
        return ((not self.in_sum) << WHEN_BITS | earliness) << RANK_BITS | self.rank


class Agreement:
    """One, of all ranks of the process set; it begins as it is made, or when the one before of its name is over."""

    def __init__(
        self,
        engine: Engine,
        name: str | None,
        process_set: int,
        finding: Finding | None,
        after: Agreement | None = None,
    ) -> None:
        """name: of the operation; None in a channel, where operations match by their order.

        after: the one before of this name; then the thread that polls makes both.
        """
        self._engine, self._name, self._process_set, self._mine = engine, name, process_set, finding
        self._code = np.array([0 if finding is None else finding.code], np.int64)
        self._text = np.zeros(TEXT_BYTES, np.uint8)
        self._first: Handle | Exception | None = None
        self._second: Handle | Exception | None = None
        self._next: Agreement | None = None
        self._is_over = False
        self._after = None if after is None or after._is_over else after
        if self._after is None:
            self._first = self._begin(name, self._code, self._then)
        else:
            self._after._next = self

    def _begin(
        self, name: str | None, array: np.ndarray[Any, Any], then: Callable[[BaseException | None], object]
    ) -> Handle:
        buffers = [numpy_buffer(array, writable=True)]
        options: dict[str, Any] = {
            "details": details_of(Max, 1.0, 1.0),
            "inputs": buffers,
            "outputs": buffers,
            "then": then if self._process_set >= GLOBAL else None,
        }
        return self._engine.submit("allreduce", name, self._process_set, line="check", **options)

    def _then(self, error: BaseException | None) -> None:
        """The first ends; see `Submission.then`. In a channel, in the program's order, the second begins later."""
        if error is None and self._code[0]:
            try:
                self._second = self._begin_second()
            except Exception as exc:  # which the thread that waits raises
                self._second = exc
            else:
                return
        self._over()

    def _over(self, _: BaseException | None = None) -> None:
        """The last of its operations ends."""
        self._is_over, following = True, self._next
        self._next = None
        if following is not None:
            try:
                following._first = following._begin(following._name, following._code, following._then)
            except Exception as exc:  # which the thread that waits raises
                following._first = exc
                following._over()
            following._after = None

    def _begin_second(self) -> Handle:
        if self._mine is not None and self._mine.code == self._code[0]:
            text = self._mine.text.encode()[:TEXT_BYTES]
            self._text[: len(text)] = np.frombuffer(text, np.uint8)
        return self._begin(self._name and f"{self._name}.text", self._text, self._over)

    def wait(self, timeout_s: float = -1) -> Finding | None:
        """The finding to name, the same on all ranks; raises StalledError after a timeout; then call it again."""
        if (after := self._after) is not None:  # its end begins this one, also where it has failed
            try:
                after.wait(timeout_s)
            except CollectiveError:
                if self._first is None:
                    raise
        if isinstance(self._first, Exception):
            raise self._first
        assert self._first is not None
        self._first.wait(timeout_s)
        if not self._code[0]:
            return None
        if self._second is None:
            self._second = self._begin_second()
        if isinstance(self._second, Exception):
            raise self._second
        self._second.wait()
        code, text = int(self._code[0]), self._text.tobytes().rstrip(b"\0").decode(errors="replace")
        if self._mine is not None and self._mine.code == code:
            return self._mine
        not_in_sum, earliness = divmod(code >> RANK_BITS, 1 << WHEN_BITS)
        return Finding(not not_in_sum, MOST_US - earliness, code & (1 << RANK_BITS) - 1, text)
