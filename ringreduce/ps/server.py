"""A server: it holds a part of the parameters, and steps them by the gradients that workers push."""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import numpy as np

from ringreduce.arrays.libraries import to_numpy
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import CollectiveError, InputError
from ringreduce.ps import messages
from ringreduce.ps.consistency import Consistency, Gradients, Sync
from ringreduce.ps.layout import Key
from ringreduce.ps.roles import Mode, begin, regrouped, retried
from ringreduce.runtime.submit import whole_number

Rule = Callable[[dict[str, Any], Gradients], Mapping[str, Any] | None]


class Served(NamedTuple):
    """What a server has done by the time all its workers are gone."""

    parameters: dict[str, Any]  # its part, by name
    pushes: int
    nbytes_received: int  # on the wire
    nbytes_sent: int
    most_stale: int  # most pushes that a worker was ahead of another when it pulled; never more than `staleness`


class Server:
    """One of the servers; created on each rank where `is_server()`, while the others make a `Worker`.

    rule:        the optimizer: rule(parameters, gradients) changes the arrays of `parameters` in place and returns
                 None, or returns a dict of new ones, of the same names and shapes. Both are dicts of NumPy arrays by
                 name, of this server's part: whole arrays, and rows of large ones; gradients have the types of the
                 parameters. Called by one thread at a time. `ringreduce.torch.ps_rule` makes one of a torch optimizer.
    mode:        "sync": the mean of all workers' gradients, in step, as a ring does; "async": each as it comes;
                 "ssp": as async, but no worker is more than `staleness` pushes ahead of another when it pulls.
    servers:     how many of the last ranks are servers; by default as `ringrun --servers` says. Equal on all ranks.
    compression: of what is sent, the workers' too: `Compression.fp16`, `.bf16`, or your own `Compressor`; of gradients
                 that workers push from other hosts only: `Compression.int8`, `.int4`.
    place:       makes arrays of the NumPy arrays that come, for a rule of another library: cupy.asarray.

    Raises: InputError (a ValueError) for wrong arguments, and where ranks do not agree; serve() for what a rule returns
            that is no such dict.
    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
    """

    def __init__(
        self,
        rule: Rule,
        mode: Mode = "sync",
        staleness: int | None = None,
        servers: int | None = None,
        compression: AnyCompressor = Compression.none,
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise InputError(f"ps.Server: mode={mode!r}; expected sync, async or ssp")
        if (mode == "ssp") is (staleness is None):
            raise InputError(f"ps.Server: mode={mode!r}, staleness={staleness}; expected 0 or more, and only for ssp")
        staleness = None if staleness is None else whole_number("ps.Server: staleness", staleness, 0)
        self._rule, self._compression, self._place = rule, compression, place or (lambda array: array)
        self._job = begin(servers, compression, mode=mode, staleness=staleness or 0)
        begun = messages.receive(self._job.channel, self._job.workers[0], compression)
        self._keys = [Key(name, each.shape, each.dtype) for name, each in begun.arrays.items()]
        self._parameters = {name: self._place(array.copy()) for name, array in begun.arrays.items()}
        self._kind = type(next(iter(self._parameters.values()), np.empty(0)))
        if mode == "sync":
            self._consistency: Consistency = Sync(self._job.workers, self._apply)
        else:
            bound = math.inf if staleness is None else staleness
            self._consistency = Consistency(self._job.workers, bound, self._apply)
        self._applied = self._received = self._sent = 0
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def serve(self) -> Served:
        """Serve until all workers have closed; returns what was done.

        In an elastic job a worker that is lost is waited for no more.
        Raises: what the rule raises; PeerLostError when a rank is lost, of an elastic job a server.
        """
        retried(self._serve, self._recover)
        return Served(self._parameters, self._applied, self._received, self._sent, self._consistency.most_stale)

    def _serve(self) -> None:
        for worker in self._job.workers:
            context = contextvars.copy_context()  # it holds the rank, in ringreduce.testing
            thread = threading.Thread(target=context.run, args=(self._run, worker), daemon=True)
            thread.name = f"ps-worker-{worker}"
            thread.start()
        lost: BaseException | None = None
        for _ in self._job.workers:  # a lost rank ends the threads of all
            error = self._ended.get()
            if error is not None and not isinstance(error, CollectiveError):
                raise error
            lost = lost or error
        if lost is not None:
            raise lost
        self._job.channel.barrier()

    def _recover(self) -> None:
        self._job, _ = regrouped(self._job, self._consistency.applied())
        self._consistency.resume(self._job.workers)

    def _run(self, worker: int) -> None:
        try:
            while self._answer(worker):
                pass
        except BaseException as exc:  # raised by serve()
            self._consistency.fail(exc)
            self._ended.put(exc)
        else:
            self._ended.put(None)

    def _answer(self, worker: int) -> bool:
        """Do what a worker asks for next; False when it has gone."""
        message = messages.receive(self._job.channel, self._job.ranks[worker], self._compression)
        consistency = self._consistency
        with consistency.changed:
            self._received += message.nbytes
        match message.kind:
            case messages.PUSH:
                consistency.push(worker, message.arrays)
            case messages.PULL:
                self._send(worker)
            case messages.DONE:
                consistency.leave(worker)
        return message.kind != messages.DONE

    def _send(self, worker: int) -> None:
        with self._consistency.changed:
            self._consistency.wait_to_pull(worker)
            arrays = {
                key.name: to_numpy(self._parameters[key.name]).astype(key.dtype, copy=False) for key in self._keys
            }
            packed = messages.pack(messages.REPLY, arrays, self._compression)
            self._sent += sum(each.nbytes for each in packed)
        for handle in messages.send(self._job.channel, self._job.ranks[worker], packed):
            handle.wait()

    def _apply(self, gradients: Gradients) -> None:
        returned = self._rule(self._parameters, {name: self._place(each) for name, each in gradients.items()})
        self._parameters = self._checked(self._parameters if returned is None else returned)
        self._applied += 1

    def _checked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters after a rule; raises InputError for others than there are."""
        if not isinstance(parameters, Mapping):
            raise InputError(
                f"ps.Server: the rule returned a {type(parameters).__qualname__}; expected None, where it changes the "
                "arrays of `parameters` in place, or a dict of new arrays by their names"
            )
        shapes = {name: np.shape(each) for name, each in parameters.items()}
        expected = {key.name: key.shape for key in self._keys}
        for name in {**expected, **shapes} if shapes != expected else ():
            got, of = shapes.get(name, "nothing"), expected.get(name, "nothing")
            if got != of:
                raise InputError(f"ps.Server: parameter {name!r} after the rule: got {got}, expected {of}")
        return {key.name: self._as_held(parameters[key.name], key) for key in self._keys}

    def _as_held(self, array: Any, key: Key) -> Any:
        """In the parameter's type, of the library whose arrays the rule gets; raises InputError for another kind."""
        is_ours = isinstance(array, self._kind)
        if is_ours and self._kind is not np.ndarray:
            return array
        array = to_numpy(array)
        if not np.can_cast(array.dtype, key.dtype, "same_kind"):
            raise InputError(
                f"ps.Server: parameter {key.name!r} after the rule: got {array.dtype}, expected {key.dtype}"
            )
        array = array.astype(key.dtype, copy=False)
        return array if is_ours else self._place(array)
