"""The ProcessGroup of the backend "ring": torch's operations, as ringreduce's, in the order of the program."""
# mypy: disable-error-code="override, assignment"
# ruff: noqa: D102, N802, N815 - the small methods have torch's names, and say what these say

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.buffer import Buffer
from ringreduce.errors import InputError
from ringreduce.execution.into_outputs import INTO_OUTPUTS
from ringreduce.torch.distributed import launch
from ringreduce.torch.distributed.buckets import Buckets
from ringreduce.torch.distributed.call import Call
from ringreduce.torch.distributed.tensors import Details, check_equal, equal_slices, reduction, seconds, slices, split
from ringreduce.torch.distributed.work import BACKWARD, Work

Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Make the backend known to torch; see torch.distributed.Backend.register_backend."""
    launch.teach_env()
    dist.Backend.register_backend("ring", create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, _: Any) -> RingProcessGroup:
    """What torch calls on each member of a new group."""
    if not rr.is_initialized():
        rr.init()
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    if len(members) > rr.size() or rr.rank() not in members or members.index(rr.rank()) != options.group_rank:
        raise InputError(
            f"init_process_group: torch says rank {options.group_rank} of {options.group_size}, but MPI rank "
            f"{rr.rank()} of {rr.size()}; pass the same rank= and world_size=, or leave both to the launcher"
        )
    return RingProcessGroup(options.group_rank, members, options.group_id, seconds(options.timeout, 0))


class RingProcessGroup(dist.ProcessGroup):
    """Some ranks, which alone made it; destroy_process_group() ends it on this rank.

    Raises: MismatchError, in wait(), on all members when they call different operations, or with different shapes,
            types, ops or roots; then the group can be used further. PeerLostError when a member has left.
    """

    supports_splitting = supports_coalescing = False

    def __init__(self, rank: int, members: Sequence[int], group_id: str, timeout_s: float) -> None:
        """members: ranks of the world, by rank in the group."""
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._rank, self._members, self._ranks = rank, list(members), range(len(members))
        self._name = self._description = group_id
        self.timeout_s = timeout_s
        self.engine = runtime.current("init_process_group").engine
        self._buckets = Buckets(rr.local_size())
        self.channel: int | None
        self.channel, opened = self.engine.open_channel(members, f"group {group_id}", INTO_OUTPUTS)
        opened.wait(timeout_s)

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor in place; COO tensors too."""
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_sparse:
            return self._sparse(tensors[0], opts)
        call = Call(self, "allreduce", opts, list(tensors))
        arrays = call.write(tensors)
        bucket = self._buckets.of(tensors[0]) if len(tensors) == 1 and BACKWARD.runs() else None
        return call.begin(arrays, arrays, reduction(opts.reduceOp, arrays, self.size()), payload=bucket)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Copy the root's tensors into the others'."""
        opts = opts or dist.BroadcastOptions()
        call = Call(self, "broadcast", opts, list(tensors))
        arrays = call.write(tensors)
        return call.begin(arrays, arrays, self._root(opts))

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce each tensor in place, on the root only."""
        call = Call(self, "reduce", opts, list(tensors))
        is_root = self._rank == opts.rootRank
        arrays = call.write(tensors) if is_root else call.read(tensors)
        outputs = arrays if is_root else [each.empty(each.shape) for each in arrays]
        return call.begin(arrays, outputs, reduction(opts.reduceOp, arrays, self.size()) + self._root(opts))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of rank r into outputs[k][r] of all."""
        call = Call(self, "all_gather", opts, outputs)
        return self._gathered(call, inputs, call.write([each[r] for r in self._ranks for each in outputs]))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of rank r into outputs[r][k] of all."""
        call = Call(self, "all_gather", opts, outputs)
        return self._gathered(call, inputs, call.write(list(itertools.chain.from_iterable(outputs))))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of all ranks into outputs[k], one after the other."""
        call = Call(self, "all_gather", opts, list(outputs))
        parts = [equal_slices("all_gather", each, self.size()) for each in call.write(outputs)]
        return self._gathered(call, inputs, [each[r] for r in self._ranks for each in parts])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Copy the inputs of all ranks into the output, one after the other."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce inputs[k][r] of all ranks into outputs[k] of rank r; they may differ in size by r."""
        opts = opts or dist.ReduceScatterOptions()
        call = Call(self, "reduce_scatter", opts, list(outputs))
        return self._scattered(call, call.read([each[r] for r in self._ranks for each in inputs]), outputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Reduce the r-th parts of all ranks' inputs[k] into outputs[k] of rank r."""
        opts = opts or dist.ReduceScatterOptions()
        call = Call(self, "reduce_scatter", opts, list(outputs))
        parts = [equal_slices("reduce_scatter", each, self.size()) for each in call.read(inputs)]
        return self._scattered(call, [each[r] for r in self._ranks for each in parts], outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Reduce the r-th parts of all ranks' inputs into the output of rank r."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """inputs[r] goes to rank r, from which outputs[r] comes."""
        call = Call(self, "all_to_all", opts, list(outputs))
        return self._exchanged(call, call.read(inputs), call.write(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """As `alltoall`, of so many rows each; without splits of equal parts."""
        call = Call(self, "all_to_all", opts, [output])
        (outgoing,), (incoming,) = call.read([tensor]), call.write([output])
        parts = split(outgoing, input_splits, self.size()), split(incoming, output_splits, self.size())
        return self._exchanged(call, *parts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Copy the input of rank r into outputs[0][r] of the root."""
        call = Call(self, "gather", opts, list(outputs))
        (mine,) = call.read(inputs)
        at_root = call.write(outputs[0]) if self._rank == opts.rootRank else []
        check_equal("gather", mine, at_root)
        to_root, nothing = self._only(mine, opts.rootRank), [mine.empty((0,))] * self.size()
        return call.begin(to_root, at_root or nothing, self._root(opts), [mine])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Copy inputs[0][r] of the root into the output of rank r."""
        call = Call(self, "scatter", opts, list(outputs))
        (mine,) = call.write(outputs)
        at_root = call.read(inputs[0]) if self._rank == opts.rootRank else []
        check_equal("scatter", mine, at_root)
        from_root, nothing = self._only(mine, opts.rootRank), [mine.empty((0,))] * self.size()
        return call.begin(at_root or nothing, from_root, self._root(opts), [mine])

    def barrier(self, opts: Any = None) -> Work:
        """Done when all ranks have begun it."""
        return Call(self, "barrier", opts, []).begin()

    # the names of the first, before PyTorch 2.13
    allreduce_coalesced, alltoall_base = allreduce, all_to_all_single
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    # Messages

    def send(self, tensors: Tensors, destination: int, tag: int) -> Work:
        """Send one tensor."""
        call = Call(self, "send", None, list(tensors))
        return call.begin(call.read(tensors), counted=True, payload=(self._members[destination], tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Receive a tensor of as many elements of the same type as one sent with this tag."""
        return self._receive(tensors, self._members[source], tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """As `recv`, from whichever rank sends first."""
        return self._receive(tensors, None, tag)

    # What they share

    def _root(self, opts: Any) -> Details:
        return (("root_rank", self._members[opts.rootRank]),)

    def _only(self, array: Buffer, root: int) -> list[Buffer]:
        """The array for the root, and nothing for other ranks."""
        return [array if rank == root else array.empty((0,)) for rank in self._ranks]

    def _gathered(self, call: Call, inputs: Tensors, outputs: list[Buffer]) -> Work:
        arrays = call.read(inputs)
        for number, each in enumerate(arrays):
            check_equal("all_gather", each, outputs[number :: len(arrays)])
        return call.begin(arrays, outputs)

    def _scattered(self, call: Call, parts: list[Buffer], outputs: Tensors, opts: Any) -> Work:
        arrays = call.write(outputs)
        for number, each in enumerate(arrays):
            check_equal("reduce_scatter", parts[self._rank * len(arrays) + number], [each])
        return call.begin(parts, arrays, reduction(opts.reduceOp, parts, self.size()), counted=True)

    def _exchanged(self, call: Call, outgoing: list[Buffer], incoming: list[Buffer]) -> Work:
        if len(outgoing) != self.size() or len(incoming) != self.size():
            raise InputError(
                f"all_to_all: {len(outgoing)} inputs, {len(incoming)} outputs; expected {self.size()} each"
            )
        return call.begin(outgoing, incoming, signed=slices(outgoing[0], [0]), payload=True)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        call = Call(self, "recv", None, list(tensors))
        arrays = call.write(tensors)
        came_from = lambda submission: self._members.index(submission.payload[0])  # noqa: E731
        return call.begin((), arrays, signed=arrays, counted=True, payload=(source, tag), finish=came_from)

    def _sparse(self, tensor: torch.Tensor, opts: Any) -> Work:
        """The sum of COO tensors: everyone's elements, of as many as the fullest rank has; waits for them."""
        if getattr(opts.reduceOp, "op", opts.reduceOp) != dist.ReduceOp.SUM:
            raise InputError(f"allreduce of a sparse tensor: op {opts.reduceOp}; expected SUM")
        mine = tensor.coalesce()
        most = torch.tensor([mine._nnz()])
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.MAX, opts.timeout
        self.allreduce([most], options).wait()
        room = int(most) - mine._nnz()
        values = torch.cat([mine.values(), mine.values().new_zeros(room, *mine.values().shape[1:])])
        indices = torch.cat([mine.indices(), mine.indices().new_zeros(mine.sparse_dim(), room)], 1)
        everyones = [each.new_empty((self.size(), *each.shape)) for each in (indices, values)]
        work = self.all_gather_single_coalesced(everyones, [indices, values], opts)
        work.wait()
        places, elements = everyones[0].transpose(0, 1).flatten(1), everyones[1].flatten(0, 1)
        found = torch.sparse_coo_tensor(places, elements, tensor.shape, check_invariants=False)
        with torch.no_grad():
            tensor.copy_(found.coalesce())
        return work.of([tensor])

    # The group

    def check_gpu(self) -> None:
        """Raise InputError where init_process_group's device map has another backend for tensors on GPUs."""
        backends = dist.distributed_c10d._world.pg_backend_config.get(self, "")  # ddp_hook's group has none
        if "cuda:" in backends and "cuda:ring" not in backends:
            raise InputError(
                f'a tensor on a GPU in a group with the backends "{backends}": torch gives all tensors of a group to '
                '"ring", if it is one of them; make a group of its own for tensors on GPUs, new_group(backend=…)'
            )

    def size(self) -> int:
        return len(self._members)

    getSize = size

    def rank(self) -> int:
        return self._rank

    getRank = rank

    def name(self) -> str:
        return "ring"

    getBackendName = name

    def _get_backend(self, device: Any) -> RingProcessGroup:
        return self

    def shutdown(self) -> None:
        """End the group on this rank: what is not complete fails."""
        if runtime.is_initialized() and self.channel is not None:
            self.engine.shut_channel(self.channel)
        self.channel = None

    abort = shutdown

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: ranks that call different operations are told so by these."""

    def _get_sequence_number_for_group(self) -> int:
        return 0
