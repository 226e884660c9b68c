"""The fused all-reduce in its simplest form, as a peer: no engine, no names, two MPI barriers a slot, float32 sums.

Each rank packs a slot of shared memory, sums its chunk out of the others' slots, and copies the others' chunks out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import neutral

SLOTS = 2  # a rank may fill one while a slow peer still reads the other
SLOT_BYTES = {2: 1 << 20}  # with so many ranks; with more the caches hold less of each
USUAL_SLOT_BYTES = 512 << 10
Piece = tuple[int, Any]


def fused_window(tensors: Sequence[Any]) -> Callable[[], None]:
    """An all-reduce of flat tensors, in place."""
    from mpi4py import MPI

    comm = neutral()
    length = SLOT_BYTES.get(comm.size, USUAL_SLOT_BYTES) // 4
    window = MPI.Win.Allocate_shared(4 * length * SLOTS, 4, comm=comm)
    memory = [np.frombuffer(window.Shared_query(k)[0], np.float32) for k in range(comm.size)]
    peers = [each[: length * SLOTS].reshape(SLOTS, length) for each in memory]
    slots = _plan(tensors, length)

    def run() -> None:
        for number, (count, pieces) in enumerate(slots):
            _allreduce([each[number % SLOTS] for each in peers], count, pieces, comm)

    return run


def _plan(tensors: Sequence[Any], length: int) -> list[tuple[int, list[Piece]]]:
    """By slot: the elements used, and where each piece of a tensor begins."""
    slots: list[tuple[int, list[Piece]]] = []
    pieces: list[Piece] = []
    fill = 0
    for tensor in tensors:
        start = 0
        while start < tensor.size:
            take = min(length - fill, tensor.size - start)
            pieces.append((fill, tensor[start : start + take]))
            fill, start = fill + take, start + take
            if fill == length:
                slots.append((fill, pieces))
                pieces, fill = [], 0
    return [*slots, (fill, pieces)] if pieces else slots


def _allreduce(slots: Sequence[Any], count: int, pieces: Sequence[Piece], comm: Any) -> None:
    rank, size = comm.rank, comm.size
    bounds = [count * k // size for k in range(size + 1)]
    for offset, piece in pieces:
        slots[rank][offset : offset + piece.size] = piece
    comm.Barrier()
    low, high = bounds[rank], bounds[rank + 1]
    chunk = slots[rank][low:high]
    for k in range(1, size):
        np.add(chunk, slots[(rank + k) % size][low:high], out=chunk)
    comm.Barrier()
    for offset, piece in pieces:
        for k in range(size):
            low, high = max(offset, bounds[k]), min(offset + piece.size, bounds[k + 1])
            if low < high:
                piece[low - offset : high - offset] = slots[k][low:high]
