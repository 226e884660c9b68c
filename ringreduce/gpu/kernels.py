"""The GPU's kernels (kernels.cu): compiled at first use, and launched, once for all tensors of a slot.

    Table      the pieces' positions in a slot, cut into tiles; fixed for a plan, so it is uploaded once
    addresses  the pieces' addresses in memory, uploaded when they change, which gradients' seldom do

An upload belongs to one stream: only later work of that stream reuses its memory, after everything that has read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringreduce.gpu.runtime import Block, Device, PinnedPool, Stream, cupy
from ringreduce.ops import Average, Max, Min, Product, Reduction, Sum

SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17", "--fmad=false")
THREADS = 256  # threads of a block
TILE_BYTES = 8 << 10  # what a block processes at a time: two words of 16 bytes a thread
WORD_BYTES = 16  # the most that a thread reads at once; chunks, and the pieces in a slot, start at multiples of it
MOST_BLOCKS = 1 << 16  # of a launch; with more tiles, a block processes several
KEPT = 256  # tables, and lists of addresses, cached for each stream
_SLAB_BYTES = 1 << 20
_OPS = {Sum: "Sum", Average: "Sum", Min: "Min", Max: "Max", Product: "Product"}


class Variant(NamedTuple):
    """What kernels.cu is compiled for."""

    element: str = ""  # a name of the table of element types; empty for copies, which need no type
    partial: str = ""  # the type of partial results
    op: str = ""  # empty for load and store

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options."""
        named = zip(("ELEMENT", "PARTIAL", "OP"), self, strict=True)
        return (*OPTIONS, *(f"-D{name}={value}" for name, value in named if value))

    def name(self, kernel: str) -> str:
        """The name of `kernel` in the compiled code.

        >>> Variant("float16", "float32", "Sum").name("reduce")
        'reduce_Sum_float16_float32'
        """
        return "_".join(filter(None, [kernel, self.op, self.element, self.partial]))


COPIES = Variant()


