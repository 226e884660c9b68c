"""What execution/ asks of GPUs, for one process set or channel: all but all-reduces go through host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.cuda import Pinned
from ringreduce.arrays.gpu_buffer import GpuBuffer
from ringreduce.collectives.cost_model import BUCKETS_IN_FLIGHT
from ringreduce.collectives.ops import Reduction
from ringreduce.execution.batch import Batch
from ringreduce.execution.context import Context
from ringreduce.execution.gpu_backend import GpuBackend
from ringreduce.execution.submission import Submission
from ringreduce.gpu.allreduce import GpuBatch, GpuReduction, nccl_can
from ringreduce.gpu.paths import GpuPaths
from ringreduce.gpu.stage import Done
from ringreduce.gpu.stream import Gpu
from ringreduce.transport.base import Steps


class CudaBackend(GpuBackend):
    """See `GpuBackend`, for each method."""

    def __init__(self, gpu: Gpu, context: Context) -> None:
        self._gpu, self._context = gpu, context
        self._paths = GpuPaths(gpu, context)

    def begin(self, submission: Submission) -> None:
        """See `GpuBackend`."""
        self._gpu.begin(submission)

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        """See `GpuBackend`."""
        made = like.empty(shape)
        if isinstance(made, GpuBuffer):
            self._gpu.stream.wait(made.ready())
        return made

    def down(self, tensor: Buffer) -> Steps[Any]:
        """See `GpuBackend`."""
        if not isinstance(tensor, GpuBuffer):
            return tensor.flat
        pinned, stream = Pinned(tensor.nbytes), self._gpu.stream
        stream.copy(pinned.pointer, tensor.pointer, tensor.nbytes)
        yield Done(stream.record(), self._context.transport.rank)
        return pinned.elements(tensor.element.storage, tensor.nbytes)

    def room(self, result: Buffer) -> Any:
        """See `GpuBackend`."""
        return Pinned(result.nbytes).elements(result.element.storage, result.nbytes) if result.on_gpu else result.flat

    def up(self, elements: Any, result: Buffer) -> None:
        """See `GpuBackend`."""
        if isinstance(result, GpuBuffer):
            self._gpu.stream.copy(result.pointer, elements.ctypes.data, result.nbytes)
            self._gpu.retire([elements])

    def through_host(self, batch: Batch, collective: Callable[[Any, int], Steps[None]]) -> Steps[None]:
        """See `GpuBackend`."""
        planned = GpuBatch(batch, self._context.settings.fusion_slot_bytes, self._paths)
        return planned.through_host(collective, BUCKETS_IN_FLIGHT)

    def allreduces(self, batches: Sequence[tuple[Batch, Reduction]]) -> Steps[list[Steps[None]]]:
        """See `GpuBackend`. One path for all, since a submission completes on one stream."""
        if any(reduction.wire is not None or reduction.is_paired for _, reduction in batches):  # the host's kernels do
            self._paths.start()
            return [GpuReduction(batch, reduction, "host_staged", self._paths).run() for batch, reduction in batches]
        path = yield from self._paths.choose(all(nccl_can(reduction) for _, reduction in batches))
        return [GpuReduction(batch, reduction, path, self._paths).run() for batch, reduction in batches]

    def abandon(self, steps: Steps[None]) -> None:
        """See `GpuBackend`."""
        if self._gpu.is_used:
            self._gpu.abandoned.append(steps)

    def release(self) -> Steps[None]:
        """See `GpuBackend`."""
        yield from self._paths.release()

    def text(self) -> str:
        """See `GpuBackend`."""
        return self._paths.text()
