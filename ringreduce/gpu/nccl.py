"""NVIDIA's NCCL, through CuPy: an all-reduce that its own kernels do.

    rank 0: unique_id()  ->  sent to all ranks  ->  all ranks: connect()  ->  Nccl.allreduce(), in order

NCCL's sums are its own: it adds in the elements' type in an order of its choice, so that float16 and bfloat16 are
rounded after each addition, and the bits differ from those of the algorithms here. Its Min and Max need not keep a NaN.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from ringreduce.dtypes import ElementType
from ringreduce.errors import CollectiveError, MissingExtraError
from ringreduce.gpu.runtime import Device, Stream, cupy, runtime
from ringreduce.ops import Average, Max, Min, Product, ReduceOp, Sum
from ringreduce.transport import waiting
from ringreduce.transport.base import Steps

ID_BYTES = 128
"""Of what `unique_id` gives."""
INSTEAD = "RINGREDUCE_CUDA_NCCL=0 does without NCCL"

_OPS = {Sum: "SUM", Average: "SUM", Product: "PROD", Min: "MIN", Max: "MAX"}
_LOGICAL_OPS = {Sum: "MAX", Max: "MAX", Product: "MIN", Min: "MIN"}  # "or" and "and" of bytes that are 0 or 1
_ADDITIONS = {Sum: "SUM", Average: "SUM"}
_NUMBERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64")
_COMPLEX_PARTS = {"complex64": "float32", "complex128": "float64"}


class _Form(NamedTuple):
    """How elements and an op are put to NCCL: the ends of its constants' names, and its words an element."""

    dtype: str
    op: str
    words: int = 1


def _form(element: ElementType, op: ReduceOp) -> _Form | None:
    """None where NCCL has no such type or op."""
    if element.kind == "b" and op in _LOGICAL_OPS:
        return _Form("UINT8", _LOGICAL_OPS[op])
    if element.kind == "c" and op in _ADDITIONS:
        return _Form(_COMPLEX_PARTS[element.name].upper(), _ADDITIONS[op], words=2)
    if element.name in _NUMBERS and op in _OPS:
        return _Form(element.name.upper(), _OPS[op])
    return None


def supported(element: ElementType, op: ReduceOp) -> bool:
    """True when NCCL can do this: no 16-bit integers, no Adasum, of complex elements only sums."""
    return _form(element, op) is not None


def shared_gpu(pci_bus_ids: Sequence[str], hosts: Sequence[int]) -> str:
    """Which ranks share a GPU, which NCCL refuses; empty: none. By rank: `Device.pci_bus_id`, the host's number."""
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
    """Why this rank has no NCCL; empty: it has."""
    try:
        binding()
    except (MissingExtraError, ImportError) as exc:
        return str(exc)
    return ""


def unique_id() -> bytes:
    """128 bytes by which the ranks that have them find each other; it makes this process listen for them."""
    module = binding()
    with _errors(module, "no identifier was made"):
        return bytes(each & 0xFF for each in module.get_unique_id())  # signed chars before CuPy 14


def connect(device: Device, size: int, uid: bytes, rank: int) -> Steps[Nccl]:
    """`Nccl(...)` in a thread of its own, since it returns when all ranks have called it: a rank may be lost before."""
    opening = _Opening(lambda: Nccl(device, size, uid, rank), rank)
    yield opening
    return opening.result()


class Nccl:
    """This rank's part of a communicator of `size` ranks, on one GPU. Not for two threads at once.

    uid:    from `unique_id` on one rank.
    Raises: CollectiveError with NCCL's reason; MissingExtraError. It blocks until all ranks have come.
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
        """Raise CollectiveError when something that was queued has failed since, as when a host was lost."""
        with _errors(self._binding, "an all-reduce failed"):
            self._communicator.check_async_error()

    def close(self) -> None:
        """Give it back; every rank must call it, after all that was queued is done."""
        with self.device:
            self._communicator.destroy()

    def abort(self) -> None:
        """Give it back, and end what still waits for other ranks."""
        with self.device:
            self._communicator.abort()


class _Opening:
    """A `Work`: a communicator under way in a thread, which nobody waits for at exit."""

    def __init__(self, start: Callable[[], Nccl], rank: int) -> None:
        self.peer = rank
        self._start = start
        self._future: Future[Nccl] = Future()
        threading.Thread(target=self._run, name="ringreduce NCCL", daemon=True).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._start())
        except BaseException as exc:
            self._future.set_exception(exc)

    def done(self) -> bool:
        """See `Work.done`."""
        return self._future.done()

    def wait(self) -> None:
        """See `Work.wait`."""
        waiting.until(self.done)

    def result(self) -> Nccl:
        """What has come of it."""
        return self._future.result()


@contextlib.contextmanager
def _errors(module: Any, what: str) -> Iterator[None]:
    """Tell NCCL's errors as ours."""
    try:
        yield
    except (module.NcclError, KeyError) as exc:  # KeyError: CuPy has no name for this ncclResult_t
        reason = f"ncclResult_t {exc}" if isinstance(exc, KeyError) else str(exc)
        raise CollectiveError(f"NCCL: {what}: {reason}; NCCL_DEBUG=INFO makes it print why; {INSTEAD}") from exc
