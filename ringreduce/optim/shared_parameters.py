"""Parameters that all ranks of one host have in the same memory, so that a step's allgather is nothing but a barrier.

    rank 0   forward, backward │ steps its pieces          │ forward
    rank 1   forward, backward │             steps its own │ forward
                    all have read                 all have written

Parameters change between the two barriers only, and each rank writes its own pieces only: the elements that two ranks
write never meet. That gradients are reduced is not enough for the first barrier: a rank gives its last gradient while
its backward may read parameters for others, and the user may read them, as to log norms, until they call step().

The memory is a file that never has a name, so whatever kills a rank leaves nothing.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.control import barrier_async
from ringreduce.api.objects import allgather_object
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.optim.exchange import Exchange
from ringreduce.transport.blocks import SHARED_MEMORY, SharedFile, mapped

ALIGNMENT = 64
OPTION = "ShardedOptimizer(shared_parameters=True)"


class SharedParameters:
    """What the ranks of an exchange, which are on one host, do with the memory of their parameters."""

    def __init__(self, exchange: Exchange) -> None:
        self._set, self._world = exchange.process_set, runtime.current(OPTION).world

    def barrier(self, waits: bool = True) -> Handle:
        """Begin to wait for all ranks; raises InputError where they may not be those any more that have the memory."""
        if runtime.current(OPTION).world is not self._world:
            raise InputError(f"{OPTION}: the ranks have changed; create the model and its optimizer again")
        return barrier_async(self._set, waits=waits)

    def move(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The first rank's arrays, which lie apart, in memory that all ranks share; all ranks must call it.

        Raises: InputError on all ranks where they are on several hosts, where there is not so much memory, and where
                one has other names, types or shapes.
        """
        arrays = dict(sorted(arrays.items()))  # ranks may have them in another order
        if not all(isinstance(each, np.ndarray) for each in arrays.values()):
            raise InputError(f"{OPTION}: expected NumPy arrays")
        counts = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in arrays.values()]
        kinds = {name: f"{each.dtype}{list(each.shape)}" for name, each in arrays.items()}
        parts = zip(np.split(self._memory(sum(counts) or 1, kinds), np.cumsum(counts)), arrays.items(), strict=False)
        moved = {name: part[: each.nbytes].view(each.dtype).reshape(each.shape) for part, (name, each) in parts}
        for name in moved if self._set.rank() == 0 else ():
            moved[name][...] = arrays[name]
        self.barrier().wait()
        return moved

    def _memory(self, nbytes: int, kinds: dict[str, str]) -> Any:
        file, shared_file, memory, why = -1, None, None, ""
        try:
            if self._set.rank() == 0:
                file = os.open(SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR, 0o600)
                os.posix_fallocate(file, 0, nbytes)
                shared_file = SharedFile.of(file)
        except OSError as exc:
            why = f"{SHARED_MEMORY} has no {nbytes / 1e6:.1f} MB ({exc.strerror}); enlarge it (docker run --shm-size=…)"
        found = allgather_object((self._world.hosts[self._world.rank], shared_file, why, kinds), process_set=self._set)
        if len({host for host, *_ in found}) > 1:
            why = "the ranks are on several hosts; expected one, whose memory they share"
        for number, (*_, theirs) in enumerate(found):
            why = why or _difference(found[0][-1], theirs, number)
        try:
            memory = mapped(found[0][1], nbytes) if found[0][1] else None
        except OSError as exc:
            why = why or str(exc)
        whys = allgather_object(why, process_set=self._set)
        if file >= 0:
            os.close(file)
        if any(whys):
            raise InputError(f"{OPTION}: {next(filter(None, whys))}")
        return memory


def _difference(first: dict[str, str], theirs: dict[str, str], rank: int) -> str:
    for name in {**first, **theirs}:
        ours, other = first.get(name, "missing"), theirs.get(name, "missing")
        if ours != other:
            return f"parameter {name!r} is {other} on rank {rank}, {ours} on rank 0; expected the same on all ranks"
    return ""
