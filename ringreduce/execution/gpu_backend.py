"""What operations ask of this rank's GPU. They know nothing else of it; gpu/backend.py answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringreduce.arrays.buffer import Buffer
from ringreduce.collectives.ops import Reduction
from ringreduce.execution.batch import Batch
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps


class GpuBackend(Protocol):
    """The GPU arrays of one process set or channel; costs nothing until there are some.

    Nothing waits for the GPU but what needs elements on the host. What returns Steps, all members call alike.
    """

    def begin(self, submission: Submission) -> None:
        """Order the work after what its caller has queued (`ready`), and the caller's later work after its results."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        """See `Buffer.empty`; operations may write to it."""

    def down(self, tensor: Buffer) -> Steps[Any]:
        """A tensor's elements on the host: its own memory, or a copy of GPU memory, which the caller may change."""

    def room(self, result: Buffer) -> Any:
        """Host memory for a result's elements: its own, or some from which `up` copies."""

    def up(self, elements: Any, result: Buffer) -> None:
        """Queue the copy of the elements from `down` or `room` into a result on the GPU."""

    def through_host(self, batch: Batch, collective: Callable[[Any, int], Steps[None]]) -> Steps[None]:
        """Plan a batch, whose owners expect its buckets then; the steps bring each to the host, and back.

        collective: changes a bucket's elements on the host in place; called with these, and the channel to use.
        """

    def allreduces(self, batches: Sequence[tuple[Batch, Reduction]]) -> Steps[list[Steps[None]]]:
        """Plan the all-reduces of batches, whose owners expect their buckets then; returns the steps of each.

        Raises: InputError, on all members, where the algorithm that the user wants cannot be used.
        """

    def abandon(self, steps: Steps[None]) -> None:
        """Keep an operation that will not continue, since work that it has queued may still use its memory."""

    def release(self) -> Steps[None]:
        """Free all memory of a removed set, after all that its members have queued."""

    def text(self) -> str:
        """How all-reduces are done, and why, such as `ipc: …`."""
