"""`shared.allreduce` by the compiled module: all slots without the GIL; the same slots, flags and bits.

So a rank that has the module may work with one that has not, or that records a timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.collectives.cost_model import is_one_shot
from ringreduce.collectives.ops import Reduction
from ringreduce.transport.base import Steps
from ringreduce.transport.stores import LARGE_BYTES, PLAIN
from ringreduce.transport.window import Region

PATIENCE_US = 200.0  # how long it waits for a flag before the engine looks for other work, which takes it 50 µs
BUDGET_US = 2000.0  # how long it works before what is finished completes


def can(region: Region | None, reduction: Reduction) -> bool:
    """True where the compiled module reduces such elements in this memory."""
    return region is not None and region.can_be_compiled and reduction.compiled is not None


def allreduce(
    sources: Sequence[Any],
    targets: Sequence[Any],
    region: Region,
    reduction: Reduction,
    progress: Callable[[int], Any] = lambda finished: None,
) -> Steps[None]:
    """Reduce arrays, one after the other in the slots, over all ranks of the host.

    Shape:    1-D, contiguous, `reduction.element.storage`; a target may be its source itself.
    progress: called with how many elements, of all, are finished.
    Cost:     as `shared.allreduce`.
    """
    count, itemsize = sum([each.size for each in targets]), reduction.element.itemsize
    nbytes, capacity = count * itemsize, region.piece_bytes(count * itemsize) // itemsize
    alone = count <= capacity and is_one_shot(nbytes, region.size)
    stores = region.stores.of(nbytes) if nbytes >= LARGE_BYTES else None
    way = PLAIN if stores is None else stores.begin()
    numbers: Any = reduction.compiled
    run = region.compiled.allreduce([*sources], [*targets], *numbers, region.sequence, alone, capacity, way)
    region.sequence += -(-count // capacity)
    finished = -1
    while finished < count:
        finished = run.advance(PATIENCE_US, BUDGET_US)
        progress(finished)
        waited_for = run.waits_for()
        if waited_for is not None and not region.arrived(*waited_for):
            yield region.arrival(*waited_for)
    if stores is not None:
        stores.end(run.took() / nbytes)
