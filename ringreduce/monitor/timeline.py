"""The timeline: events recorded by every engine, written by rank 0 as Chrome trace events.

The file is a complete JSON array after every write, so chrome://tracing or Perfetto can open it while the job runs, and
after a crash. A rank is shown as a process, a tensor as a thread:

    rank 1    allreduce.w    | NEGOTIATE_ALLREDUCE | QUEUE | MEMCPY_IN_FUSION_BUFFER | ALLREDUCE | MEMCPY_OUT_… |

Source: Horovod's timeline, whose names these are; and the Trace Event Format.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission

SENT_AT_ONCE = 2000  # most events that a rank collects before it sends them to rank 0
BY_HAND = "DYNAMIC"  # the setting's value where start_timeline() begins it
UNNAMED_ROWS = 16  # rows that the unnamed tensors of one kind of operation share; otherwise each would add a row
UNRECORDED = contextlib.nullcontext()


class Event(NamedTuple):
    """A span of time, or an instant where the duration is negative, in microseconds of the rank's clock."""

    name: str
    tensor: str
    start_us: float
    duration_us: float


def now_us() -> float:
    """This host's monotonic clock, equal for all its ranks."""
    return time.monotonic_ns() / 1e3


class Timeline:
    """One rank's recorder; records nothing until started."""

    def __init__(self) -> None:
        self.recording = False
        self.mark_cycles = False
        self.events: list[Event] = []
        self._queued: dict[str, float] = {}
        self._phases: dict[str, tuple[str, float]] = {}  # by tensor: its current phase, and when that began

    def start(self, mark_cycles: bool) -> None:
        """Start recording."""
        self.recording, self.mark_cycles = True, mark_cycles
        self._queued.clear()  # phases that an earlier recording did not see end
        self._phases.clear()

    def stop(self) -> None:
        """Stop recording; `take` still returns the events so far."""
        self.recording = False

    def take(self) -> tuple[Event, ...]:
        """The events since the last call."""
        events, self.events = self.events, []
        return tuple(events)

    def ready(self, signature: Signature, rank: int) -> None:
        """This rank has announced it."""
        self.events.append(Event(f"{rank}", row_of(signature), now_us(), -1))

    def negotiated(self, submission: Submission) -> None:
        """All ranks are ready: the negotiation is over, and the submission is queued."""
        if self.recording:
            self.span(submission, f"NEGOTIATE_{submission.signature.kind.upper()}")
            self._queued[row_of(submission.signature)] = now_us()

    def span(self, submission: Submission, name: str) -> None:
        """Record the time from when it was submitted until now."""
        if self.recording:
            now = now_us()
            since = now - 1e6 * (time.monotonic() - submission.submitted_s)
            self.events.append(Event(name, row_of(submission.signature), since, now - since))

    def cycle(self) -> None:
        """The engine announces new tensors."""
        if self.recording and self.mark_cycles:
            self.events.append(Event("CYCLE_START", "engine", now_us(), -1))

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
        for tensor in dict.fromkeys(row_of(submission.signature) for submission in submissions):
            queued = self._queued.pop(tensor, None)
            last, since = self._phases.pop(tensor, ("QUEUE", queued))
            if since is not None:
                self.events.append(Event(last, tensor, since, now - since))
            if name is not None:
                self._phases[tensor] = name, now


def row_of(signature: Signature) -> str:
    """The row that shows it, such as allreduce.layer3.w."""
    if not signature.numbered:
        return f"{signature.kind}.{signature.name}"
    name, _, number = signature.name.rpartition(".")
    return f"{signature.kind}.{name}.{int(number) % UNNAMED_ROWS}"


class TimelineFile:
    """The file on rank 0."""

    def __init__(self, path: str, offsets_us: Sequence[float], start_us: float | None = None) -> None:
        """Raises OSError when `path` cannot be written.

        offsets_us: by rank, how far its clock is ahead of rank 0's;  start_us: what is 0 in the file, by default now.
        """
        self.path = path
        self._offsets_us = offsets_us
        self._threads: dict[tuple[int, str], int] = {}
        self._start_us = now_us() if start_us is None else start_us
        self._file: io.FileIO = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._end = self._file.write(b"[\n")
        self._file.write(b"]\n")
        what = "start_time_since_epoch_in_micros"
        self._write([{"name": what, "ph": "M", "pid": 0, "args": {what: int(time.time() * 1e6)}}])
        self._write([_name("process_name", rank, f"rank {rank}") for rank in range(len(offsets_us))])

    def add(self, rank: int, events: Sequence[Event]) -> None:
        """Write a rank's events, in rank 0's clock."""
        records: list[dict[str, object]] = []
        for event in events:
            key = (rank, event.tensor)
            if key not in self._threads:
                self._threads[key] = len(self._threads) + 1
                records.append(_name("thread_name", rank, event.tensor) | {"tid": self._threads[key]})
            start = round(event.start_us - self._offsets_us[rank] - self._start_us, 3)
            kind = {"ph": "i", "s": "t"} if event.duration_us < 0 else {"ph": "X", "dur": round(event.duration_us, 3)}
            records.append({"name": event.name, "pid": rank, "tid": self._threads[key], "ts": start, **kind})
        self._write(records)

    def _write(self, records: Sequence[dict[str, object]]) -> None:
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
        """Close the file."""
        self._file.close()


def _name(what: str, rank: int, name: str) -> dict[str, object]:
    """The record that names a process or a thread."""
    return {"name": what, "ph": "M", "pid": rank, "args": {"name": name}}
