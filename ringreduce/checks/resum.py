"""Does another algorithm give the same sums? What no program does wrong: memory, or a processor, that fails silently.

Every N-th all-reduce of a name, each name in a step of its own, keeps a part of one array as it was before. Then all
ranks get the parts and the results of all, and each sums them up by itself, in the order of the ranks, as the
deterministic mode does, and compares bits.

    every rank has the same wrong bits    they were wrong before the sum: of whose part one flipped bit makes them?
    one has other bits than the rest      that one, if its are wrong; if its alone are right, the others read its memory
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce import runtime
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.view import as_buffer
from ringreduce.collectives.ops import Adasum, Reduction
from ringreduce.errors import CollectiveError, RingreduceError
from ringreduce.execution.signature import ranks_text
from ringreduce.execution.submission import Handle, Submission
from ringreduce.monitor import launcher_link
from ringreduce.settings.log import JOB

MOST_BYTES = 8 << 20  # of all ranks' parts
MOST_REPORTED = 10


class Sample(NamedTuple):
    """A part of an array that is being reduced."""

    number: int  # of the array in its submission
    low: int  # of its elements the first one
    before: Any
    step: int  # how often the name was reduced before, since the last join


class Resum:
    """The check on one rank."""

    def __init__(self, own: runtime.Runtime) -> None:
        self._own, self._every, self._reported = own, own.checks.sdc, 0
        self._counts: dict[int, tuple[int, Counter[str]]] = {}
        """By process set: how often its ranks have joined, and since then how often each name was reduced."""
        self._pending: deque[tuple[Submission, Sample, Handle]] = deque()
        self._in_turn: dict[tuple[int, str], deque[tuple[Submission, Sample, Any]]] = {}
        """By process set and name: whose rows are being gathered, and then those whose turn is yet to come."""

    def look(
        self, _: int, __: object, ___: object, details: Sequence[tuple[str, Any]], inputs: Sequence[Buffer]
    ) -> bool | None:
        """See `engine.submitting.Inspector`. Compare what has come meanwhile."""
        while self._pending and self._pending[0][2].poll():
            made, sample, handle = self._pending.popleft()
            with contextlib.suppress(CollectiveError):  # a rank has joined, or is lost, which its own operations say
                self._judge(made, sample, handle.wait())
        known = dict(details)
        is_sum = known.get("op", Adasum.value) != Adasum.value and known.get("compression") is None
        return True if is_sum and inputs and not inputs[0].on_gpu else None

    def begin(self, made: Submission, _: object, __: bool) -> None:
        """See `engine.submitting.Inspector`. Keep a part of it, if it is its turn."""
        kind, name, *_rest = made.signature.unnumbered
        if kind != "allreduce" or made.process_set < 0:
            return
        every, joins, step = self._every, *self._count(made.process_set, name)
        drawn = zlib.crc32(f"{name} {joins + step // every}".encode())
        if step % every != drawn % every:
            return
        number = drawn // every % len(made.inputs)
        flat = made.inputs[number].flat
        if not flat.size:
            return
        count = min(flat.size, max(1, MOST_BYTES // self._own.world.size // flat.itemsize))
        low = drawn % (flat.size - count + 1)
        sample = Sample(number, low, flat[low : low + count].copy(), step)
        made.add_then(functools.partial(self._gather, made, sample))

    def _count(self, process_set: int, name: str) -> tuple[int, int]:
        """Count it; returns how often the set's ranks have joined, and how often it was reduced since: equal on them.

        Not so how often it was ever reduced, since a rank that joins early has no part in what the others go on with.
        """
        joins = self._own.engine.states[process_set].joins
        if self._counts.get(process_set, (-1,))[0] != joins:
            self._counts[process_set] = joins, Counter()
        counts = self._counts[process_set][1]
        counts[name] += 1
        return joins, counts[name] - 1

    def _gather(self, made: Submission, sample: Sample, error: BaseException | None) -> None:
        """See `Submission.then`. In turn: the one before may not be over, and no rank may leave out what others do."""
        if error is None:
            after = made.outputs[sample.number].flat[sample.low : sample.low + sample.before.size]
            rank = np.array([self._own.world.rank])
            row = np.concatenate([each.view(np.uint8) for each in (rank, sample.before, after)])
            key = made.process_set, made.signature.unnumbered[1]
            turns = self._in_turn.setdefault(key, deque())
            turns.append((made, sample, row))
            if len(turns) == 1:
                self._gather_first(turns, *key)

    def _gather_first(self, turns: deque[tuple[Submission, Sample, Any]], process_set: int, name: str) -> None:
        made, sample, row = turns[0]

        def then(_: BaseException | None) -> None:
            turns.popleft()
            if turns:
                self._gather_first(turns, process_set, name)

        inputs = [as_buffer(row[None])]
        finish = lambda submission: submission.outputs[0].flat.reshape(-1, row.size)  # noqa: E731
        options: dict[str, Any] = {"by_rows": True, "inputs": inputs, "finish": finish, "line": "check", "then": then}
        try:
            handle = self._own.engine.submit("allgather", f"{name}.sdc", process_set, **options)
        except RingreduceError:  # the engine is ending, or this rank has joined
            turns.clear()
        else:
            self._pending.append((made, sample, handle))

    def _judge(self, made: Submission, sample: Sample, rows: Any) -> None:
        """rows: of each rank its number, what it had before, and after."""
        ranks, nbytes = rows[:, :8].copy().view(np.int64)[:, 0].tolist(), sample.before.nbytes
        before, after = (
            np.ascontiguousarray(rows[:, low : low + nbytes]).view(sample.before.dtype) for low in (8, 8 + nbytes)
        )
        reduction = made.reduction(made.inputs[sample.number].element)
        if (text := verdict(ranks, before, after, reduction)) and ranks[0] == self._own.world.rank:
            self._reported += 1
            if self._reported <= MOST_REPORTED:
                text = f"check=sdc: {made.signature.text_of(sample.number)} ({made.line}), step {sample.step}, {text}"
                JOB.error(text)
                launcher_link.report(self._own.settings.error_file, finding=text)


def verdict(ranks: Sequence[int], before: Any, after: Any, reduction: Reduction) -> str:
    """Whose bits are wrong; empty: nobody's.

    before, after: (ranks, elements): what each rank gave, and got.
    """
    if reduction.size not in (1, len(ranks)):  # a rank has joined
        return ""
    expected = np.empty_like(after[0])
    reduction.reduce_parts(list(before), expected)
    differ = (after.view(np.uint8) != expected.view(np.uint8)).reshape(*after.shape, -1).any(-1)
    if after.dtype.kind == "f":
        differ &= ~(np.isnan(after) & np.isnan(expected))
    if not differ.any():
        return ""
    at = int(differ.any(0).argmax())
    wrong = [rank for rank, each in zip(ranks, differ.any(1), strict=True) if each]
    right = [rank for rank in ranks if rank not in wrong]
    where = f"element {at} of {after.shape[1]} compared: "
    if len(right) == 1 and len(wrong) > 1:
        them, other = ranks_text(wrong), ranks_text(right)
        return f"{where}{them} got different bits from {other}, from whose memory they read them"
    if right:
        return f"{where}{ranks_text(wrong)} got bits that are not the sum, unlike {ranks_text(right)}"
    guilty = [rank for number, rank in enumerate(ranks) if _explains(number, before[:, at], after[0, at], reduction)]
    if guilty:
        return f"{where}all ranks got a wrong sum, as if one bit had flipped in the part of {ranks_text(guilty)}"
    return f"{where}all ranks got the same wrong sum; the rank that summed this element is not known"


def _explains(number: int, parts: Any, result: Any, reduction: Reduction) -> bool:
    """Would one flipped bit of this part make the result?"""
    total = np.empty(1, parts.dtype)
    for bit in range(8 * parts.itemsize):
        flipped = parts.copy()
        flipped[number : number + 1].view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
        reduction.reduce_parts(list(flipped[:, None]), total)
        if total.tobytes() == result.tobytes():
            return True
    return False
