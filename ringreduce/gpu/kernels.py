"""The GPU's kernels (kernels.cu): compiled at first use, and launched, once for all tensors of a slot.

Table      the pieces' positions in a slot, cut into tiles; fixed for a plan, so it is uploaded once
addresses  the pieces' addresses in memory, uploaded when they change, which gradients' seldom do
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays.cuda import Device, Stream, cupy
from ringreduce.collectives.ops import Average, Max, Min, Product, Reduction, Sum

SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17", "--fmad=false")
THREADS = 256  # threads of a block
TILE_BYTES = 8 << 10  # what a block processes at a time: two words of 16 bytes a thread
WORD_BYTES = 16  # the most that a thread reads at once; chunks, and the pieces in a slot, start at multiples of it
MOST_BLOCKS = 1 << 16  # of a launch; with more tiles, a block processes several
KEPT = 512  # tables, and lists of addresses, that are cached
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


class Table(NamedTuple):
    """The pieces of a slot in the kernels' format, made by `Kernels.table` for the launches of one stream."""

    tiles: Any  # CuPy array
    itemsize: int


def _uploaded_table(starts: tuple[int, ...], counts: tuple[int, ...], itemsize: int, stream: Stream) -> Table:
    return Table(stream.upload(tiles(starts, counts, TILE_BYTES // itemsize)), itemsize)


def _uploaded_addresses(pointers: tuple[int, ...], stream: Stream) -> Any:
    return stream.upload(np.array(pointers, np.uint64))


class Kernels:
    """The kernels of one GPU; for one thread. Each method queues one launch in `stream`, and waits for nothing.

    slot, target   the address of memory laid out as in the table, aligned to 16 bytes
    pointers       the addresses of the pieces, in the table's order; aligned to their elements, better to 16 bytes
    wide           True: the slot has elements of `reduction.sum_type`; False: of `reduction.element.storage`
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tables = functools.lru_cache(KEPT)(_uploaded_table)
        self._addresses = functools.lru_cache(KEPT)(_uploaded_addresses)
        self._compiled = functools.cache(self._compile)

    def table(self, starts: Sequence[int], counts: Sequence[int], itemsize: int, stream: Stream) -> Table:
        """The table of pieces of `counts` elements of `itemsize` bytes in a slot, for launches in this stream.

        starts: elements of the slot, each a multiple of 16 bytes.  Cost: an upload, unless it is cached.
        """
        return self._tables(tuple(starts), tuple(counts), itemsize, stream)

    def gather(self, table: Table, pointers: Sequence[int], slot: int, stream: Stream) -> None:
        """Copy pieces into a slot."""
        pieces = self._addresses(tuple(pointers), stream)
        self._on_tiles(COPIES, "gather", table, (table.itemsize, pieces.data.ptr, slot), stream)

    def scatter(self, table: Table, slots: Sequence[int], chunk: int, pointers: Sequence[int], stream: Stream) -> None:
        """Copy pieces from several slots: element e from `slots[e // chunk]`, where its index is e too.

        chunk: elements, a multiple of 16 bytes.
        """
        owners, pieces = self._addresses(tuple(slots), stream), self._addresses(tuple(pointers), stream)
        arguments = table.itemsize, owners.data.ptr, chunk * table.itemsize, pieces.data.ptr
        self._on_tiles(COPIES, "scatter", table, arguments, stream)

    def load(
        self, table: Table, pointers: Sequence[int], slot: int, reduction: Reduction, stream: Stream, *, wide: bool
    ) -> None:
        """Copy prescaled pieces into a slot."""
        pieces = self._addresses(tuple(pointers), stream)
        name = "load_wide" if wide else "load"
        self._on_tiles(_converting(reduction), name, table, (pieces.data.ptr, slot, float(reduction.prescale)), stream)

    def store(
        self, table: Table, slot: int, pointers: Sequence[int], reduction: Reduction, stream: Stream, *, wide: bool
    ) -> None:
        """Copy reduced pieces from a slot: divided, postscaled, rounded."""
        pieces = self._addresses(tuple(pointers), stream)
        name = "store_wide" if wide else "store"
        arguments = slot, pieces.data.ptr, reduction.divisor, float(reduction.postscale)
        self._on_tiles(_converting(reduction), name, table, arguments, stream)

    def reduce(self, reduction: Reduction, sources: Sequence[int], target: int, count: int, stream: Stream) -> None:
        """As `Reduction.reduce_parts`; the bits may differ from the host's for subnormal numbers and complex products.

        Shape: `count` elements of `reduction.element.storage` at each address; `target` may be one of the sources.
        """
        listed = self._addresses(tuple(sources), stream)
        is_aligned = all(address % WORD_BYTES == 0 for address in (target, *sources))
        scales = float(reduction.prescale), reduction.divisor, float(reduction.postscale)
        arguments = listed.data.ptr, len(sources), target, count, int(is_aligned), *scales
        variant = Variant(reduction.element.name, str(reduction.sum_type), _OPS[reduction.op])
        blocks = -(-count * reduction.element.itemsize // TILE_BYTES)
        self._launch(variant, "reduce", blocks, arguments, stream)

    def _on_tiles(
        self, variant: Variant, kernel: str, table: Table, arguments: tuple[float, ...], stream: Stream
    ) -> None:
        count = len(table.tiles)
        self._launch(variant, kernel, count, (table.tiles.data.ptr, count, *arguments), stream)

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
