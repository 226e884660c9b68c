"""A worker: it pulls parameters from all servers and pushes gradients to them."""

from __future__ import annotations

import types
from typing import Any

from ringreduce import runtime, trees
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.ps import messages
from ringreduce.ps.arrays import as_kind, to_numpy
from ringreduce.ps.layout import Key, joined
from ringreduce.ps.roles import agree


class Worker:
    """One of the workers; made on each rank where `is_server()` is False, while the others make a `Server`.

    parameters:  any nesting of dicts, lists, tuples and arrays, equal in form, shapes and types on all workers; the
                 first worker's values are those to start from.
    servers:     as `Server`'s.
    compression: as the servers'.
    index:       this worker's number, from 0; `count`: how many there are.

    Raises: InputError (a ValueError) for wrong arguments, and where ranks do not agree.
    """

    def __init__(
        self, parameters: Any, servers: int | None = None, compression: type[Compressor] = Compression.none
    ) -> None:
        self._tree, self._compression = parameters, compression
        named = {name: to_numpy(leaf) for name, leaf in trees.named_leaves(parameters)}
        self._keys = [Key(name, each.shape, each.dtype) for name, each in named.items()]
        if not self._keys:
            raise InputError("ps.Worker: no parameters; expected arrays, in dicts, lists or tuples")
        self._job = agree(servers, compression, self._keys)
        self.index = self._job.workers.index(runtime.current("ps.Worker").world.rank)
        self.count = len(self._job.workers)
        self._sending: list[Handle] = []
        self._closed = False
        if self.index == 0:
            self._send(messages.BEGIN, named)

    def pull(self) -> Any:
        """The parameters, in new arrays of the kinds that were passed first; waits as the servers' mode says.

        Each server's part is as it was at one moment; between servers moments differ, but in mode sync.
        Cost: all parameters, from each server its part. Raises: PeerLostError when a rank is lost.
        """
        self._send(messages.PULL)
        pieces: dict[str, Any] = {}
        for server in self._job.servers:
            pieces |= messages.receive(self._job.channel, server, self._compression).arrays
        arrays = joined(pieces, self._job.layout, self._keys)
        return trees.map_leaves(self._tree, lambda name, leaf: as_kind(leaf, arrays[name]))

    def push(self, gradients: Any) -> None:
        """Send gradients, a tree of the form and shapes of the parameters; returns at once, they may change again.

        Cost: all gradients, to each server its part. Raises: InputError for another form; PeerLostError.
        """
        arrays = {name: to_numpy(leaf) for name, leaf in trees.named_leaves(gradients)}
        for key in self._keys:
            if key.name not in arrays or arrays[key.name].shape != key.shape:
                what = f"shape {arrays[key.name].shape}" if key.name in arrays else "nothing"
                raise InputError(f"push: gradient {key.name!r}: got {what}, expected shape {key.shape}")
        if len(arrays) > len(self._keys):
            extra = next(name for name in arrays if name not in {key.name for key in self._keys})
            raise InputError(f"push: gradient {extra!r} is of no parameter")
        self._send(messages.PUSH, arrays)

    def close(self) -> None:
        """Tell the servers that this worker has finished, and wait for the others; `with` does so. Idempotent."""
        if not self._closed:
            self._closed = True
            self._send(messages.DONE)
            self._wait()
            self._job.channel.barrier()  # a rank that leaves would end it for all

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: types.TracebackType | None) -> None:
        if kind is None:  # else the servers learn of this rank's end as of any other's
            self.close()

    def _send(self, kind: int, arrays: dict[str, Any] | None = None) -> None:
        """Send each server its part, when the last message has gone."""
        self._wait()
        for server, pieces in zip(self._job.servers, self._job.layout, strict=True):
            parts = {piece.name: piece.of(arrays[piece.key]) for piece in pieces} if arrays is not None else {}
            self._sending += messages.send(self._job.channel, server, kind, parts, self._compression)[0]

    def _wait(self) -> None:
        while self._sending:
            self._sending.pop().wait()
