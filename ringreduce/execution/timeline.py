"""The timeline: events recorded by every engine, written by rank 0 as Chrome trace events.

The file is a complete JSON array after every write, so chrome://tracing or Perfetto can open it while the job runs, and
after a crash. A rank is shown as a process, a tensor as a thread; a phase has a category, too:

    rank 1    allreduce.w  | SUBMIT | NEGOTIATE_ALLREDUCE | QUEUE | MEMCPY_IN_FUSION_BUFFER | ALLREDUCE | MEMCPY_OUT_… |
                           | submit | wait for ranks      | queue | copy in                 | reduce    | copy out     |

A flow leads from a rank's submission by that of the last rank to the phase with which it ended on the first.

Source: Horovod's timeline, whose names these are; and the Trace Event Format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ringreduce.execution.submission import Submission
from ringreduce.settings.log import JOB

SENT_AT_ONCE = 2000  # most events that a rank collects before it sends them to rank 0
BY_HAND = "DYNAMIC"  # the setting's value where start_timeline() begins it
UNNAMED_ROWS = 16  # rows that the unnamed tensors of one kind of operation share; otherwise each would add a row
UNRECORDED = contextlib.nullcontext()
WAIT, PROCESS, IN_FLIGHT, END = "NEGOTIATE_", "process_name", "bytes in flight", "end"  # the last 3: no spans
BYTES_A_MINUTE = 45e6  # of the job; so under 100 MB in any 60 s
CATEGORIES = {"NEGOTIATE_.*": "wait for ranks", "QUEUE": "queue", ".*_IN_.*": "copy in", ".*_OUT_.*": "copy out"}
CATEGORIES |= {"(ALL)?REDUCE(SCATTER)?|ADASUM": "reduce", "SUBMIT|CYCLE_START|rank .*": "submit", "[A-Z_]+": "send"}
"""What a reader calls an event, by its name."""
Record = dict[str, Any]
Operation = tuple[int | str, int, str, int]
"""Equal on all ranks: a process set or channel, the operation's number in it, its key, and how many ranks take part."""


class Event(NamedTuple):
    """A span of time, or an instant where the duration is negative, in microseconds of the rank's clock."""

    name: str
    tensor: str
    start_us: float
    duration_us: float = -1
    operation: Operation | None = None
    args: dict[str, Any] = {}  # noqa: RUF012 - never changed


def now_us() -> float:
    """This host's monotonic clock, equal for all its ranks."""
    return time.monotonic_ns() / 1e3


@dataclasses.dataclass(eq=False)
class _Submitted:
    row: str
    args: dict[str, Any]
    announced_us: float = 0.0
    operation: Operation | None = None
    phase: tuple[str, float] | None = None  # the current one, and when it began


