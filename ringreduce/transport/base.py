"""What the collectives and the engine ask of a transport: ordered messages between ranks, control messages, and sleep.

A collective is a generator: it yields each `Work` that it has to wait for, so that something else may be done
meanwhile. A `Task` is one under way; `complete` runs one to its end.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ringreduce.transport import waiting
from ringreduce.transport.in_flight import InFlight
from ringreduce.transport.traffic import Traffic

Result = TypeVar("Result")


class Work:
    """What a collective waits for: mostly a message in flight, to or from rank `peer`."""

    peer: int
    waits_for = waiting.WaitsFor.MESSAGES  # what must be polled for meanwhile

    def done(self) -> bool:
        """True when the message's memory may be used again (sent) or holds the data (received)."""
        raise NotImplementedError

    def done_soon(self) -> bool:
        """As `done`; may poll for some microseconds."""
        return self.done()

    def wait(self) -> None:
        """Return when it is done."""
        waiting.until(self.done)


Steps = Generator[Work, None, Result]
"""A running collective: yields the work it waits for, and is resumed when that is done."""


class Task(Generic[Result]):
    """A collective under way. `work`: what it waits for, None when it may go on; `result`: once it has `ended`."""

    result: Result

    def __init__(self, steps: Steps[Result]) -> None:
        self.steps = steps
        self.work: Work | None = None
        self.ended = False

    def ready(self, soon: bool = False) -> bool:
        """True when it can go on;  soon: may poll for some microseconds."""
        work = self.work
        if work is not None and (work.done_soon() if soon else work.done()):
            work = self.work = None
        return work is None and not self.ended

    def step(self) -> None:
        """Run it until it waits, or has ended."""
        try:
            self.work = next(self.steps)
        except StopIteration as stop:
            self.work, self.ended, self.result = None, True, stop.value

    def advance(self) -> bool:
        """Run it as far as possible without waiting; True when it moved."""
        moved = False
        while self.ready():
            self.step()
            moved = True
        return moved

    def ended_soon(self) -> bool:
        """Run it until it waits for more than some microseconds, or has ended; True when it has."""
        while self.ready(soon=True):
            self.step()
        return self.ended


def complete(steps: Steps[Result]) -> Result:
    """Run a collective to its end, waiting for each work in order; returns its result."""
    task = Task(steps)
    while not task.ended:
        if task.work is not None:
            task.work.wait()
        task.step()
    return task.result


class Transport(Protocol):
    """Messages between `size` ranks, this one being `rank`.

    Two messages from one rank to another with the same tag arrive in the order in which they were sent. Both sides know
    a message's length, but for `at_most`. Neither call blocks; `send` may keep reading its memory, and `receive`
    writing it, until it is done. Arrays are 1-D and contiguous, of NumPy or CuPy; a message holds their bytes.
    """

    rank: int  # this rank
    size: int  # the number of ranks

    def send(self, array: Any, destination: int, tag: int) -> Work:
        """Start sending the bytes of `array`."""

    def receive(self, array: Any, source: int, tag: int, at_most: bool = False) -> Work:
        """Start receiving bytes into `array`;  at_most: perhaps fewer."""


class ControlMessage(NamedTuple):
    """A small message of any length between engines."""

    source: int
    content: bytes


class EngineTransport(Transport, Protocol):
    """A transport for an engine: with control messages, and a sleep that the rank's own threads can end."""

    in_flight: InFlight  # owns the memory of messages until they are done
    traffic: Traffic | None  # counts messages, while steps are recorded

    def send_control(self, content: bytes, destination: int) -> None:
        """Send a control message; two control messages to one rank arrive in order. Returns at once."""

    def recv_control(self) -> list[ControlMessage]:
        """Control messages that have arrived, at least one of them; none when none has."""

    def flushed(self) -> bool:
        """True when all control messages of this rank have been sent, so that it may exit."""

    @property
    def most_tags(self) -> int:
        """Tags from 0 to this one less may be used."""

    def sleep(self, timeout_s: float) -> None:
        """Return after `timeout_s`, or earlier when `wake` is called."""

    def wake(self) -> None:
        """End this rank's sleep, the current or the next one; any thread may call it."""
