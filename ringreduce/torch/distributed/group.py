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
from ringreduce.errors import CollectiveError, InputError
from ringreduce.execution.into_outputs import INTO_OUTPUTS
from ringreduce.execution.signature import Signature, sign
from ringreduce.torch.distributed import launch
from ringreduce.torch.distributed.tensors import Details, Staged, equal_slices, reduction, seconds, slices
from ringreduce.torch.distributed.work import Work

Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Make the backend known to torch; see torch.distributed.Backend.register_backend."""
    launch.teach_env()
    dist.Backend.register_backend("ring", create, extended_api=True, devices=["cpu"])


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
        self._rank, self._members, self._timeout_s = rank, list(members), timeout_s
        self._name = self._description = group_id
        self._operations = 0
        self._engine = runtime.current("init_process_group").engine
        self._channel: int | None
        self._channel, opened = self._engine.open_channel(members, f"group {group_id}", INTO_OUTPUTS)
        opened.wait(timeout_s)

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce each tensor in place; COO tensors too."""
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_sparse:
            return self._sparse(tensors[0], opts)
        staged = Staged()
        arrays = [staged.write(each) for each in tensors]
        details = reduction(opts.reduceOp, arrays, self.size())
        return self._begin(
            "allreduce", arrays, opts, staged, list(tensors), inputs=arrays, outputs=arrays, details=details
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Copy the root's tensors into the others'."""
        opts, staged = opts or dist.BroadcastOptions(), Staged()
        arrays = [staged.write(each) for each in tensors]
        details = (("root_rank", self._members[opts.rootRank]),)
        return self._begin(
            "broadcast", arrays, opts, staged, list(tensors), inputs=arrays, outputs=arrays, details=details
        )

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce each tensor in place, on the root only."""
        staged, is_root = Staged(), self._rank == opts.rootRank
        arrays = [staged.write(each) if is_root else staged.read(each) for each in tensors]
        outputs = arrays if is_root else [each.empty(each.shape) for each in arrays]
        details = (*reduction(opts.reduceOp, arrays, self.size()), ("root_rank", self._members[opts.rootRank]))
        return self._begin(
            "reduce", arrays, opts, staged, list(tensors), inputs=arrays, outputs=outputs, details=details
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of rank r into outputs[k][r] of all."""
        return self._all_gather([each[r] for r in range(self.size()) for each in outputs], inputs, opts, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of rank r into outputs[r][k] of all."""
        return self._all_gather(list(itertools.chain.from_iterable(outputs)), inputs, opts, outputs)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Copy the inputs of all ranks into the output, one after the other."""
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """As `_allgather_base`, of many tensors."""
        staged = Staged()
        arrays = [staged.read(each) for each in inputs]
        parts = [equal_slices("all_gather", staged.write(each), self.size()) for each in outputs]
        into = [each[r] for r in range(self.size()) for each in parts]
        return self._gathered(arrays, into, opts, staged, list(outputs))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce inputs[k][r] of all ranks into outputs[k] of rank r; they may differ in size by r."""
        staged = Staged()
        parts = [staged.read(each[r]) for r in range(self.size()) for each in inputs]
        return self._reduce_scattered(parts, outputs, opts, staged)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Reduce the r-th part of all ranks' inputs into the output of rank r."""
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """As `_reduce_scatter_base`, of many tensors."""
        staged = Staged()
        parts = [equal_slices("reduce_scatter", staged.read(each), self.size()) for each in inputs]
        by_rank = [each[r] for r in range(self.size()) for each in parts]
        return self._reduce_scattered(by_rank, outputs, opts, staged)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """inputs[r] goes to rank r, from which outputs[r] comes."""
        staged = Staged()
        outgoing, incoming = [staged.read(each) for each in inputs], [staged.write(each) for each in outputs]
        return self._exchanged("all_to_all", outgoing, incoming, opts, staged, list(outputs), checks=True)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """As `alltoall`, of so many rows each; without splits of equal parts."""
        staged = Staged()
        outgoing = _split(staged.read(tensor), input_splits, self.size())
        incoming = _split(staged.write(output), output_splits, self.size())
        return self._exchanged("all_to_all", outgoing, incoming, opts, staged, [output], checks=True)

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Copy the input of rank r into outputs[0][r] of the root."""
        staged = Staged()
        mine = staged.read(inputs[0])
        outgoing = [mine if rank == opts.rootRank else mine.empty((0,)) for rank in range(self.size())]
        is_root = self._rank == opts.rootRank
        incoming = [staged.write(each) for each in outputs[0]] if is_root else slices(mine, [0] * self.size())
        self._check_equal("gather", mine, incoming if is_root else ())
        details = (("root_rank", self._members[opts.rootRank]),)
        return self._exchanged("gather", outgoing, incoming, opts, staged, list(outputs), [mine], details)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Copy inputs[0][r] of the root into the output of rank r."""
        staged = Staged()
        mine = staged.write(outputs[0])
        incoming = [mine if rank == opts.rootRank else mine.empty((0,)) for rank in range(self.size())]
        is_root = self._rank == opts.rootRank
        outgoing = [staged.read(each) for each in inputs[0]] if is_root else slices(mine, [0] * self.size())
        self._check_equal("scatter", mine, outgoing if is_root else ())
        details = (("root_rank", self._members[opts.rootRank]),)
        return self._exchanged("scatter", outgoing, incoming, opts, staged, list(outputs), [mine], details)

    def barrier(self, opts: Any = None) -> Work:
        """Done when all ranks have begun it."""
        return self._begin("barrier", (), opts, Staged(), [])

    # Messages

    def send(self, tensors: Tensors, destination: int, tag: int) -> Work:
        """Send one tensor."""
        staged = Staged()
        array = staged.read(tensors[0])
        payload = (self._members[destination], tag)
        return self._begin("send", _flat([array]), None, staged, list(tensors), inputs=[array], payload=payload)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Receive a tensor of as many elements of the same type as one sent with this tag."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """As `recv`, from whichever rank sends first."""
        return self._receive(tensors, None, tag)

    # The group

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
        if runtime.is_initialized() and self._channel is not None:
            self._engine.shut_channel(self._channel)
        self._channel = None

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
        """Nothing: operations are counted from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._operations

    # How operations are begun

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
        everyones = [torch.empty((self.size(), *each.shape), dtype=each.dtype) for each in (indices, values)]
        work = self.allgather_into_tensor_coalesced(everyones, [indices, values], opts)
        work.wait()
        places, elements = everyones[0].transpose(0, 1).flatten(1), everyones[1].flatten(0, 1)
        found = torch.sparse_coo_tensor(places, elements, tensor.shape, check_invariants=False)
        with torch.no_grad():
            tensor.copy_(found.coalesce())
        return work.of([tensor])

    def _all_gather(self, outputs: Tensors, inputs: Tensors, opts: Any, result: Any) -> Work:
        staged = Staged()
        arrays, into = [staged.read(each) for each in inputs], [staged.write(each) for each in outputs]
        return self._gathered(arrays, into, opts, staged, result)

    def _gathered(self, arrays: list[Buffer], into: list[Buffer], opts: Any, staged: Staged, result: Any) -> Work:
        for rank in range(self.size()):
            for mine, output in zip(arrays, into[rank * len(arrays) :], strict=False):
                self._check_equal("all_gather", mine, [output])
        return self._begin("all_gather", arrays, opts, staged, result, inputs=arrays, outputs=into)

    def _reduce_scattered(self, parts: list[Buffer], outputs: Tensors, opts: Any, staged: Staged) -> Work:
        opts, arrays = opts or dist.ReduceScatterOptions(), [staged.write(each) for each in outputs]
        for mine, output in zip(parts[self._rank * len(arrays) :], arrays, strict=False):
            self._check_equal("reduce_scatter", mine, [output])
        details = reduction(opts.reduceOp, parts, self.size())
        return self._begin(
            "reduce_scatter", _flat(parts), opts, staged, list(outputs), inputs=parts, outputs=arrays, details=details
        )

    def _exchanged(
        self,
        kind: str,
        outgoing: list[Buffer],
        incoming: list[Buffer],
        opts: Any,
        staged: Staged,
        result: Any,
        signed: Sequence[Buffer] | None = None,
        details: Details = (),
        checks: bool = False,
    ) -> Work:
        if len(outgoing) != self.size() or len(incoming) != self.size():
            raise InputError(f"{kind}: {len(outgoing)} inputs and {len(incoming)} outputs; expected {self.size()} each")
        signed = slices(outgoing[0], [0]) if signed is None else signed
        return self._begin(
            kind, signed, opts, staged, result, inputs=outgoing, outputs=incoming, details=details, payload=checks
        )

    def _check_equal(self, kind: str, mine: Buffer, others: Sequence[Buffer]) -> None:
        for each in others:
            if (each.element, each.count) != (mine.element, mine.count):
                raise InputError(
                    f"{kind}: {each.element.name} of {each.count} elements beside {mine.element.name} of {mine.count}; "
                    "expected equal types and sizes"
                )

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        staged = Staged()
        array = staged.write(tensors[0])
        payload = (None if source is None else self._members[source], tag)
        arguments: Any = {"outputs": [array], "payload": payload}
        arguments["finish"] = lambda submission: self._members.index(submission.payload[0])
        return self._begin("recv", _flat([array]), None, staged, list(tensors), **arguments)

    def _begin(
        self,
        kind: str,
        signed: Sequence[Buffer],
        opts: Any,
        staged: Staged,
        result: Any,
        details: Details = (),
        **arguments: Any,
    ) -> Work:
        """Submit an operation.  signed: the arrays whose types and shapes are the same on all ranks."""
        if self._channel is None:
            raise CollectiveError(f"{kind}: this process group was destroyed")
        work = Work(result)

        def then(error: Exception | None) -> None:
            if error is None:
                staged.write_back()
            work.end(error)

        def signature(name: str) -> Signature:
            return Signature(kind, name, tuple([sign(each, name) for each in signed]), details)

        timeout_s = seconds(getattr(opts, "timeout", None), self._timeout_s)
        self._operations += 1
        work.handle = self._engine.submit(
            kind, None, self._channel, sign=signature, then=then, timeout_s=timeout_s, **arguments
        )
        return work


def _flat(arrays: Sequence[Buffer]) -> list[Buffer]:
    """The arrays as 1-D ones, where only their numbers of elements must be equal."""
    return [slices(each, [each.count])[0] for each in arrays]


def _split(array: Buffer, rows: Sequence[int], size: int) -> list[Buffer]:
    if not rows:
        return equal_slices("all_to_all", array, size)
    if sum(rows) != array.shape[0]:
        raise InputError(f"all_to_all: splits {list(rows)} of {array.shape[0]} rows; expected them to add up to that")
    length = array.count // max(array.shape[0], 1)
    return slices(array, [each * length for each in rows])
