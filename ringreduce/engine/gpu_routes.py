"""By which way a process set's GPU arrays are reduced; found out together, when the first ones come.

alone     one rank: nothing travels
mapped    one host: the GPUs read each other's slots (collectives/mapped.py)
bridged   several hosts: that inside a host, rings across (collectives/bridged.py)
device    MPI takes GPU memory: rings of device buffers
staged    through pinned host memory, by the algorithms for host arrays
nccl      NVIDIA's library, when it is asked for; what it cannot do goes one of the other ways
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import bruck
from ringreduce.collectives.bridged import Bridge
from ringreduce.collectives.hierarchical import Hierarchy
from ringreduce.collectives.mapped import ONE_SHOT_BYTES
from ringreduce.cuda.runtime import Block, Stream
from ringreduce.engine.gpu import Gpu
from ringreduce.errors import InputError, RingreduceError
from ringreduce.log import LOGGER
from ringreduce.settings import Settings
from ringreduce.transport import cuda_aware, nccl
from ringreduce.transport.base import EngineTransport, Steps, Transport
from ringreduce.transport.device import Stage
from ringreduce.transport.peers import CARD_BYTES, OwnSlots, PeerSlots
from ringreduce.transport.window import Flags

TEXT_BYTES = 480
"""Room for a sentence that a rank tells the others."""
MESSAGES = ("ring", "direct", "doubling")
"""Algorithms that, when they are asked for, rule the mapped ways out."""


class GpuRoutes:
    """One process set's, on one of its ranks; all members find the same way."""

    def __init__(
        self,
        channels: Sequence[Transport],
        hosts: Sequence[int],
        flags: Flags | None,
        settings: Settings,
        mpi: EngineTransport | None = None,
        whole: bool = True,
    ) -> None:
        """hosts: of each member;  flags, mpi: see Routes;  whole: all ranks are members.

        NCCL serves only the set of all: its kernels wait for the other ranks', so those of two sets could wait for each
        other.
        """
        self._mpi = mpi
        self._whole = whole
        self._channel = channels[0]
        self._channels = channels
        self._hosts = hosts
        self._flags = flags
        self._settings = settings
        self.way = ""
        """One of the above, but nccl; empty before the first GPU array has come."""
        self.why = "no GPU array has come yet"
        self.peers: PeerSlots | None = None
        self.bridge: Bridge | None = None
        self.nccl: nccl.Nccl | None = None
        self.stages: list[Stage] = []
        """What goes through the host: for each channel, with a stream of its own."""
        self.blocks: list[Stage] = []
        """The same on the engine's stream, for what stays on the GPU."""
        self.scratch: Block | None = None
        """For `mapped`: of a short buffer."""
        self._own: OwnSlots | None = None

    def text(self) -> str:
        """Such as `mapped: …`."""
        ways = [each for each in ("nccl" if self.nccl else "", self.way) if each]
        return f"{', then '.join(ways)}: {self.why}" if ways else self.why

    def mapping(self) -> tuple[PeerSlots, int]:
        """For `mapped`: the slots, and the address of the scratch memory."""
        if self.peers is None or self.scratch is None:
            raise AssertionError("the way is mapped, but no slots are")
        return self.peers, self.scratch.pointer

    def prepare(self, gpu: Gpu) -> Steps[None]:
        """Find the way, once. All members must call it together. It takes messages, and for a child process seconds."""
        if self.way:
            return
        if self not in gpu.routes:
            gpu.routes.append(self)
        size = self._channel.size
        if self._settings.algorithm == "nccl" and self._whole and size > 1:
            yield from self._start_nccl(gpu)
        self.stages = [Stage(Stream(gpu.stream.device)) for _ in self._channels]
        self.blocks = [Stage(gpu.stream) for _ in self._channels]
        self.way, self.why = ("alone", "one rank") if size == 1 else (yield from self._find(gpu))
        if self._channel.rank == 0:
            LOGGER.info(f"GPU arrays are reduced by {self.text()}")

    def _find(self, gpu: Gpu) -> Steps[tuple[str, str]]:
        """The way of several ranks, and why it is that."""
        why_not = yield from self._map(gpu)
        if self.peers is not None:
            if len(set(self._hosts)) == 1:
                return "mapped", "the host's ranks map each other's GPU memory (CUDA IPC)"
            takes, why = yield from self._mpi_takes_gpu(gpu)
            hierarchy = Hierarchy(self._channels, self._hosts, self.peers.rank)
            self.bridge = Bridge(hierarchy, self.peers, gpu.stream if takes else None)
            between = "MPI messages of GPU memory" if takes else "pinned host memory"
            return "bridged", f"CUDA IPC inside a host, {between} between hosts ({why})"
        takes, why = yield from self._mpi_takes_gpu(gpu)
        return "device" if takes else "staged", f"{why}; not mapped: {why_not}"

    def _map(self, gpu: Gpu) -> Steps[str]:
        """Map the slots of this host's members; returns why not, the same on all members."""
        settings, flags = self._settings, self._flags
        mine = self._hosts[self._channel.rank]
        ours = [rank for rank, host in enumerate(self._hosts) if host == mine]
        if not settings.cuda_ipc:
            return "RINGREDUCE_CUDA_IPC=0"
        if settings.algorithm in MESSAGES:
            return f"RINGREDUCE_ALGORITHM={settings.algorithm}"
        if len(set(self._hosts)) == len(self._hosts):
            return "no two ranks are on one host"
        if len(set(self._hosts)) > 1 and settings.deterministic:
            return "RINGREDUCE_DETERMINISTIC=1 with several hosts"
        if flags is None:
            return "the ranks of a host share no memory for another process set's flags"
        card, why_not = np.zeros(CARD_BYTES, np.uint8), ""
        try:
            self._own = own = OwnSlots(gpu.stream.device, settings.cuda_slot_bytes)
            card = own.card(exported=len(ours) > 1)
            self.scratch = Block(gpu.stream.device, ONE_SHOT_BYTES)
        except Exception as exc:  # CuPy's: no memory, or no IPC here
            why_not = f"CUDA gives no memory that others can map ({_sentence(exc)})"
        why_not = yield from self._first(why_not)
        cards = yield from bruck.allgather(card, self._channel)
        if not why_not:
            try:
                self.peers = PeerSlots(own, [cards[rank] for rank in ours], flags)
            except Exception as exc:  # CuPy's
                why_not = f"the other ranks' GPU memory cannot be mapped ({_sentence(exc)})"
            why_not = yield from self._first(why_not)
        if why_not:
            self._unmap()
            # nobody frees what another has mapped
            yield from self._first("")
            self._free()
            if self._channel.rank == 0:
                LOGGER.warning(f"GPU arrays are copied through host memory instead of by CUDA IPC: {why_not}")
        return why_not

    def _mpi_takes_gpu(self, gpu: Gpu) -> Steps[tuple[bool, str]]:
        """Whether MPI takes GPU memory, on all members, and a sentence of it."""
        if self._mpi is None:
            return False, "the ranks are threads"
        place = self._channel.rank
        first = self._hosts.index(self._hosts[place]) == place
        index = gpu.stream.device.index
        takes, why = yield from cuda_aware.local_answer(
            self._settings.cuda_aware_mpi, index, place, is_first_of_host=first
        )
        no = yield from self._first("" if takes else why)
        self._mpi.takes_gpu |= not no
        return not no, no or why

    def _start_nccl(self, gpu: Gpu) -> Steps[None]:
        """Join NCCL's communicator of all ranks. Raises InputError, on all of them, where there can be none."""
        device, place = gpu.stream.device, self._channel.rank
        told = np.zeros(TEXT_BYTES, np.uint8)
        _write(told, device.pci_bus_id)
        buses = yield from bruck.allgather(told, self._channel)
        identity, why_not = np.zeros(nccl.ID_BYTES, np.uint8), ""
        try:
            nccl.check_devices([_read(each) for each in buses], self._hosts)
            nccl.binding()
            if place == 0:
                identity[:] = np.frombuffer(nccl.unique_id(), np.uint8)
        except RingreduceError as exc:
            why_not = str(exc)
        why_not = yield from self._first(why_not)
        if why_not:
            raise InputError(f"RINGREDUCE_ALGORITHM=nccl: {why_not}")
        identities = yield from bruck.allgather(identity, self._channel)
        self.nccl = yield from nccl.connect(device, self._channel.size, identities[0].tobytes(), place)

    def _first(self, sentence: str) -> Steps[str]:
        """The sentence of the first member that has one."""
        told = np.zeros(TEXT_BYTES, np.uint8)
        _write(told, sentence)
        everyones = yield from bruck.allgather(told, self._channel)
        return next((f"rank {rank}: {_read(each)}" for rank, each in enumerate(everyones) if each.any()), "")

    def check(self) -> None:
        """Raise CollectiveError when NCCL has failed at what was queued."""
        if self.nccl is not None:
            self.nccl.check()

    def close(self) -> None:
        """Give back what belongs to the others; `free` gives back the rest, when all members have called this."""
        if self.nccl is not None:
            self.nccl.close()
        self.nccl = None
        self._unmap()

    def free(self) -> None:
        """Give the memory back; the set reduces no more GPU arrays."""
        for stage in (*self.stages, *self.blocks):
            stage.free()
        if self.bridge is not None:
            self.bridge.free()
        self._free()
        self.stages, self.blocks, self.bridge, self.way = [], [], None, ""

    def _unmap(self) -> None:
        if self.peers is not None:
            self.peers.close()
        self.peers = None

    def _free(self) -> None:
        if self._own is not None:
            self._own.free()
        if self.scratch is not None:
            self.scratch.free()
        self._own = self.scratch = None


def _sentence(exc: Exception) -> str:
    lines = str(exc).splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0]}"


def _write(told: Any, sentence: str) -> None:
    encoded = sentence.encode()[: told.size]
    told[: len(encoded)] = np.frombuffer(encoded, np.uint8)


def _read(told: Any) -> str:
    return bytes(told).rstrip(b"\0").decode(errors="replace")
