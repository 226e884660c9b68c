"""A worker: it pulls parameters from all servers and pushes gradients to them."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.arrays import trees
from ringreduce.arrays.libraries import as_kind, to_numpy
from ringreduce.arrays.memory import Memory, in_common
from ringreduce.arrays.torch_tensor import is_torch
from ringreduce.compression import AnyCompressor, Compression, wire_of
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.ps import messages
from ringreduce.ps.layout import Key, joined
from ringreduce.ps.roles import begin, regrouped, retried
from ringreduce.settings.log import JOB

MOST_UNANSWERED, UNANSWERED_BYTES = 16, 64 << 20
"""In an elastic job, so many pushes are kept between two pulls, and no more bytes than these but for one push."""
NO_NUMBERS = "OSUmM"  # kinds of NumPy's types: objects, texts, times


class Worker:
    """One of the workers; created on each rank where `is_server()` is False, while the others make a `Server`.

    parameters:  any nesting of dicts, lists, tuples and arrays of NumPy, CuPy, torch or JAX, equal in form, shapes and
                 types on all workers; the first worker's values are those to start from. Servers hold bfloat16 as
                 float32, and with Compression.bf16 it travels in 16 bits.
    servers:     as `Server`'s.
    compression: as the servers'.
    index:       this worker's number, from 0; `count`: how many there are; both change when an elastic job loses one.

    Raises: InputError (a ValueError) for wrong arguments, and where ranks do not agree.
    """

    def __init__(
        self, parameters: Any, servers: int | None = None, compression: AnyCompressor = Compression.none
    ) -> None:
        self._tree, self._compression = parameters, compression
        named = _numbers_of("ps.Worker: parameter", parameters)
        self._keys = [Key(name, each.shape, each.dtype) for name, each in named.items()]
        if not self._keys:
            raise InputError("ps.Worker: no parameters; expected arrays, in dicts, lists or tuples")
        self._job = begin(servers, compression, self._keys)
        self.index = self._job.workers.index(runtime.current("ps.Worker").world.rank)
        self.count = len(self._job.workers)
        self._outbox: list[tuple[int, messages.Packed]] = []  # by server
        self._sending: list[Handle] = []
        self._pushes = 0
        self._unanswered: list[list[messages.Packed]] = []  # pushes since the last pull, in an elastic job
        self._closed = False
        if self.index == 0:
            _warn_of_tied(parameters, named)
            self._post(messages.BEGIN, named)
            self._flush()

    def pull(self) -> Any:
        """The parameters, in new arrays of the kinds that were passed first; waits as the servers' mode says.

        Each server's part is as it was at one moment; between servers moments differ, but in mode sync.

        Cost:   all parameters, from each server its part.
        Raises: PeerLostError when a rank is lost; InputError after close().
        """
        self._check_open()
        values = retried(self._pull, self._recover)
        arrays = joined(values, self._job.layout, self._keys)
        return trees.map_leaves(self._tree, lambda name, leaf: as_kind(leaf, arrays[name]))

    def push(self, gradients: Any) -> None:
        """Send gradients, a tree of the form and shapes of the parameters; returns at once, they may change again.

        They travel in the types of the parameters: float64 for float32 ones is rounded, whole numbers become floats.

        Cost:   all gradients, to each server its part; in an elastic job MOST_UNANSWERED pushes without a pull, or
                UNANSWERED_BYTES of them, wait as a pull does, since until then they are kept.
        Raises: InputError for another form, types that cannot become the parameters', and after close(); PeerLostError.
        """
        self._check_open()
        packed = self._post(messages.PUSH, self._fitting(gradients))
        self._pushes += 1
        if runtime.current("ps").is_elastic:
            self._unanswered.append(packed)
        retried(self._flush, self._recover)
        nbytes = sum(each.nbytes for push in self._unanswered for parts in push for each in parts)
        if len(self._unanswered) == MOST_UNANSWERED or nbytes > UNANSWERED_BYTES:
            retried(self._pull, self._recover)

    def _fitting(self, gradients: Any) -> dict[str, Any]:
        """Gradients of the shapes and types of the parameters, by name: what a server cannot use ends here."""
        where = f"push on rank {runtime.current('ps').world.rank}: gradient"
        arrays = _numbers_of(where, gradients)
        for key in self._keys:
            array = arrays.get(key.name)
            if array is None or array.shape != key.shape:
                what = "nothing" if array is None else f"shape {array.shape}"
                raise InputError(f"{where} {key.name!r}: got {what}, expected shape {key.shape}")
            if not np.can_cast(array.dtype, key.dtype, "same_kind"):
                raise InputError(
                    f"{where} {key.name!r}: got {array.dtype}, expected {key.dtype}, the parameter's type, or one that "
                    "can become it"
                )
            arrays[key.name] = array.astype(key.dtype, copy=False)
        if len(arrays) > len(self._keys):
            extra = next(name for name in arrays if name not in {key.name for key in self._keys})
            raise InputError(f"{where} {extra!r} belongs to no parameter")
        return arrays

    def close(self) -> None:
        """Tell the servers that this worker has finished, and wait for the others; `with` does so. Idempotent."""
        if not self._closed:
            self._closed = True
            retried(self._close, self._recover)

    def _check_open(self) -> None:
        if self._closed:  # nobody would answer
            raise InputError("ps.Worker: it is closed; push and pull before close(), and inside `with`")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: types.TracebackType | None) -> None:
        if kind is None:  # else the servers learn of this rank's end as of any other's
            self.close()

    def _pull(self) -> dict[str, Any]:
        self._post(messages.PULL)
        self._flush()
        values: dict[str, Any] = {}
        first = self.index % len(self._job.servers)  # each worker begins with another, or all would wait for one's link
        for server in (*self._job.servers[first:], *self._job.servers[:first]):
            values |= messages.receive(self._job.channel, self._job.ranks[server], self._compression).arrays
        self._unanswered.clear()  # they are applied: a server does one thing after the other
        return values

    def _close(self) -> None:
        self._post(messages.DONE)
        self._flush()
        self._wait()
        self._job.channel.barrier()  # a rank that leaves would end it for all

    def _post(self, kind: int, arrays: dict[str, Any] | None = None) -> list[messages.Packed]:
        """Put a message for each server into the outbox, with its part of the arrays."""
        packed = [
            messages.pack(kind, {each.name: each.of(arrays[each.key]) for each in held if arrays}, self._to(server))
            for server, held in zip(self._job.servers, self._job.layout, strict=True)
        ]
        self._outbox += zip(self._job.servers, packed, strict=True)
        return packed

    def _to(self, server: int) -> AnyCompressor:
        """The compression of what is sent to a server."""
        wire, world = wire_of(self._compression), runtime.current("ps").world
        on_host = world.hosts[self._job.ranks[server]] == world.hosts[world.rank]
        return Compression.none if wire and on_host and not wire.is_everywhere else self._compression

    def _flush(self) -> None:
        """Begin to send what is in the outbox, when what was sent before has gone."""
        self._wait()
        for server, packed in self._outbox:
            self._sending += messages.send(self._job.channel, self._job.ranks[server], packed)
        self._outbox.clear()

    def _wait(self) -> None:
        while self._sending:
            self._sending.pop().wait()

    def _recover(self) -> None:
        """A rank was lost: push again, to each server, what that has not applied."""
        me = self._job.workers[self.index]
        self._job, said = regrouped(self._job, None)
        self.index, self.count = self._job.workers.index(me), len(self._job.workers)
        self._sending.clear()
        self._outbox.clear()
        for index, server in enumerate(self._job.servers):
            missing = self._pushes - said[server][me]
            self._outbox += [(server, packed[index]) for packed in self._unanswered[-missing:] if missing]


def _numbers_of(what: str, tree: Any) -> dict[str, Any]:
    """NumPy arrays by name; raises InputError, which begins with `what`, for what has no numbers."""
    found = {}
    for name, leaf in trees.named_leaves(tree):
        try:
            found[name] = to_numpy(leaf)
        except (TypeError, ValueError, RuntimeError) as exc:
            raise InputError(f"{what} {name!r}: {exc}") from exc
        if found[name].dtype.kind in NO_NUMBERS:
            raise InputError(f"{what} {name!r} is a {type(leaf).__qualname__} of {found[name].dtype}; expected numbers")
    return found


def _warn_of_tied(parameters: Any, named: dict[str, Any]) -> None:
    """Of arrays that can be changed in place: a functional program may begin with one array for several parameters."""
    changeable = [
        name for name, leaf in trees.named_leaves(parameters) if isinstance(leaf, np.ndarray) or is_torch(leaf)
    ]
    dense = {name: named[name] for name in changeable if named[name].flags.forc}
    if which := in_common(Memory.of(name, each) for name, each in dense.items()):
        JOB.warning(
            f"ps.Worker: parameters {which}, but servers hold an array for each, and step it by its own gradients; "
            "pass tied weights as one parameter"
        )
