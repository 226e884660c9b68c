"""Adasum: a sum that shrinks what two gradients have in common, so that many ranks do not make too large a step.

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Orthogonal gradients are added, equal ones averaged. Ranks are combined in pairs, pairs of pairs and so on (recursive
doubling), so their number is a power of two.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ringreduce.collectives.partition import segments
from ringreduce.collectives.tree import SEGMENT_BYTES
from ringreduce.transport.base import Steps, Transport

TAG = 5
BLOCK = 1 << 16  # elements converted to float64 at a time


def allreduce(flat: Any, transport: Transport, segment_bytes: int = SEGMENT_BYTES) -> Steps[None]:
    """Combine one tensor of all ranks, in place; every rank gets the same bits.

    Shape:  (count,), contiguous, NumPy, float32, float64 or complex; equal counts, size a power of two.
    Cost:   log2(size) messages a rank, each of all elements, cut into segments. Memory: as much as `flat` again.
    Source: Maleki et al., "Scaling distributed training with adaptive summation", 2021.
    """
    theirs = np.empty_like(flat)
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
    """Adasum of two vectors, (count,) each, in float64, scaled to elements of about 1 so that no square overflows."""
    result = np.empty_like(a)
    blocks = segments(0, a.size, BLOCK)
    dot = a_squared = b_squared = 0.0
    with np.errstate(all="ignore"):  # infinities and overflows belong to the data
        scale_a, scale_b = _scale(a), _scale(b)
        for low, high in blocks:
            one, other = _wide(a[low:high]) / scale_a, _wide(b[low:high]) / scale_b
            dot += _dot(one, other)
            a_squared += _dot(one, one)
            b_squared += _dot(other, other)
        of_a, of_b = (dot / (2 * a_squared), dot / (2 * b_squared)) if dot else (0.0, 0.0)
        for low, high in blocks:
            one, other = _wide(a[low:high]), _wide(b[low:high])
            one -= one / scale_a * of_a * scale_b
            other -= other / scale_b * of_b * scale_a
            result[low:high] = one + other
    return result


def _scale(vector: Any) -> float:
    """The power of two just below the largest element; 1 where that is 0, infinite or NaN."""
    largest = float(np.absolute(vector).max()) if vector.size else 0.0
    return math.ldexp(0.5, math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0


def _wide(part: Any) -> Any:
    return part.astype(np.promote_types(part.dtype, np.float64))


def _dot(a: Any, b: Any) -> float:
    return float((a * b.conj()).real.sum())
