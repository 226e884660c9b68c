"""The path on which a process set's GPU arrays are reduced; the ranks choose it together, for the first such array.

nccl          every rank has a GPU of its own and NCCL is installed: what NCCL can reduce
ipc           one host: the GPUs read each other's slots (gpu/ipc_allreduce.py)
cuda_aware    MPI accepts GPU memory: rings of device buffers
host_staged   through pinned host memory, by the algorithms for host arrays

A single rank needs none. Operations other than all-reduces always go through host memory (backend.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ringreduce.arrays.cuda import Stream
from ringreduce.collectives import bruck
from ringreduce.errors import InputError, RingreduceError
from ringreduce.execution.context import Context
from ringreduce.gpu import cuda_aware, nccl
from ringreduce.gpu.ipc import HANDLE_BYTES, Slots
from ringreduce.gpu.stage import Done, Stage
from ringreduce.gpu.stream import Gpu
from ringreduce.settings.log import JOB
from ringreduce.transport.base import Steps

TEXT_BYTES = 480  # the longest reason that a rank sends to the others


class GpuPaths:
    """The paths of one process set, on one of its ranks; all members choose the same."""

    def __init__(self, gpu: Gpu, context: Context) -> None:
        self.gpu, self.context = gpu, context
        self.path = ""  # of what NCCL cannot reduce: ipc, cuda_aware or host_staged; empty until something needs it
        self._why = ""
        self.why_not_nccl: str | None = None  # None: not decided yet; empty: NCCL is used
        self.nccl: nccl.Nccl | None = None
        # with its own stream: NCCL's kernels wait for other ranks; two sets in one stream, in another order on another
        # rank, would deadlock
        self.nccl_stage: Stage | None = None
        self.slots: Slots | None = None
        self.stages: list[Stage] = []  # of host_staged: one per channel, each with its own stream
        self.blocks: list[Stage] = []  # of the other paths: one per channel, on the engine's stream

    @property
    def hosts(self) -> list[int]:
        """The host of each member."""
        return [self.gpu.world.hosts[each] for each in self.context.members]

    @property
    def all_stages(self) -> list[Stage]:
        """Whatever has a stream, or memory for one."""
        return [*self.stages, *self.blocks, *([self.nccl_stage] if self.nccl_stage else [])]

    def text(self) -> str:
        """The path and the reason for it, such as `ipc: …`."""
        if self.context.transport.size == 1:
            return "one rank, so nothing travels"
        if self.why_not_nccl is None:
            return "no GPU array so far"
        if self.nccl is None:
            return f"{self.path}: {self._why}; no nccl: {self.why_not_nccl}"
        other = f"; else {self.path}: {self._why}" if self.path else ""
        return f"nccl: every rank has a GPU of its own, and NCCL is installed{other}"

    def start(self) -> None:
        """Allocate what all paths need, once."""
        if not self.blocks:
            self.gpu.paths.append(self)
            self.stages = [Stage(Stream(self.gpu.stream.device)) for _ in self.context.algorithms.channels]
            self.blocks = [Stage(self.gpu.stream) for _ in self.stages]

    def choose(self, nccl_can: bool) -> Steps[str]:
        """The path of an all-reduce, found when first needed; empty for a single rank. All members call it alike.

        nccl_can: NCCL has this reduction.
        Cost:     the first time some messages, and seconds to start NCCL or a child process that tries MPI.
        Raises:   InputError, on all members, for RINGREDUCE_ALGORITHM=nccl where NCCL cannot be used.
        """
        self.start()
        if self.context.transport.size == 1:
            return ""
        if self.why_not_nccl is None:
            self.why_not_nccl = yield from self._start_nccl()
            if self.nccl is not None:
                self._log(logging.INFO, f"GPU arrays are reduced by {self.text()}")
        if self.why_not_nccl and self.context.settings.algorithm == "nccl":
            raise InputError(f"RINGREDUCE_ALGORITHM=nccl: {self.why_not_nccl}")
        if self.nccl is not None and nccl_can:
            return "nccl"
        if not self.path:
            self.path, self._why = yield from self._find()
            self._log(logging.INFO, f"GPU arrays are reduced by {self.text()}")
        return self.path

    def _log(self, level: int, line: str) -> None:
        if self.context.transport.rank == 0:
            JOB.log(level, line)

    def _start_nccl(self) -> Steps[str]:
        """Join NCCL's communicator of all members; returns why that failed, the same on all, or ""."""
        settings, device, rank = self.context.settings, self.gpu.stream.device, self.context.transport.rank
        if settings.algorithm not in ("auto", "nccl"):
            return f"RINGREDUCE_ALGORITHM={settings.algorithm}"
        if settings.deterministic:
            return "RINGREDUCE_DETERMINISTIC=1"
        if not settings.cuda_nccl and settings.algorithm == "auto":
            return "RINGREDUCE_CUDA_NCCL=0"
        replies = yield from self._exchange(f"{device.pci_bus_id} {nccl.why_not()}")
        buses, reasons = zip(*(each.split(" ", 1) for each in replies), strict=True)
        why_not = _first(reasons) or nccl.shared_gpu(buses, self.hosts)
        if why_not:
            return why_not
        identities = yield from self._exchange(nccl.unique_id().hex() if rank == 0 else "")
        try:
            self.nccl = yield from nccl.connect(device, self.context.transport.size, bytes.fromhex(identities[0]), rank)
        except RingreduceError as exc:
            why_not = str(exc)
        why_not = _first((yield from self._exchange(why_not)))
        if why_not:
            self.abort()
            self._log(logging.WARNING, f"GPU arrays are not reduced by NCCL: {why_not}")
        else:
            self.nccl_stage = Stage(Stream(device))
        return why_not

    def _find(self) -> Steps[tuple[str, str]]:
        """The path of what NCCL does not reduce, and the reason for it."""
        no_ipc = yield from self._map()
        if not no_ipc:
            return "ipc", "the host's ranks map each other's GPU memory (CUDA IPC)"
        is_aware, why = yield from self._is_cuda_aware()
        return "cuda_aware" if is_aware else "host_staged", f"{why}; no ipc: {no_ipc}"

    def _map(self) -> Steps[str]:
        """Map the slots of all members; returns why that failed, the same on all, or ""."""
        settings, flags = self.context.settings, self.context.algorithms.gpu_flags
        if not settings.cuda_ipc:
            return "RINGREDUCE_CUDA_IPC=0"
        if settings.algorithm in ("ring", "halving", "direct", "doubling"):
            return f"RINGREDUCE_ALGORITHM={settings.algorithm}"
        if len(set(self.hosts)) > 1:
            return "several hosts"
        if flags is None:
            return "the host's ranks have no shared memory for another process set's flags"
        handle, why_not = np.zeros(HANDLE_BYTES, np.uint8), ""
        try:
            self.slots = slots = Slots(self.gpu.stream.device, settings.cuda_slot_bytes, flags, settings.elastic)
            handle = slots.handle()
        except Exception as exc:  # CuPy's: no memory, or no IPC here
            why_not = f"CUDA allocates no memory that others can map ({_sentence(exc)})"
        why_not = _first((yield from self._exchange(why_not)))
        handles = yield from bruck.allgather(handle, self.context.transport)
        if not why_not:
            try:
                slots.open(handles)
            except Exception as exc:  # CuPy's
                why_not = f"the other ranks' GPU memory cannot be mapped ({_sentence(exc)})"
            why_not = _first((yield from self._exchange(why_not)))
        if why_not:
            if self.slots is not None:
                self.slots.close()
            yield from self._exchange("")  # a barrier: no rank frees what another has mapped
            self._free_slots()
            self._log(logging.WARNING, f"GPU arrays are copied through host memory instead of by CUDA IPC: {why_not}")
        return why_not

    def _is_cuda_aware(self) -> Steps[tuple[bool, str]]:
        """Whether all members may pass GPU memory to MPI, and why."""
        settings = self.context.settings
        if not self.gpu.over_mpi:
            return False, "the ranks are threads"
        if settings.deterministic or settings.algorithm in ("direct", "doubling"):
            return False, "GPU memory has only the ring"
        is_aware, why = cuda_aware.answer(settings.cuda_aware_mpi)
        why_not = _first((yield from self._exchange("" if is_aware else why)))
        return not why_not, why_not or why

    def _exchange(self, sentence: str) -> Steps[list[str]]:
        """Gather a sentence from each member."""
        mine = np.zeros(TEXT_BYTES, np.uint8)
        encoded = sentence.encode()[:TEXT_BYTES]
        mine[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        texts = yield from bruck.allgather(mine, self.context.transport)
        return [bytes(each).rstrip(b"\0").decode(errors="replace") for each in texts]

    def check(self) -> None:
        """Raise CollectiveError when a queued NCCL operation has failed."""
        if self.nccl is not None:
            self.nccl.check()

    def abort(self) -> None:
        """Stop NCCL's kernels: a rank that they wait for is gone."""
        if self.nccl is not None:
            self.nccl.abort()
        self.nccl = None

    def release(self) -> Steps[None]:
        """Free all memory of a removed set. All members call it, after everything that they have queued."""
        if not self.blocks:
            return
        for event in self.gpu.queued():
            yield Done(event, self.context.transport.rank)
        self.close()
        yield from self._exchange("")  # a barrier, see `_map`
        self.gpu.paths.remove(self)
        self.free()

    def close(self) -> None:
        """Unmap the other members' memory; `free` frees our own, after all members have called this."""
        if self.nccl is not None:
            self.nccl.close()
        self.nccl = None
        if self.slots is not None:
            self.slots.close()

    def free(self, of_lost_world: bool = False) -> None:
        """Free the memory; the set reduces no more GPU arrays.

        of_lost_world: MPI may still read and write what it was given for ranks that are dead.
        """
        of_mpi = self.blocks if self.path == "cuda_aware" and of_lost_world else []
        for stage in self.all_stages:
            if stage not in of_mpi:
                stage.free()
        self._free_slots()

    def _free_slots(self) -> None:
        if self.slots is not None:
            self.slots.free()
        self.slots = None


def _first(reasons: Sequence[str]) -> str:
    """The first member's reason, if any has one."""
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")


def _sentence(exc: Exception) -> str:
    lines = str(exc).splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0]}"
