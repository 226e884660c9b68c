"""Adasum: a sum that shrinks what two gradients have in common, so that many ranks do not take too large a step.

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Orthogonal gradients are added, equal ones averaged. Ranks are combined in pairs, pairs of pairs and so on (recursive
doubling), so their number is a power of two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce import buffers
from ringreduce.collectives.tree import SEGMENT_BYTES
from ringreduce.partition import segments
from ringreduce.transport.base import Steps, Transport

TAG = 5


def allreduce(flat: Any, transport: Transport, segment_bytes: int = SEGMENT_BYTES) -> Steps[None]:
    """Combine one tensor of all ranks, in place; every rank gets the same bits.

    Shape:  (count,), contiguous, NumPy or CuPy, float32, float64 or complex; equal counts, size a power of two.
    Cost:   log2(size) messages a rank, each of all elements, cut into segments. Memory: as much as `flat` again.
    Source: Maleki et al., "Scaling distributed training with adaptive summation", 2021.
    """
    theirs = buffers.empty_like(flat, flat.size, flat.dtype)
    pieces = segments(0, flat.size, max(1, segment_bytes // flat.itemsize))
    distance = 1
    while distance < transport.size:
        partner = transport.rank ^ distance
        under_way = [transport.receive(theirs[low:high], partner, TAG) for low, high in pieces]
        yield from [*under_way, *(transport.send(flat[low:high], partner, TAG) for low, high in pieces)]
        lower, upper = (flat, theirs) if transport.rank < partner else (theirs, flat)
        flat[...] = combine(lower, upper)  # the same order on both, so the same bits
        distance *= 2


def combine(a: Any, b: Any) -> Any:
    """Adasum of two vectors, (count,) each; dot products are made in float64."""
    dot, a_squared, b_squared = (_dot(a, b), _dot(a, a), _dot(b, b))
    of_a = 1.0 - (dot / (2 * a_squared) if a_squared > 0 else 0.0)
    of_b = 1.0 - (dot / (2 * b_squared) if b_squared > 0 else 0.0)
    return a * a.dtype.type(of_a) + b * b.dtype.type(of_b)


def _dot(a: Any, b: Any) -> float:
    return float((a * b.conj()).real.sum(dtype=np.float64))
