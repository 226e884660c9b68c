"""By which path a process set's GPU arrays are reduced; found out together, when the first ones come.

nccl          every rank has a GPU of its own and NCCL is there: what NCCL can reduce
ipc           one host: the GPUs read each other's slots (gpu/ipc_allreduce.py)
cuda_aware    MPI takes GPU memory: rings of device buffers
host_staged   through pinned host memory, by the algorithms for host arrays

One rank alone needs none: nothing travels. Other operations than all-reduces always go through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringreduce.collectives import bruck
from ringreduce.errors import InputError, RingreduceError
from ringreduce.gpu import cuda_aware, nccl
from ringreduce.gpu.ipc import CARD_BYTES, OwnSlots, PeerSlots
from ringreduce.gpu.ipc_allreduce import ONE_SHOT_BYTES
from ringreduce.gpu.runtime import Block, Stream
from ringreduce.gpu.stage import Done, Stage
from ringreduce.gpu.stream import Gpu
from ringreduce.log import LOGGER
from ringreduce.settings import Settings
from ringreduce.transport.base import Steps, Transport
from ringreduce.transport.window import Flags

TEXT_BYTES = 480
"""Room for a sentence that a rank sends the others."""
ALONE = "one rank, so nothing travels"


class GpuPaths:
    """One process set's, on one of its ranks; all members find the same paths."""

    def __init__(
        self,
        channels: Sequence[Transport],
        hosts: Sequence[int],
        flags: Flags | None,
        settings: Settings,
        over_mpi: bool,
    ) -> None:
        """hosts: of each member;  flags: in the host's shared memory, if any;  over_mpi: MPI carries the messages."""
        self._channel, self._channels, self._hosts = channels[0], channels, hosts
        self._flags, self._settings, self._over_mpi = flags, settings, over_mpi
        self._gpu: Gpu | None = None
        self.path = ""
        """One of the above, but nccl: that of what NCCL cannot reduce. Empty before anything has needed it."""
        self._why = ""
        self.why_not_nccl: str | None = None
        """None before the ranks have asked each other; empty: they use it."""
        self.nccl: nccl.Nccl | None = None
        self.nccl_stage: Stage | None = None
        """With a stream of its own: NCCL's kernels wait for other ranks', and those of two sets in one stream of each
        rank, in another order here than there, would wait for each other."""
        self.peers: PeerSlots | None = None
        self.stages: list[Stage] = []
        """What goes through the host: for each channel, with a stream of its own."""
        self.blocks: list[Stage] = []
        """The same on the engine's stream, for what stays on the GPU."""
        self._own: OwnSlots | None = None
        self._scratch: Block | None = None

    def text(self) -> str:
        """Such as `ipc: …`."""
        if self._channel.size == 1:
            return ALONE
        if self.why_not_nccl is None:
            return "no GPU array has come yet"
        if self.nccl is None:
            return f"{self.path}: {self._why}; no nccl: {self.why_not_nccl}"
        other = f"; else {self.path}: {self._why}" if self.path else ""
        return f"nccl: every rank has a GPU of its own, and NCCL is there{other}"

    def mapping(self) -> tuple[PeerSlots, int]:
        """For `ipc`: the slots, and the address of ONE_SHOT_BYTES of scratch memory."""
        if self.peers is None or self._scratch is None:
            raise AssertionError("the path is ipc, but no slots are mapped")
        return self.peers, self._scratch.pointer

    def start(self, gpu: Gpu) -> None:
        """Make what all paths need; again and again."""
        if self._gpu is None:
            self._gpu = gpu
            gpu.paths.append(self)
            self.stages = [Stage(Stream(gpu.stream.device)) for _ in self._channels]
            self.blocks = [Stage(gpu.stream) for _ in self._channels]

    def choose(self, gpu: Gpu, nccl_can: bool) -> Steps[str]:
        """The path of an all-reduce, found when it is first needed; empty for a rank alone. All members call it alike.

        nccl_can: NCCL has this reduction.
        Cost:     the first time some messages, and for a child process that tries MPI, or for NCCL, seconds.
        Raises:   InputError, on all members, for RINGREDUCE_ALGORITHM=nccl where there can be none.
        """
        self.start(gpu)
        if self._channel.size == 1:
            return ""
        if self.why_not_nccl is None:
            self.why_not_nccl = yield from self._start_nccl(gpu)
            if self.nccl is not None:
                self._log()
        if self.why_not_nccl and self._settings.algorithm == "nccl":
            raise InputError(f"RINGREDUCE_ALGORITHM=nccl: {self.why_not_nccl}")
        if self.nccl is not None and nccl_can:
            return "nccl"
        if not self.path:
            self.path, self._why = yield from self._find(gpu)
            self._log()
        return self.path

    def _log(self) -> None:
        if self._channel.rank == 0:
            LOGGER.info(f"GPU arrays are reduced by {self.text()}")

    def _start_nccl(self, gpu: Gpu) -> Steps[str]:
        """Join NCCL's communicator of all members; returns why not, the same on all, or nothing."""
        settings, device, rank = self._settings, gpu.stream.device, self._channel.rank
        if settings.algorithm not in ("auto", "nccl"):
            return f"RINGREDUCE_ALGORITHM={settings.algorithm}"
        if settings.deterministic:
            return "RINGREDUCE_DETERMINISTIC=1"
        if not settings.cuda_nccl and settings.algorithm == "auto":
            return "RINGREDUCE_CUDA_NCCL=0"
        told = yield from self._exchange(f"{device.pci_bus_id} {nccl.why_not()}")
        buses, reasons = zip(*(each.split(" ", 1) for each in told), strict=True)
        why_not = _first(reasons) or nccl.shared_gpu(buses, self._hosts)
        if why_not:
            return why_not
        identities = yield from self._exchange(nccl.unique_id().hex() if rank == 0 else "")
        try:
            self.nccl = yield from nccl.connect(device, self._channel.size, bytes.fromhex(identities[0]), rank)
        except RingreduceError as exc:
            why_not = str(exc)
        why_not = _first((yield from self._exchange(why_not)))
        if why_not:
            self.abort()
            self._warn(f"GPU arrays are not reduced by NCCL: {why_not}")
        else:
            self.nccl_stage = Stage(Stream(device))
        return why_not

    def _find(self, gpu: Gpu) -> Steps[tuple[str, str]]:
        """The path of what NCCL does not reduce, and why it is that."""
        no_ipc = yield from self._map(gpu)
        if not no_ipc:
            return "ipc", "the host's ranks map each other's GPU memory (CUDA IPC)"
        takes, why = yield from self._mpi_takes_gpu(gpu)
        return "cuda_aware" if takes else "host_staged", f"{why}; no ipc: {no_ipc}"

    def _map(self, gpu: Gpu) -> Steps[str]:
        """Map the slots of all members; returns why not, the same on all, or nothing."""
        settings, flags = self._settings, self._flags
        if not settings.cuda_ipc:
            return "RINGREDUCE_CUDA_IPC=0"
        if settings.algorithm in ("ring", "direct", "doubling"):
            return f"RINGREDUCE_ALGORITHM={settings.algorithm}"
        if len(set(self._hosts)) > 1:
            return "several hosts"
        if flags is None:
            return "the host's ranks have no shared memory for another process set's flags"
        card, why_not = np.zeros(CARD_BYTES, np.uint8), ""
        try:
            self._own = own = OwnSlots(gpu.stream.device, settings.cuda_slot_bytes)
            card = own.card(exported=True)
            self._scratch = Block(gpu.stream.device, ONE_SHOT_BYTES)
        except Exception as exc:  # CuPy's: no memory, or no IPC here
            why_not = f"CUDA gives no memory that others can map ({_sentence(exc)})"
        why_not = _first((yield from self._exchange(why_not)))
        cards = yield from bruck.allgather(card, self._channel)
        if not why_not:
            try:
                self.peers = PeerSlots(own, list(cards), flags)
            except Exception as exc:  # CuPy's
                why_not = f"the other ranks' GPU memory cannot be mapped ({_sentence(exc)})"
            why_not = _first((yield from self._exchange(why_not)))
        if why_not:
            self._unmap()
            yield from self._exchange("")  # nobody frees what another has mapped
            self._free_slots()
            self._warn(f"GPU arrays are copied through host memory instead of by CUDA IPC: {why_not}")
        return why_not

    def _mpi_takes_gpu(self, gpu: Gpu) -> Steps[tuple[bool, str]]:
        """Whether all members give MPI GPU memory, and why."""
        rank, settings = self._channel.rank, self._settings
        if not self._over_mpi:
            return False, "the ranks are threads"
        if settings.deterministic or settings.algorithm in ("direct", "doubling"):
            return False, "of GPU memory there are rings only"
        takes, why = yield from cuda_aware.local_answer(
            settings.cuda_aware_mpi,
            gpu.stream.device.index,
            rank,
            is_first_of_host=self._hosts.index(self._hosts[rank]) == rank,
        )
        why_not = _first((yield from self._exchange("" if takes else why)))
        return not why_not, why_not or why

    def _exchange(self, sentence: str) -> Steps[list[str]]:
        """What each member says."""
        mine = np.zeros(TEXT_BYTES, np.uint8)
        encoded = sentence.encode()[:TEXT_BYTES]
        mine[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        everyones = yield from bruck.allgather(mine, self._channel)
        return [bytes(each).rstrip(b"\0").decode(errors="replace") for each in everyones]

    def _warn(self, line: str) -> None:
        if self._channel.rank == 0:
            LOGGER.warning(line)

    def check(self) -> None:
        """Raise CollectiveError when NCCL has failed at what was queued."""
        if self.nccl is not None:
            self.nccl.check()

    def abort(self) -> None:
        """End what NCCL's kernels still do: a rank they wait for is gone."""
        if self.nccl is not None:
            self.nccl.abort()
        self.nccl = None

    def release(self) -> Steps[None]:
        """Give all memory back: the set was removed. All members call it, behind all that they have queued."""
        if self._gpu is None:
            return
        streams = [self._gpu.stream, *(each.stream for each in [self.nccl_stage] if each)]
        for stream in streams:
            yield Done(stream.record(), self._channel.rank)
        self.close()
        yield from self._exchange("")  # nobody frees what another has mapped
        self._gpu.paths.remove(self)
        self.free()

    def close(self) -> None:
        """Give back what belongs to the others; `free` gives back the rest, when all members have called this."""
        if self.nccl is not None:
            self.nccl.close()
        self.nccl = None
        self._unmap()

    def free(self) -> None:
        """Give the memory back; the set reduces no more GPU arrays."""
        own = [*self.stages, *([self.nccl_stage] if self.nccl_stage else [])]
        for stage in (*own, *self.blocks):
            stage.free()
        if self._gpu is not None:
            self._gpu.forget([stage.stream for stage in own])
        self._free_slots()

    def _unmap(self) -> None:
        if self.peers is not None:
            self.peers.close()
        self.peers = None

    def _free_slots(self) -> None:
        if self._own is not None:
            self._own.free()
        if self._scratch is not None:
            self._scratch.free()
        self._own = self._scratch = None


def _first(reasons: Sequence[str]) -> str:
    """The first member's reason, if any has one."""
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")


def _sentence(exc: Exception) -> str:
    lines = str(exc).splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0]}"
