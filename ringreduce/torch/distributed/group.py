"""The ProcessGroup of the backend "ring": some ranks, and the channel on which their operations run."""
# mypy: disable-error-code="override, assignment, misc"
# ruff: noqa: D102, N802, N815 - the small methods have torch's names, and say what these say

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import ringreduce as rr
from ringreduce import runtime
from ringreduce.compression import Quantized
from ringreduce.errors import InputError, LauncherMismatchError
from ringreduce.runtime.own_channel import OwnChannel
from ringreduce.torch import rendezvous
from ringreduce.torch.distributed.forms import of_any_form
from ringreduce.torch.distributed.operations import Operations
from ringreduce.torch.distributed.tensors import device_of, seconds
from ringreduce.torch.distributed.uncompiled import uncompiled
from ringreduce.torch.distributed.work import Work, keep_works_of_reducers
from ringreduce.torch.wrapped import Wrapped
from ringreduce.transport import joining
from ringreduce.transport.mpi import is_to_join, launchers_place, started_by_torch

PEER_TO_PEER = "send", "recv", "recv_anysource"
OPTIONS: Any = torch._C._distributed_c10d.Backend.Options  # of torch's own backends
ANEW = "init_process_group('ring', init_method=…, rank=ringreduce.rank(), world_size=ringreduce.size())"


def register() -> None:
    """Make the backend known to torch; see torch.distributed.Backend.register_backend."""
    rendezvous.teach_env()
    dist.Backend.register_backend("ring", create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, compression: Any) -> RingProcessGroup:
    """What torch calls on each member of a new group.  compression: what was passed as pg_options.

    torch passes them to the backends of all devices: those of NCCL, or of the gloo that is replaced, say nothing here.
    """
    if isinstance(compression, OPTIONS):
        compression = None
    if compression is not None and not isinstance(compression, Quantized):
        raise InputError(
            f"init_process_group: pg_options={compression!r}; expected Compression.int8 or .int4 of ringreduce, or None"
        )
    ranks = options.group_size
    members = list(options.global_ranks_in_group) or list(range(ranks))
    if not rr.is_initialized():
        if ranks > 1 and is_to_join(os.environ):
            _join(options, len(members))
        if (place := launchers_place(os.environ)) is not None:  # init() may wait for ranks that nobody has started
            _check_place(options, members, *place)
        rr.init()
    keep_works_of_reducers()
    _check_place(options, members, rr.rank(), rr.size())
    return RingProcessGroup(members, options.group_id, seconds(options.timeout, 0), compression)


def _join(options: Any, ranks: int) -> None:
    """Let this process, which no launcher of MPI has started, be a rank of the world of torch's default group."""
    if dist.is_initialized() and ranks < dist.get_world_size():
        raise LauncherMismatchError(
            f'new_group(backend="ring"): {ranks} of {dist.get_world_size()} ranks, and no launcher of MPI started '
            'them; make the group of all ranks first: init_process_group("ring"), or "cpu:ring,cuda:nccl"'
        )
    launcher = started_by_torch(os.environ) or "something else than ringrun"
    joining.check_mpi(launcher, str(ranks))
    joining.join_by_store(options.store, options.group_rank, ranks, seconds(options.timeout, 0))


def _check_place(options: Any, members: Sequence[int], rank: int, size: int) -> None:
    if len(members) > size or rank not in members or members.index(rank) != options.group_rank:
        ranks = options.group_size
        raise InputError(
            f"init_process_group: torch says rank {options.group_rank} of {ranks}, but MPI rank {rank} of {size}; pass "
            f"the same rank= and world_size=, or leave both to the launcher: ringrun -np {ranks} python train.py, "
            "without mp.spawn or multiprocessing.Process"
        )


class RingProcessGroup(Operations, dist.ProcessGroup):
    """A group of ranks, created by its members alone; destroy_process_group() ends it on this rank.

    Raises: MismatchError, in wait(), on all members when they call different operations, or with different shapes,
            types, ops or roots; then the group can be used further. PeerLostError when a member has left.
    """

    supports_splitting = supports_coalescing = False
    group_name = group_desc = ""  # attributes in place of torch's properties

    def __init__(self, members: Sequence[int], group_id: str, timeout_s: float, wire: Quantized | None = None) -> None:
        """members: ranks of the world, by rank in the group.  wire: of floating-point sums and means."""
        dist.ProcessGroup.__init__(self, members.index(rr.rank()), len(members))  # type: ignore[call-arg]
        self.group_name = self.group_desc = group_id
        self.wire = wire
        self.channel = OwnChannel(members, f"group {group_id}", timeout_s, ANEW)
        self._others: dict[str, Any] = {}  # by type of device
        self.channel.engine.recorder.when_recording(watch_optimizers)

    @of_any_form
    def barrier(self, opts: Any = None) -> Work:
        """Done when all ranks have begun it."""
        return Work(self.channel, opts, []).begin(self.channel.begin, "barrier")

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names a rank that is late; torch's own function of this name refuses all but gloo."""
        options = dist.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        self.barrier(options).wait()

    def elsewhere(self, device: str) -> Any:
        """The group for tensors on devices that init_process_group's map gives to another backend; None for ours.

        Its members make it when the first such tensor comes; it ends with all groups.
        """
        if device not in self._others:
            names = dist.distributed_c10d._world.pg_backend_config.get(self, "")  # ddp_hook's group has none
            backend = dict(each.split(":") for each in names.split(",") if each).get(device, "ring")
            make = functools.partial(dist.new_group, self.channel.members, use_local_synchronization=True)
            self._others[device] = None if backend == "ring" else make(backend=f"{device}:{backend}")
        return self._others[device]

    def _get_backend(self, device: Any) -> Any:
        other = self.elsewhere(torch.device(device).type)
        return self if other is None else other._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        """Which devices have a backend, as torch's checkpoints ask before they save in the background."""
        return [torch.device("cpu"), torch.device("cuda")]

    def name(self) -> str:
        return "ring"

    def shutdown(self) -> None:
        """End the group on this rank: what is not complete fails."""
        self.channel.shut()

    def getGroupName(self) -> str:
        return self.group_name

    def getGroupDesc(self) -> str:
        return self.group_desc

    def setGroupName(self, name: str) -> None:
        self.group_name = name

    def setGroupDesc(self, description: str) -> None:
        self.group_desc = description

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: ranks that call different operations are told so by these."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    getBackendName, abort = name, shutdown
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc


@functools.cache
def watch_optimizers() -> None:
    """Let an optimizer's step end a step of training, unless another step calls it; one of ours says so itself."""

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = sys._getframe(1)  # of the function that torch has put around step()
        frame = own.f_back
        while frame is not None and frame.f_code is not own.f_code:
            frame = frame.f_back
        if frame is None and not isinstance(optimizer, Wrapped):
            runtime.stepped(id(optimizer))

    register_optimizer_step_post_hook(stepped)


def _by_device(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method for tensors of this backend; those of others go to the group of theirs."""

    @uncompiled
    @functools.wraps(method)
    def run(group: RingProcessGroup, *args: Any, **kwargs: Any) -> Any:
        other = group.elsewhere(device_of(args))
        if other is not None:
            return getattr(other, name)(*args, **kwargs)
        try:
            return method(group, *args, **kwargs)
        except InputError as exc:
            raise group.channel.refused(method.__name__, exc, tells=name not in PEER_TO_PEER) from exc.__cause__

    return run


for _name, _method in vars(Operations).items():
    if callable(_method):
        setattr(RingProcessGroup, _name, _by_device(_name, of_any_form(_method)))
