"""What a rank records of its training steps: its operations, how long it waited for them, and sums over all steps.

A step ends when an optimizer has stepped, and begins where the one before it ended, the first one at init(). That one
is in no sum: it has all that comes before training.

Any thread may call the methods. Memory is bounded: KEPT steps of at most MOST operations each, and sums.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

KEPT = 64  # steps
MOST = 256  # operations of a step, its waits, and names, of which more is kept than their sum
MOST_SPANS = 1024  # separate spans of time of a step
MOST_FOREIGN = 32  # steps of other optimizers in a row, after which the one that counted is gone
LONGEST_NAME = 80
GROWTH = math.log(1.05)  # of a histogram's bins
OTHERS = "others"
MARKED = "mark_step"

SECONDS = "step_s", "blocked_s", "moving_s", "hidden_s"
Spans = list[tuple[float, float]]
Wait = tuple[str, float, float]  # for an operation of this name, from then until then


class Operation(NamedTuple):
    """One that has ended. It was ready when this rank knew that all had submitted it; begun when its turn came."""

    name: str
    kind: str
    nbytes: int
    submitted_s: float
    ready_s: float
    begun_s: float
    ended_s: float
    algorithm: str


@dataclasses.dataclass
class Step:
    """What happened from the end of one step to the end of the next; times are of time.monotonic()."""

    number: int
    from_s: float
    to_s: float = 0.0
    operations: list[Operation] = dataclasses.field(default_factory=list)  # that ended in it, the first MOST
    waits: list[Wait] = dataclasses.field(default_factory=list)
    operations_count: int = 0
    nbytes: int = 0
    step_s: float = 0.0
    blocked_s: float = 0.0  # waiting for operations
    moving_s: float = 0.0  # with an operation between ready and end
    hidden_s: float = 0.0  # of that, while it did not wait
    examples: int | None = None


class StepRecorder:
    """One engine's; it records nothing until `recording` is set."""

    def __init__(self) -> None:
        self.recording = False
        self.thread = threading.get_ident()  # which trains: so far the one that called init()
        self.steps: collections.deque[Step] = collections.deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._ended: collections.deque[Operation] = collections.deque()
        self._waited: collections.deque[Wait] = collections.deque()
        self._who: object = None
        self._foreign = 0
        self._when_recording: list[Callable[[], object]] = []
        self._sums = dict.fromkeys(SECONDS, 0.0)
        self._examples = 0
        self._histogram: collections.Counter[int] = collections.Counter()
        self._by_algorithm: dict[str, list[float]] = {}
        self._by_name: dict[str, list[float]] = {}
        self._begin(0, time.monotonic())

    def start(self) -> None:
        """Record from now on, when a step begins."""
        self._step.from_s, self.recording = time.monotonic(), True
        for action in self._when_recording:
            action()

    def when_recording(self, action: Callable[[], object]) -> None:
        """Call it when steps are recorded: now, or when that begins."""
        if self.recording:
            action()
        else:
            self._when_recording.append(action)

    # Called while recording only

    def ended(self, submission: Any) -> None:
        """An operation has ended."""
        now, arrays, signature = time.monotonic(), submission.inputs or submission.outputs, submission.signature
        begun_s = submission.begun_s or submission.submitted_s  # a message from one rank to another has no turn
        name = signature.unnumbered.name
        times = submission.submitted_s, submission.ready_s or begun_s, begun_s, now
        self.add(Operation(name, signature.kind, sum([each.nbytes for each in arrays]), *times, submission.algorithm))

    def add(self, operation: Operation) -> None:
        """An operation has ended."""
        self._ended.append(operation)
        if len(self._ended) >= MOST:
            with self._lock:
                self._fold()

    def waited(self, name: str, since_s: float) -> None:
        """A thread has waited for an operation; it counts where that thread trains, or is one of a framework's own."""
        if threading.get_ident() == self.thread or _is_frameworks():
            self._waited.append((name, since_s, time.monotonic()))
            if len(self._waited) >= MOST:
                with self._lock:
                    self._fold()

    def passed(self, name: str, kind: str, nbytes: int, since_s: float, algorithm: str | None) -> None:
        """A call of the fast lane has waited for an operation; None: which has not ended, and is submitted now."""
        if algorithm is not None:
            self.add(Operation(name, kind, nbytes, since_s, since_s, since_s, time.monotonic(), algorithm))
        self.waited(name, since_s)

    def stepped(self, who: object, examples: int | None = None) -> None:
        """An optimizer has stepped; of several that step in turn, one ends the step.

        who: identifies it, alike on all ranks in the order in which they step; MARKED: the script says so itself.
        """
        if who != self._who and self._who is not None and who is not MARKED:
            self._foreign += 1
            if self._who is MARKED or self._foreign < MOST_FOREIGN:
                return
        self._who, self._foreign = who, 0
        if not _is_frameworks():
            self.thread = threading.get_ident()
        with self._lock:
            self._fold()
            self._end(time.monotonic(), examples)

    # The step under way

    def _begin(self, number: int, now_s: float) -> None:
        self._step = Step(number, now_s)
        self._moving: Spans = []
        self._blocked: Spans = []

    def _fold(self) -> None:
        """Add what has ended to the step and to the sums; with the lock held."""
        step, ended, waited = self._step, _taken(self._ended), _taken(self._waited)
        self._moving = _united(self._moving + [(each.ready_s, each.ended_s) for each in ended])
        self._blocked = _united(self._blocked + [(since, until) for _, since, until in waited])
        step.operations += ended[: max(0, MOST - len(step.operations))]
        step.waits += waited[: max(0, MOST - len(step.waits))]
        step.operations_count += len(ended)
        for each in ended:
            step.nbytes += each.nbytes
            size = 1 << max(0, each.nbytes - 1).bit_length()
            seconds = each.ended_s - each.begun_s
            _count(self._by_algorithm, f"{each.algorithm or each.kind} {size}", each.nbytes, seconds)
            _count(self._by_name, each.name[:LONGEST_NAME], each.nbytes, seconds)

    def _end(self, now_s: float, examples: int | None) -> None:
        """End the step; with the lock held."""
        step = self._step
        step.to_s, step.step_s, step.examples = now_s, now_s - step.from_s, examples
        moving, blocked = _within(self._moving, step), _within(self._blocked, step)
        step.moving_s, step.blocked_s = _length(moving), _length(blocked)
        step.hidden_s = _length(_united(moving + blocked)) - step.blocked_s
        self.steps.append(step)
        if step.number:
            for name in SECONDS:
                self._sums[name] += getattr(step, name)
            self._histogram[math.floor(math.log(max(step.step_s, 1e-9)) / GROWTH)] += 1
            self._examples += examples or 0
        else:
            self._by_algorithm.clear()
            self._by_name.clear()
        self._begin(step.number + 1, now_s)

    def totals(self) -> dict[str, Any]:
        """Sums over all steps but the first one; before its end, of the operations so far."""
        with self._lock:
            by_algorithm = {name: list(each) for name, each in self._by_algorithm.items()}
            return {
                "step": max(0, self._step.number - 1),
                **self._sums,
                "computing_s": self._sums["step_s"] - self._sums["blocked_s"],
                "histogram": dict(self._histogram),
                "operations": sum(int(each[0]) for each in by_algorithm.values()),
                "bytes": sum(int(each[1]) for each in by_algorithm.values()),
                "by_algorithm": by_algorithm,
                "by_name": {name: list(each) for name, each in self._by_name.items()},
                "examples": self._examples or None,
            }


def _is_frameworks() -> bool:
    """True in a thread that Python has not started, such as XLA's, or autograd's of a GPU: it computes a step, too."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def _taken(queue: collections.deque[Any]) -> list[Any]:
    """What is in it now; others may go on to append."""
    return [queue.popleft() for _ in range(len(queue))]


def _count(sums: dict[str, list[float]], name: str, nbytes: int, seconds: float) -> None:
    if name not in sums and len(sums) >= MOST:
        name = OTHERS
    found = sums.setdefault(name, [0, 0, 0.0])
    found[0] += 1
    found[1] += nbytes
    found[2] += seconds


def _united(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same time as spans that do not touch, in order; of too many the first ones become one.

    >>> _united([(5, 6), (1, 3), (2, 4)])
    [(1, 4), (5, 6)]
    """
    found: Spans = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    more = len(found) - MOST_SPANS
    return [(found[0][0], found[more][1]), *found[more + 1 :]] if more > 0 else found


def _within(spans: Spans, step: Step) -> Spans:
    return [(max(low, step.from_s), min(high, step.to_s)) for low, high in spans if high > step.from_s]


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(high - low for low, high in spans)
