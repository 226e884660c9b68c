"""This rank's GPU in the engine: a stream that waits for the callers' streams, and they for it.

    caller's stream   backward · record ready ·  …  ·  wait for done · optimizer step
    engine's stream             wait for ready · gather · sum · scatter · record done

No thread waits for a GPU meanwhile: a submission is complete when all its work is queued, and the caller's stream waits
for the rest. The arrays are kept alive until that work is done, since their memory would be reused.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.arrays import cuda as cuda
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.cuda import Event, Stream
from ringreduce.arrays.dtypes import ElementType
from ringreduce.arrays.gpu_buffer import GpuBuffer
from ringreduce.errors import InputError
from ringreduce.execution.submission import Submission
from ringreduce.gpu.kernels import Kernels
from ringreduce.transport.waiting import WaitsFor
from ringreduce.transport.world import World


class Gpu:
    """One rank's GPU. It costs nothing until the first GPU array; from then on only the engine's own thread polls."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.index: int | None = None  # the index of the GPU, from the first array
        self.default_index = 0  # used before the first array: a rank may join without any
        self.paths: list[Any] = []  # GpuPaths, from a layer above, of the process sets that have memory on this GPU
        self.abandoned: list[Any] = []  # operations that will not go on, whose memory queued work may still use
        self._retired: deque[tuple[Event, Any]] = deque()

    @property
    def over_mpi(self) -> bool:
        """True where MPI carries the messages."""
        return self.world.comm is not None

    @property
    def is_used(self) -> bool:
        """True from the first GPU array on."""
        return self.index is not None or "stream" in vars(self)

    def check(self, inputs: Sequence[Buffer]) -> None:
        """Raise InputError for an array on a GPU other than this rank's; called by the submitting threads."""
        for number, each in enumerate(inputs):
            if isinstance(each, GpuBuffer) and each.index != self.index:
                if self.index is not None:
                    error = InputError(
                        f"rank {self.world.rank}: an array on cuda:{each.index}, but its first was on "
                        f"cuda:{self.index}; a rank uses one GPU: move the array there, or make that GPU current "
                        "before arrays are made (torch.cuda.set_device, cupy.cuda.Device(…).use())"
                    )
                    error.at = number
                    raise error
                self.index = each.index

    @functools.cached_property
    def stream(self) -> Stream:
        """The engine's stream; its first use makes it CuPy's current one in the engine's thread."""
        stream = Stream(cuda.device(self.default_index if self.index is None else self.index))
        stream.use()
        return stream

    @functools.cached_property
    def kernels(self) -> Kernels:
        """The kernels of this GPU."""
        return Kernels(self.stream.device)

    def begin(self, submission: Submission, stream: Stream | None = None) -> None:
        """Make the engine's or another stream wait for the caller's, and the caller's for it when all is queued."""
        for event in submission.ready:
            (stream or self.stream).wait(event)

        def retire(submission: Submission) -> Callable[[], None]:
            done = self.retire([*submission.inputs, *submission.outputs], stream)
            return functools.partial(_follow, submission.outputs, done)

        submission.retire = retire

    def filled(self, element: ElementType, count: int, fill: Callable[[Any], None]) -> Buffer:
        """New memory of `count` elements, filled on the engine's stream."""
        index = self.stream.device.index  # makes the engine's stream CuPy's current one
        flat = cuda.cupy().empty(count, element.storage)
        fill(flat)
        return GpuBuffer(flat, int(flat.data.ptr), index, element, (count,), element.storage)

    def retire(self, kept: Sequence[Any], stream: Stream | None = None) -> Event:
        """Keep these until the work queued so far, on the engine's or another stream, is done; returns its event."""
        event = (stream or self.stream).record()
        self._retired.append((event, kept))
        return event

    def poll(self) -> bool:
        """Release what is done; returns False. Raises CollectiveError when the rest can never complete."""
        while self._retired and self._retired[0][0].done():
            self._retired.popleft()
        if self._retired:
            for each in self.paths:
                each.check()
        return False

    def waits_for(self) -> WaitsFor:
        """Control messages, while something is kept alive: so `poll` is called again."""
        return WaitsFor.CONTROL if self._retired else WaitsFor.NOTHING

    def queued(self) -> list[Event]:
        """Events behind all that is queued now."""
        if "stream" not in vars(self):
            return []
        stages = [stage for each in self.paths for stage in each.all_stages]
        return [each.record() for each in {self.stream, *(stage.stream for stage in stages)}]

    def abort(self) -> None:
        """Stop the work that waits for lost ranks, so that nothing hangs."""
        for each in self.paths:
            each.abort()

    def close(self) -> None:
        """Wait for the GPU, and unmap the other ranks' memory; after all ranks have, `free` the rest."""
        if "stream" in self.__dict__:
            self.stream.synchronize()
        self._retired.clear()
        self.abandoned.clear()
        for each in self.paths:
            each.close()

    def free(self, of_lost_world: bool = False) -> None:
        """Free our memory on the GPU.  of_lost_world: see GpuPaths.free."""
        for each in self.paths:
            each.free(of_lost_world)


def _follow(outputs: Sequence[Buffer], done: Event) -> None:
    """Make what the calling thread queues from now on wait for an event."""
    followers = {each.current_stream: each for each in outputs if isinstance(each, GpuBuffer)}
    for each in followers.values():  # one of each library
        each.follow(done)