def tiles(starts: Sequence[int], counts: Sequence[int], length: int) -> np.ndarray[Any, Any]:
    """Cut pieces into tiles of at most `length` elements: rows of piece, first element of it, start in the slot, count.

    >>> tiles([0, 8], [5, 2], 4).tolist()
    [[0, 0, 0, 4], [0, 4, 4, 1], [1, 0, 8, 2]]
    """
    of = np.asarray(counts, np.int64)
    numbers = -(-of // length)
    piece = np.repeat(np.arange(len(of)), numbers)
    first = (np.arange(len(piece)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * length
    start = np.asarray(starts, np.int64)[piece] + first
    return np.column_stack([piece, first, start, np.minimum(of[piece] - first, length)]).astype(np.int32)


def divisor(reduction: Reduction) -> int:
    """What the sum is divided by."""
    return reduction.size if reduction.op is Average else 1


class _Upload:
    """Values in GPU memory, which returns to the stream's free list when this is garbage-collected."""

    __slots__ = ("_free", "pointer")

    def __init__(self, pointer: int, free: list[int]) -> None:
        self.pointer = pointer
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.pointer)


class Table:
    """The pieces of a slot in the kernels' format, made by `Kernels.table` for the launches of one stream."""

    __slots__ = ("_upload", "itemsize", "pointer", "tile_count")

    def __init__(self, upload: _Upload, tile_count: int, itemsize: int) -> None:
        self._upload = upload
        self.pointer = upload.pointer
        self.tile_count = tile_count
        self.itemsize = itemsize


class _Memory:
    """The tables and addresses that one stream's kernels read; the last used ones are cached."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pinned = PinnedPool()
        self._free: dict[int, list[int]] = {}
        self._blocks: list[Block] = []
        self.table = functools.lru_cache(KEPT)(self._table)
        self.addresses = functools.lru_cache(KEPT)(self._addresses)

    def _table(self, starts: tuple[int, ...], counts: tuple[int, ...], itemsize: int) -> Table:
        cut = tiles(starts, counts, TILE_BYTES // itemsize)
        return Table(self._upload(cut.reshape(-1)), len(cut), itemsize)

    def _addresses(self, pointers: tuple[int, ...]) -> _Upload:
        return self._upload(np.array(pointers, np.uint64))

    def _upload(self, values: np.ndarray[Any, Any]) -> _Upload:
        nbytes = max(256, 1 << (values.nbytes - 1).bit_length())
        free = self._free.setdefault(nbytes, [])
        if not free:
            block = Block(self._stream.device, max(nbytes, _SLAB_BYTES))
            self._blocks.append(block)
            free += range(block.pointer, block.pointer + block.nbytes, nbytes)
        upload = _Upload(free.pop(), free)
        if values.nbytes:
            self._pinned.upload(values, upload.pointer, self._stream)
        return upload

    def free(self) -> None:
        for block in self._blocks:
            block.free()


class Kernels:
    """The kernels of one GPU; for one thread. Each method queues one launch in `stream`, and waits for nothing.

    slot, target   the address of memory laid out as in the table, aligned to 16 bytes
    pointers       the addresses of the pieces, in the table's order; aligned to their elements, better to 16 bytes
    wide           True: the slot has elements of `reduction.sum_type`; False: of `reduction.element.storage`
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memories: dict[Stream, _Memory] = {}
        self._compiled = functools.cache(self._compile)

    def table(self, starts: Sequence[int], counts: Sequence[int], itemsize: int, stream: Stream) -> Table:
        """The table of pieces of `counts` elements of `itemsize` bytes in a slot, for launches in this stream.

        starts: elements of the slot, each a multiple of 16 bytes.  Cost: an upload, unless it is cached.
        """
        return self._memory(stream).table(tuple(starts), tuple(counts), itemsize)

    def gather(self, table: Table, pointers: Sequence[int], slot: int, stream: Stream) -> None:
        """Copy pieces into a slot."""
        pieces = self._memory(stream).addresses(tuple(pointers))
        self._on_tiles(COPIES, "gather", table, (table.itemsize, pieces.pointer, slot), stream)

    def scatter(self, table: Table, slots: Sequence[int], chunk: int, pointers: Sequence[int], stream: Stream) -> None:
        """Copy pieces from several slots: element e from `slots[e // chunk]`, where its index is e too.

        chunk: elements, a multiple of 16 bytes.
        """
        memory = self._memory(stream)
        owners, pieces = memory.addresses(tuple(slots)), memory.addresses(tuple(pointers))
        arguments = table.itemsize, owners.pointer, chunk * table.itemsize, pieces.pointer
        self._on_tiles(COPIES, "scatter", table, arguments, stream)

    def load(
        self, table: Table, pointers: Sequence[int], slot: int, reduction: Reduction, stream: Stream, *, wide: bool
    ) -> None:
        """Copy prescaled pieces into a slot."""
        pieces = self._memory(stream).addresses(tuple(pointers))
        name = "load_wide" if wide else "load"
        self._on_tiles(_converting(reduction), name, table, (pieces.pointer, slot, float(reduction.prescale)), stream)

    def store(
        self, table: Table, slot: int, pointers: Sequence[int], reduction: Reduction, stream: Stream, *, wide: bool
    ) -> None:
        """Copy reduced pieces from a slot: divided, postscaled, rounded."""
        pieces = self._memory(stream).addresses(tuple(pointers))
        name = "store_wide" if wide else "store"
        arguments = slot, pieces.pointer, divisor(reduction), float(reduction.postscale)
        self._on_tiles(_converting(reduction), name, table, arguments, stream)

    def reduce(self, reduction: Reduction, sources: Sequence[int], target: int, count: int, stream: Stream) -> None:
        """As `Reduction.reduce_parts`; the bits may differ from the host's for subnormal numbers and complex products.

        Shape: `count` elements of `reduction.element.storage` at each address; `target` may be one of the sources.
        """
        listed = self._memory(stream).addresses(tuple(sources))
        is_aligned = all(address % WORD_BYTES == 0 for address in (target, *sources))
        scales = float(reduction.prescale), divisor(reduction), float(reduction.postscale)
        arguments = listed.pointer, len(sources), target, count, int(is_aligned), *scales
        variant = Variant(reduction.element.name, str(reduction.sum_type), _OPS[reduction.op])
        blocks = -(-count * reduction.element.itemsize // TILE_BYTES)
        self._launch(variant, "reduce", blocks, arguments, stream)

    def forget(self, streams: Sequence[Stream]) -> None:
        """Free the memory of streams, whose tables must not be used any more."""
        for stream in streams:
            if stream in self._memories:
                self._memories.pop(stream).free()

    def free(self) -> None:
        """Free the memory, after which no table may be used; like cudaFree it waits for the device's work."""
        self.forget(list(self._memories))

    def _memory(self, stream: Stream) -> _Memory:
        if stream not in self._memories:
            self._memories[stream] = _Memory(stream)
        return self._memories[stream]

    def _on_tiles(
        self, variant: Variant, kernel: str, table: Table, arguments: tuple[float, ...], stream: Stream
    ) -> None:
        self._launch(variant, kernel, table.tile_count, (table.pointer, table.tile_count, *arguments), stream)

    def _launch(self, variant: Variant, kernel: str, blocks: int, arguments: tuple[float, ...], stream: Stream) -> None:
        if blocks:
            with self._device, stream:
                self._compiled(variant, kernel)((min(blocks, MOST_BLOCKS),), (THREADS,), arguments)

    def _compile(self, variant: Variant, kernel: str) -> Callable[..., None]:
        module = cupy().RawModule(code=SOURCE.read_text(), options=variant.options)
        compiled: Callable[..., None] = module.get_function(variant.name(kernel))
        return compiled


def _converting(reduction: Reduction) -> Variant:
    return Variant(reduction.element.name, str(reduction.sum_type))
