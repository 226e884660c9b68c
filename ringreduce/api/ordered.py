"""Collectives in program order, without negotiation, and messages from one rank to another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api import broadcast as broadcasts
from ringreduce.api import control, objects
from ringreduce.api import gather as gathers
from ringreduce.api import reduce as reductions
from ringreduce.api.objects import pickled, unpickled
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.view import as_buffers, host_array, see_changed, takes, to_write
from ringreduce.collectives.ops import Adasum, Average, ReduceOp
from ringreduce.errors import InputError
from ringreduce.execution.lane import Lane
from ringreduce.execution.send_receive import tag_of
from ringreduce.execution.submission import Handle, Submission
from ringreduce.runtime.arguments import arguments_of
from ringreduce.runtime.submit import like, refused, submit_and_wait, whole
from ringreduce.transport.world import World

__all__ = ["Ordered", "ordered"]
MISSING: Any = object()
MAKE_NEW = "allreduce", "reducescatter", "allgather"  # of what is done at once; others write into the array given


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of this channel."""

    @functools.wraps(function)
    def method(self: Ordered, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, process_set=self)

    return method


def _at_once(function: Callable[..., Any], begin: Callable[..., Handle]) -> Callable[..., Any]:
    """The function, of this channel: by the lane, if a call like this one went the usual way before."""
    makes_new, begin = function.__name__ in MAKE_NEW, functools.partial(begin, waits=True)
    alone, has_root = (begin,) if function is control.barrier else None, function is broadcasts.broadcast_

    @functools.wraps(function)
    def method(self: Ordered, tensor: Any = MISSING, *args: Any, **kwargs: Any) -> Any:  # each line counts
        lane, out = self._lane, kwargs.pop("out", None) if makes_new else None
        array: Any = None
        call: tuple[Any, ...] | None = None
        if tensor is MISSING:  # then there are no others
            call = None if kwargs else alone
        elif (array := tensor if type(tensor) is np.ndarray else host_array(tensor)) is not None:
            call = begin, array.dtype, array.shape, *args, *kwargs.items()
            if has_root and (len(args) != 1 or type(args[0]) is not int):  # 1 and 1.0 are equal, but not both a rank
                call = *call, *map(type, args), *map(type, kwargs.values())
        if lane is not None and runtime.current("ordered").world is not self.world:
            lane = None
        try:
            program = None if lane is None else lane.programs.find(call)
        except TypeError:  # an argument that cannot be hashed, nor be right
            lane = program = None
        if program is not None and lane is not None:
            result, target = tensor, array
            if out is not None:
                result = target = out if takes(out, array, program.shape) else None
            elif makes_new:
                result = np.empty(program.shape, array.dtype) if array is tensor else tensor.new_empty(program.shape)
                target = host_array(result)
            if (target is not None or array is None) and lane.run(program, array, target):
                if call is alone:
                    return None
                if target is array is not tensor:
                    see_changed(tensor)
                return result
        given = () if tensor is MISSING else (tensor, *args)
        if out is not None:
            kwargs["out"] = out
        if lane is None or call is None or (makes_new and (array.ndim == 0 or args or "compression" in kwargs)):
            return function(*given, **kwargs, process_set=self)
        handle = begin(*given, **kwargs, process_set=self)
        result = handle.wait()
        if program is None:
            lane.programs.learn(call, handle)
        return result

    return method


def _begins(begin: Callable[..., Handle]) -> Callable[..., Handle]:
    """The method that begins an operation; what it refuses is known to the other ranks, but those of a message."""
    kind = begin.__name__.removesuffix("_async")

    @functools.wraps(begin)
    def method(self: Ordered, *args: Any, **kwargs: Any) -> Handle:
        try:
            return begin(self, *args, **kwargs)
        except InputError as exc:
            raise refused(kind, exc, None if kind in ("send", "recv") else self.process_set_id) from exc.__cause__

    return method


