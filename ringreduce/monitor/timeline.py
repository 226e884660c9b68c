"""What happened when, on every rank: recorded by each engine, written by rank 0 as Chrome trace events.

The file is a JSON array that is complete after every write, so it can be opened in chrome://tracing or Perfetto while
the job runs, and whatever becomes of the job. A rank is a process there, a tensor a thread:

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

from ringreduce.engine.signature import Signature
from ringreduce.engine.submission import Submission

SENT_AT_ONCE = 2000
"""Events that a rank gathers at most before it sends them to rank 0."""
UNNAMED_ROWS = 16
"""Tensors without a name share so many rows for each kind of operation: each of them would have its own."""


class Event(NamedTuple):
    """Something that took a while (or, with a negative duration, an instant), in microseconds of the rank's clock."""

    name: str
    tensor: str
    start_us: float
    duration_us: float


def now_us() -> float:
    """This host's steady clock: the same for all its ranks."""
    return time.monotonic_ns() / 1e3


class Timeline:
    """One rank's recorder; records nothing until started. Used by the engine's thread only."""

    def __init__(self) -> None:
        self.recording = False
        self.mark_cycles = False
        self.events: list[Event] = []
        self._queued: dict[str, float] = {}
        self._phases: dict[str, tuple[str, float]] = {}
        """By tensor: the phase that it is in, and since when."""

    def start(self, mark_cycles: bool) -> None:
        """Record from now on."""
        self.recording, self.mark_cycles = True, mark_cycles
        self._queued.clear()  # what an earlier recording left in the middle of a phase did not last until now
        self._phases.clear()

    def stop(self) -> None:
        """Record no more; `take` gives what there is."""
        self.recording = False

    def take(self) -> tuple[Event, ...]:
        """The events since the last call."""
        events, self.events = self.events, []
        return tuple(events)

    def ready(self, signature: Signature, rank: int) -> None:
        """A rank is ready to run this; told by the coordinator, which hears of it."""
        self.events.append(Event(f"{rank}", row_of(signature), now_us(), -1))

    def agreed(self, submission: Submission) -> None:
        """All ranks are ready: the negotiation is over, and the submission queues."""
        if self.recording:
            now = now_us()
            since = now - 1e6 * (time.monotonic() - submission.submitted_s)
            self.events.append(
                Event(f"NEGOTIATE_{submission.signature.kind.upper()}", tensor_of(submission), since, now - since)
            )
            self._queued[tensor_of(submission)] = now

    def cycle(self) -> None:
        """The engine tells the other ranks of new tensors."""
        if self.recording and self.mark_cycles:
            self.events.append(Event("CYCLE_START", "engine", now_us(), -1))

    @contextlib.contextmanager
    def phase(self, submissions: Sequence[Submission], name: str) -> Iterator[None]:
        """What is done inside is shown for each of the submissions."""
        if not self.recording:
            yield
            return
        self.switch_phase(submissions, name)
        yield
        self.switch_phase(submissions, None)

    def switch_phase(self, submissions: Sequence[Submission], name: str | None) -> None:
        """The phase that the submissions were in ends here, and another begins; None: none does. While recording
        only."""
        now = now_us()
        for tensor in dict.fromkeys(tensor_of(submission) for submission in submissions):
            queued = self._queued.pop(tensor, None)
            last, since = self._phases.pop(tensor, ("QUEUE", queued))
            if since is not None:
                self.events.append(Event(last, tensor, since, now - since))
            if name is not None:
                self._phases[tensor] = name, now


def tensor_of(submission: Submission) -> str:
    """The row in which a submission is shown."""
    return row_of(submission.signature)


def row_of(signature: Signature) -> str:
    """Such as allreduce.layer3.w."""
    if not signature.numbered:
        return f"{signature.kind}.{signature.name}"
    name, _, number = signature.name.rpartition(".")
    return f"{signature.kind}.{name}.{int(number) % UNNAMED_ROWS}"


class TimelineFile:
    """The file on rank 0."""

    def __init__(self, path: str, offsets_us: Sequence[float]) -> None:
        """offsets_us: by rank, how far its clock is ahead of rank 0's. Raises OSError when it cannot be written."""
        self.path = path
        self._offsets_us = offsets_us
        self._threads: dict[tuple[int, str], int] = {}
        self._start_us = now_us()
        self._file: io.FileIO = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._end = self._file.write(b"[\n")
        self._file.write(b"]\n")
        what = "start_time_since_epoch_in_micros"
        self._write([{"name": what, "ph": "M", "pid": 0, "args": {what: int(time.time() * 1e6)}}])
        self._write([_name("process_name", rank, f"rank {rank}") for rank in range(len(offsets_us))])

    def add(self, rank: int, events: Sequence[Event]) -> None:
        """Write a rank's events, its clock brought to rank 0's."""
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
        """Put records before the closing bracket, which stands at the end again afterwards, on a full disk too."""
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
        """All of it from the end on: a disk that becomes full takes a part, and then refuses."""
        written = 0
        while written < len(text):
            self._file.seek(self._end + written)
            written += self._file.write(text[written:])

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()


def _name(what: str, rank: int, name: str) -> dict[str, object]:
    """The record that names a process or a thread."""
    return {"name": what, "ph": "M", "pid": rank, "args": {"name": name}}
