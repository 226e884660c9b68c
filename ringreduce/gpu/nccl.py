"""NVIDIA's NCCL, through CuPy: an all-reduce by its own kernels.

    rank 0: unique_id()  ->  sent to all ranks  ->  all ranks: connect()  ->  Nccl.allreduce(), in order

NCCL adds in the elements' type and in its own order, so float16 and bfloat16 are rounded after each addition, and the
bits differ from those of the other algorithms. Its Min and Max need not keep a NaN.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ringreduce.arrays.cuda import Device, Stream, cupy, runtime
from ringreduce.arrays.dtypes import ElementType
from ringreduce.collectives.ops import Average, Max, Min, Product, ReduceOp, Sum
from ringreduce.errors import CollectiveError, MissingExtraError
from ringreduce.gpu.stage import Done
from ringreduce.transport.base import Steps

INSTEAD = "RINGREDUCE_CUDA_NCCL=0 does without NCCL"

_NUMBERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
_TYPES = {name: (name.upper(), 1) for name in _NUMBERS}  # NCCL's name, and how many of these an element is
_TYPES |= {"bool": ("UINT8", 1), "complex64": ("FLOAT32", 2), "complex128": ("FLOAT64", 2)}
_OPS = {Sum: "SUM", Average: "SUM", Product: "PROD", Min: "MIN", Max: "MAX"}
_OPS_BY_KIND = {
    "b": {Sum: "MAX", Max: "MAX", Product: "MIN", Min: "MIN"},  # "or" and "and" of bytes that are 0 or 1
    "c": {Sum: "SUM", Average: "SUM"},
}


def supported(element: ElementType, op: ReduceOp) -> bool:
    """True when NCCL supports this: no 16-bit integers, no Adasum, only sums of complex elements."""
    return element.name in _TYPES and op in _OPS_BY_KIND.get(element.kind, _OPS)


def shared_gpu(pci_bus_ids: Sequence[str], hosts: Sequence[int]) -> str:
    """Which ranks share a GPU, which NCCL refuses; empty: none. By rank: `Device.pci_bus_id`, index of the host."""
    ranks_by_gpu: dict[tuple[int, str], list[int]] = {}
    for rank, gpu in enumerate(zip(hosts, pci_bus_ids, strict=True)):
        ranks_by_gpu.setdefault(gpu, []).append(rank)
    for (host, bus_id), ranks in ranks_by_gpu.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} share GPU {bus_id} of host {host}, but NCCL needs one per rank"
    return ""


def binding() -> Any:
    """CuPy's module of NCCL; raises MissingExtraError when there is no NCCL to load."""
    cupy()
    module = importlib.import_module("cupy.cuda.nccl")
    if not module.available:
        wheel = f"nvidia-nccl-cu{runtime().runtimeGetVersion() // 1000}"
        raise MissingExtraError(f"CuPy finds no NCCL; install it with: pip install {wheel}; {INSTEAD}")
    return module


def why_not() -> str:
    """Why this rank cannot use NCCL; empty: it can."""
    try:
        binding()
    except (MissingExtraError, ImportError) as exc:
        return str(exc)
    return ""


def unique_id() -> bytes:
    """128 bytes by which the ranks find each other; this process listens for the others."""
    module = binding()
    with _errors(module, "no identifier was made"):
        return bytes(each & 0xFF for each in module.get_unique_id())  # signed chars before CuPy 14


def connect(device: Device, size: int, uid: bytes, rank: int) -> Steps[Nccl]:
    """`Nccl(...)` in its own thread, since it returns only when all ranks have called it, and a rank may be lost."""
    from concurrent.futures import Future

    future: Future[Nccl] = Future()

    def run() -> None:
        try:
            future.set_result(Nccl(device, size, uid, rank))
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name="ringreduce NCCL", daemon=True).start()
    yield Done(future, rank)
    return future.result()


class Nccl:
    """This rank's part of a communicator of `size` ranks, on one GPU. Not for two threads at once.

    uid:    from `unique_id` on one rank.
    Raises: CollectiveError with NCCL's reason; MissingExtraError. Blocks until all ranks have called it.
    """

    def __init__(self, device: Device, size: int, uid: bytes, rank: int) -> None:
        self.device = device
        self._binding = binding()
        # it would connect to each rank in the first all-reduce, in the engine's thread, which a lost rank would stop
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        with _errors(self._binding, f"rank {rank} of {size} could not connect"), device:
            try:
                self._communicator = self._binding.NcclCommunicator(size, uid, rank)
            except TypeError:  # before CuPy 14
                signed = tuple(each - 256 if each > 127 else each for each in uid)
                self._communicator = self._binding.NcclCommunicator(size, signed, rank)

    def allreduce(self, pointer: int, count: int, element: ElementType, op: ReduceOp, stream: Stream) -> None:
        """Queue the reduction of `count` elements at a device address, in place; the host does not wait.

        Average is the sum. All ranks must call it in the same order with the same arguments.
        Raises: CollectiveError; see `supported`.
        """
        if not supported(element, op):
            raise CollectiveError(f"NCCL has no {op!r} of {element.name} elements; {INSTEAD}")
        name, words = _TYPES[element.name]
        dtype = getattr(self._binding, f"NCCL_{name}")
        nccl_op = getattr(self._binding, f"NCCL_{_OPS_BY_KIND.get(element.kind, _OPS)[op]}")
        with _errors(self._binding, "the all-reduce was not started"), self.device:
            self._communicator.allReduce(pointer, pointer, count * words, dtype, nccl_op, stream.pointer)

    def check(self) -> None:
        """Raise CollectiveError when a queued operation has failed, for instance because a host was lost."""
        with _errors(self._binding, "an all-reduce failed"):
            self._communicator.check_async_error()

    def close(self) -> None:
        """Destroy it; every rank must call it, after all queued operations are done."""
        with self.device:
            self._communicator.destroy()

    def abort(self) -> None:
        """Destroy it, and stop the kernels that still wait for other ranks."""
        with self.device:
            self._communicator.abort()


@contextlib.contextmanager
def _errors(module: Any, what: str) -> Iterator[None]:
    """Raise NCCL's errors as ours."""
    try:
        yield
    except (module.NcclError, KeyError) as exc:  # KeyError: CuPy has no name for this ncclResult_t
        reason = f"ncclResult_t {exc}" if isinstance(exc, KeyError) else str(exc)
        raise CollectiveError(f"NCCL: {what}: {reason}; NCCL_DEBUG=INFO makes it print why; {INSTEAD}") from exc
