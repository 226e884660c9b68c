"""What a rank records of its training steps: its operations, how long it waited for them, and sums over all steps.

A step ends when an optimizer has stepped, and begins where the one before it ended, the first one at init(). That one
is in no sum, as it has all that comes before training. Memory is bounded, however long a job runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ringrun.records import Operation

KEPT = 64  # steps
MOST = 256  # operations of a step that are kept, waits, and names
MOST_SPANS = 4096  # operations, and waits, of a step whose times are known: of more the first ones
MOST_OTHERS = 32  # optimizers that step in turn, of which any may end steps later
LONGEST_NAME = 80
GROWTH = math.log(1.05)  # of a histogram's bins
MARKED = "mark_step"
SECONDS = "step_s", "blocked_s", "moving_s", "hidden_s"
Spans = list[tuple[float, float]]


@dataclasses.dataclass
class Step:
    """One step, from the end of the previous one; times are of time.monotonic()."""

    number: int
    from_s: float
    to_s: float = 0.0
    operations: list[Operation] = dataclasses.field(default_factory=list)  # that ended in it, the first ones
    waits: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)  # for whom, from when until when
    count: int = 0  # of its operations
    nbytes: int = 0
    step_s: float = 0.0
    blocked_s: float = 0.0  # waiting for operations
    moving_s: float = 0.0  # with an operation between ready and end
    hidden_s: float = 0.0  # of that, while it did not wait
    examples: int | None = None


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass over a data loader."""

    examples: int | None = 0  # that it has given in this step
    is_new: bool = True  # it began in this step
    is_over: bool = False


class StepRecorder:
    """One engine's recorder: idle until `start`, but steps are always counted. Any thread may call it."""

    def __init__(self) -> None:
        self.recording = self._always = False
        self.taken = 0  # steps, recorded or not
        self.counted: tuple[int, float] | None = None  # once `count` was called: steps, and when the last one ended
        self._counts = False
        self.thread = threading.get_ident()  # that trains: so far the one that called init()
        self.steps: collections.deque[Step] = collections.deque(maxlen=KEPT)
        self.passed_s: dict[int, float] = {}  # since when a thread, whose submission comes now, has waited for it
        self._lock = threading.RLock()  # a signal handler of the script may call a collective
        self._who: object = None
        self._others: set[object] = set()  # which have stepped since
        self._passes: weakref.WeakKeyDictionary[object, Pass] = weakref.WeakKeyDictionary()  # by the iterator
        self._loaded: list[Pass] = []  # which have given batches in this step
        self._when_recording: list[Callable[[], object]] = []
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._step = Step(number, time.monotonic())
        self._moving: Spans = []
        self._blocked: Spans = []
        if number < 2:
            self._sums = dict.fromkeys(SECONDS, 0.0)
            self._examples = 0
            self._histogram: collections.Counter[int] = collections.Counter()
            self._by_algorithm: dict[str, list[float]] = {}
            self._by_name: dict[str, list[float]] = {}

    def start(self, always: bool = True) -> None:
        """Record from now on, where a step begins, without what was recorded before; always: `stop` changes nothing."""
        self._always |= always
        if self.recording:
            return
        with self._lock:
            self.steps.clear()
            self._begin(0)
        self._who, self.recording = None, True
        for action in self._when_recording:
            action()

    def stop(self) -> None:
        """Record no more."""
        self.recording = self._always

    def count(self) -> None:
        """Record no more, and count steps with the time of the last one: what is recorded takes time itself."""
        self._counts = True
        self.stop()

    def when_recording(self, action: Callable[[], object]) -> None:
        """Call `action` once steps are recorded: now, or when that begins."""
        if self.recording:
            action()
        else:
            self._when_recording.append(action)

    def stepped(self, who: object, examples: int | None = None) -> None:
        """An optimizer has stepped; of several that step in turn, one ends a step; it is gone when another steps twice.

        who: which one, so that all ranks count alike;  MARKED: the script says so itself.
        """
        is_first = who not in self._others  # since that one has stepped
        if self._who not in (None, who) and who is not MARKED and (self._who is MARKED or is_first):
            if len(self._others) < MOST_OTHERS:
                self._others.add(who)
            return
        self._who, self._others = who, set()
        self.taken += 1
        if self._counts:
            self.counted = self.taken, time.monotonic()
        if not self.recording:
            return
        if not _is_frameworks():
            self.thread = threading.get_ident()
        with self._lock:
            self._end(self._step, examples)

    # Called while recording only

    def loaded(self, iterator: object, examples: int | None) -> None:
        """A data loader's iterator has given a batch; examples: how many, None if that is not known."""
        found = self._passes.get(iterator)
        if found is None:
            found = self._passes[iterator] = Pass()
        if found not in self._loaded:
            self._loaded.append(found)
        found.examples = None if found.examples is None or examples is None else found.examples + examples

    def loaded_all(self, iterator: object) -> None:
        """It has no more batches."""
        if found := self._passes.pop(iterator, None):
            found.is_over = True

    def ended(self, it: Any) -> None:
        """A submission has ended."""
        begun_s, nbytes = it.begun_s or it.submitted_s, sum([each.nbytes for each in it.inputs or it.outputs])
        name = label(it.signature, it.process_set)
        with self._lock:
            times = it.submitted_s, it.ready_s or begun_s, begun_s, time.monotonic()
            self._add(Operation(name, it.signature.kind, nbytes, *times, it.algorithm))

    def passed(self, name: str, kind: str, nbytes: int, since_s: float, algorithm: str | None) -> None:
        """The fast lane has waited for an operation; algorithm None: which has not ended, and is submitted now."""
        with self._lock:
            now_s = time.monotonic()
            if algorithm is not None:
                self._add(Operation(name, kind, nbytes, since_s, since_s, since_s, now_s, algorithm))
            else:
                self.passed_s[threading.get_ident()] = since_s
            self._wait(name, since_s, now_s)

    def waited(self, name: str, since_s: float) -> None:
        """A thread has waited for an operation."""
        with self._lock:
            self._wait(name, since_s, time.monotonic())

    # Called with the lock, so that what ends later comes later

    def _add(self, operation: Operation) -> None:
        name, kind, nbytes, _, ready_s, begun_s, ended_s, algorithm = operation
        step = self._step
        step.count += 1
        step.nbytes += nbytes
        if step.count <= MOST:
            step.operations.append(operation)
        if len(self._moving) < MOST_SPANS:
            extend(self._moving, max(ready_s, step.from_s), ended_s)
        size = 1 << max(0, nbytes - 1).bit_length()
        for found, key in (self._by_algorithm, f"{algorithm or kind} {size}"), (self._by_name, name[:LONGEST_NAME]):
            row = found.get(key)
            if row is None:
                row = found.setdefault(key if len(found) < MOST else "others", [0, 0, 0.0])
            row[0] += 1
            row[1] += nbytes
            row[2] += ended_s - begun_s

    def _wait(self, name: str, since_s: float, now_s: float) -> None:
        """It counts where that thread trains, or is one of a framework's own."""
        if threading.get_ident() != self.thread and not _is_frameworks():
            return
        if len(self._step.waits) < MOST:
            self._step.waits.append((name, since_s, now_s))
        if len(self._blocked) < MOST_SPANS:
            extend(self._blocked, max(since_s, self._step.from_s), now_s)

    def _end(self, step: Step, examples: int | None) -> None:
        moving, blocked = self._moving, self._blocked
        step.moving_s, step.blocked_s = length(moving), length(blocked)
        if moving != blocked:  # as those of the fast lane are
            step.hidden_s = length(united(moving + blocked)) - step.blocked_s
        self._begin(step.number + 1)
        step.to_s, step.examples = self._step.from_s, trained_on(self._loaded) if examples is None else examples
        for each in self._loaded:
            each.examples, each.is_new = 0, False
        self._loaded = []
        step.step_s = step.to_s - step.from_s
        self.steps.append(step)
        if step.number:
            for name in SECONDS:
                self._sums[name] += getattr(step, name)
            self._histogram[math.floor(math.log(max(step.step_s, 1e-9)) / GROWTH)] += 1
            self._examples += step.examples or 0

    def totals(self) -> dict[str, Any]:
        """Sums over all steps but the first one; before its end of operations only."""
        with self._lock:
            by_algorithm = {name: list(row) for name, row in self._by_algorithm.items()}
            return {
                "step": max(0, self._step.number - 1),
                **self._sums,
                "computing_s": self._sums["step_s"] - self._sums["blocked_s"],
                "histogram": dict(self._histogram),
                "operations": sum(int(row[0]) for row in by_algorithm.values()),
                "bytes": sum(int(row[1]) for row in by_algorithm.values()),
                "by_algorithm": by_algorithm,
                "by_name": {name: list(row) for name, row in self._by_name.items()},
                "examples": self._examples or None,
            }


