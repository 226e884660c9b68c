"""torch's operations of a process group, by torch's names and with its arguments, on a channel of ringreduce."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ringreduce.collectives.ops import Average, Sum
from ringreduce.compression import Quantized
from ringreduce.errors import InputError
from ringreduce.runtime.own_channel import OwnChannel
from ringreduce.torch.distributed.buckets import bucket_of
from ringreduce.torch.distributed.tensors import op_and_factor
from ringreduce.torch.distributed.work import BACKWARD, Work

Tensors = Sequence[torch.Tensor]


class Operations:
    """All take tensors: what else a group does is not here. opts: torch's, of each operation."""

    channel: OwnChannel
    wire: Quantized | None

    def allreduce(self, tensors: Tensors, opts: Any = None, wire: Quantized | None = None) -> Work:
        """Reduce each tensor in place; or one COO tensor.  wire: by default the group's, for what can travel so."""
        if tensors and tensors[0].is_sparse:
            if len(tensors) > 1:
                raise InputError(
                    f"{len(tensors)} tensors, the first of which is sparse; expected one: reduce each on its own"
                )
            return _sum_of_sparse(self.channel, tensors[0], opts)
        op, factor = op_and_factor(opts)
        if wire is None and op in (Average, Sum) and all(each.is_floating_point() for each in tensors):
            wire = self.wire
        work = Work(self.channel, opts, list(tensors))
        mapped = len(tensors) == 1 and BACKWARD.runs() and not (wire and wire.is_everywhere)
        bucket = bucket_of(tensors[0], self.channel) if mapped else None
        return work.begin(self.channel.allreduce, work.write(tensors), op, factor, wire, payload=bucket)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        """Copy the root's tensors into the others'; the default root is rank 0."""
        work = Work(self.channel, opts, list(tensors))
        return work.begin(self.channel.broadcast, work.write(tensors), getattr(opts, "rootRank", 0))

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce each tensor in place, on the root only."""
        work = Work(self.channel, opts, list(tensors))
        arrays = work.write(tensors) if self.channel.rank == opts.rootRank else work.read(tensors)
        return work.begin(self.channel.reduce, arrays, opts.rootRank, *op_and_factor(opts))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of rank r into outputs[k][r] of all."""
        work = Work(self.channel, opts, outputs)
        return work.begin(self.channel.all_gather, work.read(inputs), work.write(_by_rank(outputs)))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of rank r into outputs[r][k] of all."""
        work = Work(self.channel, opts, outputs)
        return work.begin(self.channel.all_gather, work.read(inputs), work.write(_joined(outputs)))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Copy inputs[k] of all ranks into outputs[k], one after the other."""
        work = Work(self.channel, opts, list(outputs))
        parts = [self.channel.equal_parts(each) for each in work.write(outputs)]
        return work.begin(self.channel.all_gather, work.read(inputs), _joined(zip(*parts, strict=True)))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Copy the inputs of all ranks into the output, one after the other."""
        work = Work(self.channel, opts, [output])
        return work.begin(self.channel.all_gather_single, *work.read([tensor]), *work.write([output]))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Work:
        """Reduce inputs[k][r] of all ranks into outputs[k] of rank r; they may differ in size by r."""
        work = Work(self.channel, opts, list(outputs))
        arrays = work.read(_by_rank(inputs)), work.write(outputs)
        return work.begin(self.channel.reduce_scatter, *arrays, *op_and_factor(opts))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Reduce the r-th parts of all ranks' inputs[k] into outputs[k] of rank r."""
        work = Work(self.channel, opts, list(outputs))
        parts = [self.channel.equal_parts(each) for each in work.read(inputs)]
        arrays = _joined(zip(*parts, strict=True)), work.write(outputs)
        return work.begin(self.channel.reduce_scatter, *arrays, *op_and_factor(opts))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Reduce the r-th parts of all ranks' inputs into the output of rank r."""
        work = Work(self.channel, opts, [output])
        arrays = *work.read([tensor]), *work.write([output])
        return work.begin(self.channel.reduce_scatter_single, *arrays, *op_and_factor(opts))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """inputs[r] goes to rank r, from which outputs[r] comes."""
        work = Work(self.channel, opts, list(outputs))
        return work.begin(self.channel.all_to_all, work.read(inputs), work.write(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """As `alltoall`, of so many rows each; without these of equal parts."""
        work = Work(self.channel, opts, [output])
        outgoing = self.channel.parts_of_rows(work.read([tensor])[0], input_rows)
        incoming = self.channel.parts_of_rows(work.write([output])[0], output_rows)
        return work.begin(self.channel.all_to_all, outgoing, incoming)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Copy the input of rank r into outputs[0][r] of the root."""
        work = Work(self.channel, opts, list(outputs))
        return work.begin(self.channel.gather, *work.read(inputs), work.write(_joined(outputs)), opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Copy inputs[0][r] of the root into the output of rank r."""
        work = Work(self.channel, opts, list(outputs))
        return work.begin(self.channel.scatter, *work.write(outputs), work.read(_joined(inputs)), opts.rootRank)

    def send(self, tensors: Tensors, destination: int, tag: int) -> Work:
        """Send one tensor."""
        work = Work(self.channel, None, list(tensors), is_message=True)
        return work.begin(self.channel.send, work.read(tensors), destination, tag)

    def recv(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        """Receive a tensor of as many elements of the same type as one sent with this tag."""
        work = Work(self.channel, None, list(tensors), is_message=True)
        return work.begin(self.channel.recv, work.write(tensors), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """As `recv`, from whichever rank sends first."""
        return self.recv(tensors, None, tag)

    # the names of the first, before PyTorch 2.14
    allreduce_coalesced, alltoall_base = allreduce, all_to_all_single
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced


def _by_rank(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    """The tensors for each rank, one after the other, of lists that have one for each rank."""
    if len(lengths := {len(each) for each in lists}) > 1:
        raise InputError(
            f"lists of {' and '.join(map(str, sorted(lengths)))} tensors; expected one for each rank in each"
        )
    return _joined(zip(*lists, strict=True))


def _joined(tensors: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(tensors))


def _sum_of_sparse(channel: OwnChannel, tensor: torch.Tensor, opts: Any) -> Work:
    """The sum of COO tensors: the elements of all ranks, which may differ in number; waits for them."""
    if op_and_factor(opts) != (Sum, 1):
        raise InputError(f"a sparse tensor with op {opts.reduceOp}; expected SUM")
    mine, work = tensor.coalesce(), Work(channel, opts, [tensor])
    rows = work.read([mine.indices().t(), mine.values()])
    arrays = lambda gathered: [each.array() for each in gathered.outputs]  # noqa: E731
    details = (("shape", tuple(tensor.shape)),)
    begun = work.begin(channel.begin, "allgather", rows, details=details, by_rows=True, finish=arrays)
    indices, values = begun.handle.wait()
    found = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=tensor.device, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(found.coalesce())
    return work
