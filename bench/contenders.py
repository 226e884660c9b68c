"""Who takes part when one buffer is reduced: all of ours, and the peers that this machine has.

`contenders` is the one place that knows them. Each is a function that changes a NumPy array, in place, to the sum over
all ranks. A peer that is not installed is left out, and `missing` says so.

Horovod stands apart: from its init() on its thread polls, and costs the others time. So it is measured after them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from common import neutral

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.dtypes import element_type
from ringreduce.collectives import direct, doubling, halving, hierarchical, ring, shared
from ringreduce.collectives.ops import Reduction
from ringreduce.execution.algorithms import Algorithms
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.transport.base import Steps, complete

Contender = Callable[[np.ndarray[Any, Any]], object]
PUBLIC, ORDERED, MPI_NAME, GLOO, HOROVOD = "allreduce_", "ordered()", "MPI_Allreduce", "torch gloo", "Horovod"
RING = "torch ring"
BY_HAND = "by hand"
DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16")


def contenders(dtype: str) -> dict[str, Contender]:
    """Everybody who can be measured side by side in one process."""
    channel = rr.ordered()
    found = {
        **algorithms(dtype),
        PUBLIC: lambda array: rr.allreduce_(array, op=rr.Sum),
        ORDERED: lambda array: channel.allreduce_(array, op=rr.Sum),
    }
    from mpi4py import MPI

    if dtype != "bfloat16":  # which MPI has not
        found[MPI_NAME] = lambda array: neutral().Allreduce(MPI.IN_PLACE, array)
    if has("torch"):
        found[GLOO] = gloo_allreduce
        if dtype not in ("float16", "bfloat16"):
            found[RING] = ring_allreduce
    return found


def algorithms(dtype: str) -> dict[str, Contender]:
    """Our algorithms, called directly: without the engine, without agreeing on anything before.

    An algorithm that the product gains is added here, and nowhere else in bench/. They use the engine's own memory and
    channels, so nothing else may be under way.
    """
    algorithms = global_algorithms()
    segment_bytes = algorithms.segment_bytes
    region, hierarchy, channel = algorithms.region, algorithms.hierarchy, algorithms.channels[0]
    reduction = Reduction(rr.Sum, element_type(element_dtype(dtype)), rr.size())
    steps: dict[str, Callable[[np.ndarray[Any, Any]], Steps[None]]] = {
        "ring": lambda array: ring.allreduce(array, channel, reduction, segment_bytes),
        "halving": lambda array: halving.allreduce(array, channel, reduction, segment_bytes),
        "direct": lambda array: direct.allreduce(array, channel, reduction, segment_bytes),
        "doubling": lambda array: doubling.allreduce(array, channel, reduction),
    }
    if region is not None and "shared" in algorithms.usable:
        steps["shared"] = lambda array: shared.allreduce(slots(array, region.slot_bytes), region, reduction)
    if region is not None and hierarchy is not None:
        steps["hierarchical"] = lambda array: hierarchical.allreduce(
            slots(array, algorithms.unit_bytes), region, hierarchy, reduction, segment_bytes
        )
    storage = reduction.element.storage  # bfloat16 is held as 16 bits
    return {name: lambda array, start=start: complete(start(array.view(storage))) for name, start in steps.items()}


def global_algorithms() -> Algorithms:
    """Those of the set of all ranks, with the engine's own memory and channels."""
    return runtime.current("bench").engine.states[GLOBAL].algorithms


def by_hand(array: np.ndarray[Any, Any]) -> None:
    """What a user of mpi4py writes: all send to rank 0, and it to all. The fewest messages, in blocking calls."""
    comm = neutral()
    if comm.rank:
        comm.Send(array, 0)
        comm.Recv(array, 0)
        return
    other = np.empty_like(array)
    for rank in range(1, comm.size):
        comm.Recv(other, rank)
        array += other
    for rank in range(1, comm.size):
        comm.Send(array, rank)


def slots(array: np.ndarray[Any, Any], nbytes: int) -> list[list[shared.BufferPair]]:
    """The array in pieces of so many bytes; each is reduced in place."""
    length = nbytes // array.itemsize
    pieces = (array[low : low + length] for low in range(0, array.size, length))
    return [[shared.BufferPair(piece, piece)] for piece in pieces]


def gloo_allreduce(array: np.ndarray[Any, Any]) -> None:
    """What a PyTorch user without GPUs has."""
    import torch

    start_gloo()
    torch.distributed.all_reduce(as_torch(array))


def ring_allreduce(array: np.ndarray[Any, Any]) -> None:
    """The same over the backend "ring"."""
    import torch

    start_gloo()
    torch.distributed.all_reduce(as_torch(array), group=ring_group())


def as_torch(array: np.ndarray[Any, Any]) -> Any:
    """The same memory as a tensor; NumPy's bfloat16 is not known to torch.from_numpy."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def element_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of that name; bfloat16 is ml_dtypes' own."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@functools.cache
def start_gloo() -> None:
    """torch.distributed on all ranks, once; RINGBENCH_ADDRESS is rank 0's where ranks are on several hosts."""
    import torch

    comm = neutral()
    address = os.environ.get("RINGBENCH_ADDRESS", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if address == "127.0.0.1" else "eth0")
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    port = comm.bcast(port)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=comm.rank, world_size=comm.size
    )


@functools.cache
def ring_group() -> Any:
    """All ranks once more, over the torch.distributed backend "ring"."""
    import torch

    import ringreduce.torch.distributed  # noqa: F401

    return torch.distributed.new_group(backend="ring")


def stop_gloo() -> None:
    """End what `start_gloo` started, if it did."""
    if start_gloo.cache_info().currsize:
        import torch

        torch.distributed.destroy_process_group()
        ring_group.cache_clear()
        start_gloo.cache_clear()


def horovod(dtype: str) -> dict[str, Contender]:
    """Horovod alone, started; empty where it is not installed."""
    if not has("horovod"):
        return {}
    import horovod.torch as hvd

    hvd.init()
    return {HOROVOD: lambda array: hvd.allreduce_(as_torch(array), op=hvd.Sum, name=f"buffer.{array.size}")}


def has(package: str) -> bool:
    """True when it can be imported: no mere folder of that name, as examples/ has one."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def missing() -> str:
    """Which peers are left out, for the header."""
    absent = [peer for package, peer in (("torch", GLOO), ("horovod", HOROVOD)) if not has(package)]
    return f"; not installed, so left out: {', '.join(absent)}" if absent else ""