def trained_on(passes: list[Pass]) -> int | None:
    """How many examples they have given to a step in all: several loaders may feed it, as labelled and unlabelled ones.

    A pass that begins while another goes on, or is over within the step, is that of a test.

    >>> trained_on([Pass(64, is_new=False), Pass(500)]), trained_on([Pass(64), Pass(500, is_over=True)])
    (64, 64)
    """
    if any(not each.is_new and not each.is_over for each in passes):
        passes = [each for each in passes if not each.is_new]
    numbers = [each.examples for each in passes if not each.is_new or not each.is_over]
    numbers = numbers or [each.examples for each in passes]
    return None if None in numbers else sum(filter(None, numbers)) or None


def label(signature: Any, process_set: int) -> str:
    """An operation's name for readers of a record: the sets of a sweep's teams use the same names."""
    name = signature.unnumbered.name
    if name.startswith("check."):  # what follows says of which array, or comparison
        name = ".".join(name.split(".")[:2])
    return f"{name} (set {process_set})" if process_set > 0 else name


def _is_frameworks() -> bool:
    """True in a thread that Python did not start, such as XLA's, or autograd's of a GPU: it computes a step, too."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def extend(spans: Spans, low: float, high: float) -> None:
    """Add a span to those that do not touch, in order; it ends after all of them.

    >>> spans = [(0, 1), (2, 3), (4, 5)]
    >>> extend(spans, 2.5, 6)
    >>> spans
    [(0, 1), (2, 6)]
    """
    while spans and spans[-1][1] >= low:
        low = min(low, spans.pop()[0])
    spans.append((low, high))


def united(spans: Spans) -> Spans:
    """The same time as spans that do not touch, in order.

    >>> united([(5, 6), (1, 3), (2, 4)])
    [(1, 4), (5, 6)]
    """
    found: Spans = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def length(spans: Spans) -> float:
    """The total length of spans that do not touch."""
    return sum(high - low for low, high in spans)