class Ordered(ProcessSet):
    """A process set whose operations run in the order of the program, the same on all its ranks; see `ordered`.

    Its methods are ringreduce's functions of the same name; other functions take it as `process_set=`.
    """

    world: World | None = None
    """In which it was made."""

    allreduce = _at_once(reductions.allreduce, reductions.allreduce_async)
    allreduce_ = _at_once(reductions.allreduce_, reductions.allreduce_async_)
    allreduce_async, allreduce_async_ = _of(reductions.allreduce_async), _of(reductions.allreduce_async_)
    reducescatter = _at_once(reductions.reducescatter, reductions.reducescatter_async)
    reducescatter_async = _of(reductions.reducescatter_async)
    allgather = _at_once(gathers.allgather, gathers.allgather_async)
    allgather_async = _of(gathers.allgather_async)
    alltoall, alltoall_async = _of(gathers.alltoall), _of(gathers.alltoall_async)
    broadcast = _of(broadcasts.broadcast)
    broadcast_ = _at_once(broadcasts.broadcast_, broadcasts.broadcast_async_)
    broadcast_async, broadcast_async_ = _of(broadcasts.broadcast_async), _of(broadcasts.broadcast_async_)
    broadcast_object, allgather_object = _of(objects.broadcast_object), _of(objects.allgather_object)
    barrier = _at_once(control.barrier, control.barrier_async)
    barrier_async = _of(control.barrier_async)
    _lane: Lane | None = None

    def reduce(self, tensor: Any, root_rank: int, op: ReduceOp = Average) -> Any:
        """The reduced tensor on the root, None on other ranks. Cost: as allreduce."""
        return self.reduce_async(tensor, root_rank, op).wait()

    @_begins
    def reduce_async(self, tensor: Any, root_rank: int, op: ReduceOp = Average) -> Handle:
        """Begin a `reduce`."""
        arguments = arguments_of("allreduce", None, op, 1.0, 1.0)
        (source,) = as_buffers([tensor], arguments.number)
        if op is Adasum:
            raise InputError("reduce: op=Adasum; expected Average, Sum, Min, Max or Product, or call allreduce")
        options: dict[str, Any] = {"check": arguments.check, "outputs": [source.empty(source.shape)]}
        return self._to_root("reduce", tensor, source, root_rank, arguments.details, by_rows=False, **options)

    def gather(self, tensor: Any, root_rank: int) -> Any:
        """The rows of all ranks on the root, in rank order; None on other ranks. dim 0 may differ per rank."""
        return self.gather_async(tensor, root_rank).wait()

    @_begins
    def gather_async(self, tensor: Any, root_rank: int) -> Handle:
        """Begin a `gather`."""
        (source,) = gathers.with_rows([tensor])
        splits = [source.shape[0] if rank == root_rank else 0 for rank in self._members()]
        return self._to_root("gather", tensor, source, root_rank, payload=splits)

    def scatter(self, tensor: Any, root_rank: int) -> Any:
        """This rank's part of the root's rows, as many for each rank.

        tensor: of the root; on other ranks any number of rows of the same shape and type, which are not read.
        """
        return self.scatter_async(tensor, root_rank).wait()

    @_begins
    def scatter_async(self, tensor: Any, root_rank: int) -> Handle:
        """Begin a `scatter`."""
        (source,), size = gathers.with_rows([tensor]), len(self._members())
        rows = source.shape[0]
        is_root = runtime.current_world("scatter").rank == root_rank
        if is_root and rows % size:
            raise InputError(f"scatter: {rows} rows cannot be split equally among {size} ranks")
        splits = [rows // size if is_root else 0] * size
        return self._to_root("scatter", tensor, source, root_rank, payload=splits, on_all=True)

    def send(self, tensor: Any, destination: int, tag: int = 0) -> None:
        """Send an array to a rank; returns when `tensor` may be changed. See `recv`."""
        self.send_async(tensor, destination, tag).wait()

    @_begins
    def send_async(self, tensor: Any, destination: int, tag: int = 0) -> Handle:
        """Begin a `send`; `tensor` must not change until the handle is done."""
        return self._submit("send", destination, (tag,), inputs=as_buffers([tensor]))

    def recv(self, tensor: Any, source: int, tag: int = 0) -> Any:
        """Overwrite `tensor` with an array of its shape and type that rank `source` sends with this tag; return it.

        Messages of one rank with one tag arrive in the order in which they were sent. They wait for no collective.
        Raises: MismatchError, on this rank, when another shape or type was sent.
        """
        return self.recv_async(tensor, source, tag).wait()

    @_begins
    def recv_async(self, tensor: Any, source: int, tag: int = 0) -> Handle:
        """Begin a `recv`; `tensor` must not be used until the handle is done."""
        (target,), written = to_write([tensor])
        handle = self._submit("recv", source, (tag,), signed=[target], outputs=[target])
        return handle.mapped(lambda _: written() or tensor)

    def send_object(self, obj: Any, destination: int, tag: int = 0) -> None:
        """Send any Python object, pickled. See `recv_object`."""
        payload = pickled(obj)
        for handle in [self.send_async(each, destination, tag) for each in (np.int64(payload.size), payload)]:
            handle.wait()

    def recv_object(self, source: int, tag: int = 0) -> Any:
        """What rank `source` has sent with this tag.

        Raises: InputError where it cannot be unpickled.
        """
        size = self.recv(np.empty((), np.int64), source, tag)
        return unpickled(self.recv(np.empty(int(size), np.uint8), source, tag), f"recv_object: what rank {source} sent")

    def _to_root(
        self,
        kind: str,
        tensor: Any,
        source: Buffer,
        root_rank: int,
        details: tuple[tuple[str, Any], ...] = (),
        on_all: bool = False,
        by_rows: bool = True,
        **options: Any,
    ) -> Handle:
        """Submit an operation with a root, which has the result; on_all: every rank has one."""
        has_result = on_all or runtime.current_world(kind).rank == root_rank

        def finish(submission: Submission) -> Any:
            return like(tensor, submission.outputs[0]) if has_result else None

        options |= {"details": (*details, ("root_rank", whole(root_rank))), "by_rows": by_rows}
        return self._submit(kind, root_rank, inputs=[source], finish=finish, **options)

    def _submit(self, kind: str, rank: int, tag: tuple[Any, ...] = (), payload: Any = None, **options: Any) -> Handle:
        """Submit an operation; rank: the root or the peer, a rank of the world."""
        if rank not in self._members():
            raise InputError(f"{kind}: rank {rank!r} is not in {self!r}; expected one of {self._members()}")
        if tag:
            payload = rank, tag_of(tag[0], f"{kind}: ")
        engine, number = runtime.current(kind).engine, number_of(self, kind)
        if tag and rank == engine.world.rank:
            raise InputError(f"{kind}: rank {rank} is this rank; copy the array instead")
        return engine.submit(kind, None, number, payload=payload, **options)

    def _check_world(self, function: str) -> None:
        now = runtime.current(function).world
        if self.world is not None and self.world.number != now.number:
            raise InputError(
                f"{function}: {self!r} ended with the world of {self.world.size} ranks in which it was made: ranks were"
                f" lost or have joined, and there are {now.size} now. Call ordered() again in the function that "
                "elastic.run wraps"
            )

    def _members(self) -> list[int]:
        return self.ranks or []  # a channel ends with its world, so these stay right

    def __repr__(self) -> str:
        return f"ordered(ranks={self.ranks})"


def ordered(process_set: ProcessSet = global_process_set, *, patient: bool = False) -> Ordered:
    """A channel for operations in program order: every rank of the process set calls the same ones in the same order.

    Nothing is negotiated, so a small synchronous call takes a fraction of the time; `torch.distributed` has the same
    contract. Named operations and other channels go on beside it, in any order. Every rank must call `ordered`, members
    or not, as it must `add_process_set`.

    patient: an operation that waits for long is not reported as stalled, nor failed.

    Cost:   one agreement to make it; then, an operation, one exchange of a hash between the ranks, with which the
            elements of a short sum travel between hosts.
    Raises: InputError when MPI has no tags left. Its operations raise MismatchError on all ranks when these differ in
            operation, type, shape, op or root; then the channel can be used further. PeerLostError closes it.

    >>> channel = ordered()                                                                            # doctest: +SKIP
    >>> channel.allreduce_(gradient, op=Sum)                                                           # doctest: +SKIP
    """
    details = ("process_set", number_of(process_set, "ordered")), ("patient", patient)
    made = Ordered(process_set._members())
    made.process_set_id = submit_and_wait("ordered", details=details)
    current = runtime.current("ordered")
    made.world, made._lane = current.world, current.engine.lane(made.process_set_id)
    return made
