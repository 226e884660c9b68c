"""NVIDIA's NCCL, through CuPy: an all-reduce by its own kernels.

    rank 0: unique_id()  ->  sent to all ranks  ->  all ranks: connect()  ->  Nccl.allreduce(), in order

NCCL adds in the elements' type and in its own order, so float16 and bfloat16 are rounded after each addition, and the
bits differ from those of the other algorithms. Its Min and Max need not keep a NaN.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from ringreduce.arrays.dtypes import ElementType
from ringreduce.errors import CollectiveError, MissingExtraError
from ringreduce.gpu.runtime import Device, Stream, cupy, runtime
from ringreduce.ops import Average, Max, Min, Product, ReduceOp, Sum
from ringreduce.transport.base import Steps, Work

INSTEAD = "RINGREDUCE_CUDA_NCCL=0 does without NCCL"

_OPS = {Sum: "SUM", Average: "SUM", Product: "PROD", Min: "MIN", Max: "MAX"}
_LOGICAL_OPS = {Sum: "MAX", Max: "MAX", Product: "MIN", Min: "MIN"}  # "or" and "and" of bytes that are 0 or 1
_NUMBERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
_COMPLEX_PARTS = {"complex64": "float32", "complex128": "float64"}


class _Form(NamedTuple):
    """Elements and an op in NCCL's terms: the ends of its constants' names, and its words per element."""

    dtype: str
    op: str
    words: int = 1


def _form(element: ElementType, op: ReduceOp) -> _Form | None:
    """None where NCCL lacks the type or the op."""
    if element.kind == "b" and op in _LOGICAL_OPS:
        return _Form("UINT8", _LOGICAL_OPS[op])
    if element.kind == "c" and op in (Sum, Average):
        return _Form(_COMPLEX_PARTS[element.name].upper(), "SUM", words=2)
    if element.name in _NUMBERS and op in _OPS:
        return _Form(element.name.upper(), _OPS[op])
    return None


def supported(element: ElementType, op: ReduceOp) -> bool:
    """True when NCCL supports this: no 16-bit integers, no Adasum, only sums of complex elements."""
    return _form(element, op) is not None


def shared_gpu(pci_bus_ids: Sequence[str], hosts: Sequence[int]) -> str:
    """Which ranks share a GPU, which NCCL refuses; empty: none. By rank: `Device.pci_bus_id`, index of the host."""
    ranks_by_gpu: dict[tuple[int, str], list[int]] = {}
    for rank, gpu in enumerate(zip(hosts, pci_bus_ids, strict=True)):
        ranks_by_gpu.setdefault(gpu, []).append(rank)
    for (host, bus_id), ranks in ranks_by_gpu.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} share GPU {bus_id} of host {host}, but NCCL needs one a rank"
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
    opening = _Opening(lambda: Nccl(device, size, uid, rank), rank)
    yield opening
    return opening.future.result()


class Nccl:
    """This rank's part of a communicator of `size` ranks, on one GPU. Not for two threads at once.

    uid:    from `unique_id` on one rank.
    Raises: CollectiveError with NCCL's reason; MissingExtraError. Blocks until all ranks have called it.
    """

    def __init__(self, device: Device, size: int, uid: bytes, rank: int) -> None:
        self.device = device
        self._binding = binding()
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
        form = _form(element, op)
        if form is None:
            raise CollectiveError(f"NCCL has no {op!r} of {element.name} elements; {INSTEAD}")
        dtype = getattr(self._binding, f"NCCL_{form.dtype}")
        nccl_op = getattr(self._binding, f"NCCL_{form.op}")
        with _errors(self._binding, "the all-reduce was not started"), self.device:
            words = count * form.words
            self._communicator.allReduce(pointer, pointer, words, dtype, nccl_op, stream.pointer)

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


class _Opening(Work):
    """A communicator being opened in a daemon thread."""

    def __init__(self, start: Callable[[], Nccl], rank: int) -> None:
        self.peer = rank
        self.future: Future[Nccl] = Future()
        threading.Thread(target=self._run, args=[start], name="ringreduce NCCL", daemon=True).start()

    def _run(self, start: Callable[[], Nccl]) -> None:
        try:
            self.future.set_result(start())
        except BaseException as exc:
            self.future.set_exception(exc)

    def done(self) -> bool:
        """See `Work.done`."""
        return self.future.done()


@contextlib.contextmanager
def _errors(module: Any, what: str) -> Iterator[None]:
    """Raise NCCL's errors as ours."""
    try:
        yield
    except (module.NcclError, KeyError) as exc:  # KeyError: CuPy has no name for this ncclResult_t
        reason = f"ncclResult_t {exc}" if isinstance(exc, KeyError) else str(exc)
        raise CollectiveError(f"NCCL: {what}: {reason}; NCCL_DEBUG=INFO makes it print why; {INSTEAD}") from exc