class Timeline:
    """One rank's recorder; records nothing until started."""

    def __init__(self) -> None:
        self.recording = False
        self.mark_cycles = False
        self.events: list[Event] = []
        self._submitted: dict[Submission, _Submitted] = {}  # what has not ended
        self._free_us: dict[str, float] = {}  # by row: since when nothing is in it
        self._in_flight = 0  # bytes

    def start(self, mark_cycles: bool) -> None:
        """Start recording."""
        self.recording, self.mark_cycles = True, mark_cycles
        self._submitted, self._free_us, self._in_flight = {}, {}, 0  # an earlier recording may not have seen all end

    def stop(self) -> None:
        """Stop recording; `take` still returns the events so far."""
        self.recording = False

    def take(self) -> tuple[Event, ...]:
        """The events since the last call."""
        events, self.events = self.events, []
        return tuple(events)

    def ready(self, submissions: Sequence[Submission], rank: int) -> None:
        """Record that this rank has announced them. Only while recording."""
        for each in submissions:
            found = self._of(each)
            found.announced_us = now = now_us()
            self.events.append(Event(f"rank {rank} is ready", found.row, now, args={"rank": rank}))
        self._count()

    def negotiated(self, submission: Submission, operation: Operation) -> None:
        """Record that all ranks are ready, so that the submission is queued. Only while recording."""
        found, since, now = self._of(submission), 1e6 * submission.submitted_s, now_us()
        found.operation, found.phase, announced = operation, ("QUEUE", now), found.announced_us
        if announced:  # else this rank has joined
            name = WAIT + submission.signature.kind.upper()
            self.events.append(Event("SUBMIT", found.row, since, announced - since, operation))
            self.events.append(Event(name, found.row, announced, now - announced, operation, found.args))

    def message(self, submission: Submission, name: str) -> None:
        """Record a message that was sent or received: the time from its submission until now."""
        if self.recording:
            since, now, row = 1e6 * submission.submitted_s, now_us(), self._free_row(submission)
            self._free_us[row] = now
            self.events.append(Event(name, row, since, now - since, args=_args(submission)))

    def cycle(self) -> None:
        """Record that the engine announces new tensors. Only while recording."""
        if self.mark_cycles:
            self.events.append(Event("CYCLE_START", "engine", now_us()))

    def phase(self, submissions: Sequence[Submission], name: str) -> contextlib.AbstractContextManager[None]:
        """Record the body as a phase of each submission."""
        return self._phase(submissions, name) if self.recording else UNRECORDED

    @contextlib.contextmanager
    def _phase(self, submissions: Sequence[Submission], name: str) -> Iterator[None]:
        self.switch_phase(submissions, name)
        yield
        self.switch_phase(submissions, None)

    def switch_phase(self, submissions: Sequence[Submission], name: str | None) -> None:
        """End the submissions' current phase, and begin the phase `name`, if any. Only while recording."""
        now = now_us()
        for each in dict.fromkeys(submissions):
            found = self._of(each)
            if found.phase is not None:
                last, since = found.phase
                args = found.args | ({"algorithm": each.algorithm} if each.algorithm else {})
                self.events.append(Event(last, found.row, since, now - since, found.operation, args))
            found.phase = None if name is None else (name, now)

    def _of(self, submission: Submission) -> _Submitted:
        if submission not in self._submitted:
            found = self._submitted[submission] = _Submitted(self._free_row(submission), _args(submission))
            submission.add_then(functools.partial(self._ended, submission))
            self._free_us[found.row] = math.inf
            self._in_flight += found.args["bytes"]
        return self._submitted[submission]

    def _free_row(self, submission: Submission) -> str:
        """A row, such as allreduce.layer3.w; with a number where that was in use when this was submitted."""
        kind, name, _, _, numbered = submission.signature
        if numbered:
            name, _, number = name.rpartition(".")
            name = f"{name}.{int(number) % UNNAMED_ROWS}"
        rows = (f"{kind}.{name}" + f" ({number})" * (number > 1) for number in itertools.count(1))
        return next(row for row in rows if self._free_us.get(row, 0) <= 1e6 * submission.submitted_s)

    def _ended(self, submission: Submission, _: BaseException | None) -> None:
        found = self._submitted.pop(submission, None)
        if found is not None and self.recording:
            self._free_us[found.row] = now_us()
            self._in_flight -= found.args["bytes"]
            self._count()
            if found.operation is not None:
                self.events.append(Event(END, found.row, now_us(), operation=found.operation))

    def _count(self) -> None:
        self.events.append(Event(IN_FLIGHT, "", now_us(), args={"bytes": self._in_flight}))


def _args(submission: Submission) -> dict[str, Any]:
    return {"bytes": sum(each.nbytes for each in submission.inputs or submission.outputs)}


class TimelineFile:
    """The file on rank 0."""

    def __init__(self, path: str, offsets_us: Sequence[float], start_us: float | None = None) -> None:
        """Raises OSError when `path` cannot be written.

        offsets_us: by rank, how far its clock is ahead of rank 0's;  start_us: what is 0 in the file, by default now.
        """
        self.path, self.place = path, os.path.realpath(path)  # before the script goes to another folder
        self._offsets_us = offsets_us
        self._threads: dict[tuple[int, str], int] = {}
        self._order: dict[str, int] = {}  # of the rows, the same on all ranks
        self._open: dict[Operation, dict[int, list[Record]]] = {}  # what has not ended on all ranks: each rank's phases
        self._flows = itertools.count(1)
        self._keeping, self._told, self._minute, self._minute_began = True, False, 0, 0
        self._newest: dict[int | str, int] = {}  # number, by schedule
        self._before: dict[int | str, int] = {}  # the newest ones when `_keeping` changed
        self._start_us = now_us() if start_us is None else start_us
        self._file: io.FileIO = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._end = self._file.write(b"[\n")
        self._file.write(b"]\n")
        what = "start_time_since_epoch_in_micros"
        self._write([{"name": what, "ph": "M", "pid": 0, "args": {what: int(time.time() * 1e6)}}])
        self._write([_about("process_sort_index", rank, sort_index=rank) for rank in range(len(offsets_us))])

    def add(self, rank: int, events: Sequence[Event]) -> None:
        """Write a rank's events, in rank 0's clock."""
        kept = [self._records(rank, event) for event in events if self._keeps(event.operation)]
        self._write(list(itertools.chain.from_iterable(kept)))
        self._sample(max((self._time(rank, each.start_us) for each in events), default=0.0))

    def _keeps(self, operation: Operation | None) -> bool:
        """Decide by the operation's number alone, so the same on all ranks; None: an event of no operation."""
        if operation is None:
            return self._keeping
        schedule, number, *_ = operation
        self._newest[schedule] = max(number, self._newest.get(schedule, 0))
        return self._keeping == (number > self._before.get(schedule, -1))

    def _sample(self, at_us: float) -> None:
        """Leave out the rest of a minute of the job in which the file has grown by BYTES_A_MINUTE."""
        if (minute := int(at_us / 60e6)) > self._minute:
            self._minute, self._minute_began = minute, self._end
        if self._keeping == (self._end - self._minute_began <= BYTES_A_MINUTE):
            return
        self._keeping, self._before = not self._keeping, dict(self._newest)
        what = "all events from here on" if self._keeping else "left out until the next minute: the file grows too fast"
        told: list[Record] = [{"name": what, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": at_us}]
        for rank in range(len(self._offsets_us)):
            told.append({"name": IN_FLIGHT, "ph": "C", "pid": rank, "ts": at_us, "args": {"bytes": 0}})
        self._write(told)
        if not self._told:
            JOB.warning(
                f"the timeline {self.path} grows too fast: only the first part of each minute is kept, for all ranks"
            )
        self._told = True

    def _time(self, rank: int, us: float) -> float:
        return max(0.0, round(us - self._offsets_us[rank] - self._start_us, 3))

    def _records(self, rank: int, event: Event) -> Iterator[Record]:
        name, row, start_us, duration_us, operation, args = event
        start, end = self._time(rank, start_us), self._time(rank, start_us + duration_us)
        record: Record = {"name": name, "pid": rank, "ts": start, "args": args}
        if name == PROCESS:
            yield _about(PROCESS, rank, name=row)
        elif name == IN_FLIGHT:
            yield record | {"ph": "C"}
        elif name != END:
            if (rank, row) not in self._threads:
                tid = self._threads[rank, row] = len(self._offsets_us) + len(self._threads)  # no rank's number
                index = self._order.setdefault(row, len(self._order))
                yield _about("thread_name", rank, name=row) | {"tid": tid}
                yield _about("thread_sort_index", rank, sort_index=index) | {"tid": tid}
            category = next((word for names, word in CATEGORIES.items() if re.fullmatch(names, name)), "elastic")
            record |= {"cat": category, "tid": self._threads[rank, row]}
            record |= {"ph": "i", "s": "t"} if duration_us < 0 else {"ph": "X", "dur": round(end - start, 3)}
            if not name.startswith(WAIT):
                yield record
        if operation is not None:
            phases = self._open.setdefault(operation, {})
            phases.setdefault(rank, []).append(record)
            if name == END and sum(each[-1]["name"] == END for each in phases.values()) == operation[-1]:
                yield from _ended(self._open.pop(operation), self._flows)

    def _write(self, records: Sequence[Record]) -> None:
        """Insert records before the closing bracket; the array stays complete even on a full disk."""
        if not records:
            return
        text = (",\n" if self._end > 2 else "") + ",\n".join(json.dumps(record) for record in records)
        try:
            self._put(text.encode() + b"]\n")
        except OSError:
            self._file.truncate(self._end)
            self._put(b"]\n")
            raise
        self._end += len(text)

    def _put(self, text: bytes) -> None:
        """Write all of `text` at the end: a disk that becomes full accepts a part first."""
        written = 0
        while written < len(text):
            self._file.seek(self._end + written)
            written += self._file.write(text[written:])

    def close(self) -> None:
        """Close the file; waits for what has not ended on all ranks are in it, too."""
        open_ = [each for phases in self._open.values() for own in phases.values() for each in own]
        with contextlib.suppress(OSError):  # a full disk ends it, too
            self._write([each for each in open_ if each["name"].startswith(WAIT)])
        self._file.close()


def _ended(phases: dict[int, list[Record]], flows: Iterator[int]) -> Iterator[Record]:
    """Each rank's wait for an operation that has ended, and for which rank; and its flow."""
    calls = {rank: own[0]["ts"] for rank, own in phases.items() if own[0]["name"] == "SUBMIT"}
    late = max(calls, key=lambda rank: calls[rank], default=0)
    for rank in calls:
        first, wait, *_ = phases[rank]
        last, flow = phases[rank][-2], {"name": "from submission to end", "cat": "flow", "bp": "e", "id": next(flows)}
        yield wait if rank == late else wait | {"args": wait["args"] | {"waited for": f"rank {late}"}}
        points = {"s": first, "t": phases[late][0], "f": last} if last is not wait else {}  # as for a barrier
        for kind, at in points.items():
            if kind != "t" or first["ts"] < at["ts"] <= last["ts"]:
                yield flow | {"ph": kind, "pid": at["pid"], "tid": at["tid"], "ts": at["ts"]}


def _about(what: str, rank: int, **args: object) -> Record:
    """Metadata of a process or a thread."""
    return {"name": what, "ph": "M", "pid": rank, "args": args}
