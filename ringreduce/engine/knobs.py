"""What may change while a job runs: how an all-reduce moves its data. All ranks use the same knobs for one operation.

A process set's coordinator sends new knobs in a response; they count for what that response runs, and all after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ringreduce.collectives.choose import Constants, predict_us
from ringreduce.settings import Settings

AUTO = "auto"
WINDOW = ("shared", "hierarchical")
"""The algorithms that go through shared memory: their slots are `shared_slot_bytes` long."""
HOPELESS = 1.5
"""An algorithm that the cost model thinks so many times slower than the best is not tried."""
MOST_ALGORITHMS = 2
HALVINGS = 4
"""Of slots in shared memory; ..."""
MESSAGE_HALVINGS = 3
"""... and of those for messages, which are tried with several in flight too."""
LEAST_SLOT_BYTES = 64 << 10
MOST_IN_FLIGHT = 3


class Knobs(NamedTuple):
    """The defaults are the settings'."""

    shared_slot_bytes: int
    """Of the region's slots so much is used."""
    fusion_slot_bytes: int
    """Of the fusion buffer's blocks so much is used."""
    algorithm: str = AUTO
    """auto: what the settings ask for, or the cost model; a name: for what is long, see Routes.choice."""
    slots_in_flight: int = 2
    """By messages: one slot is on the wire while the next is packed or summed."""
    origin: str = "default"
    """default, trial (while tuning), tuned, or loaded."""

    @classmethod
    def of(cls, settings: Settings) -> Knobs:
        """Where everything begins."""
        return cls(settings.shared_slot_bytes, settings.fusion_slot_bytes)

    def moves_like(self, other: Knobs) -> bool:
        """True when data moves alike, wherever the knobs come from."""
        return self._replace(origin=other.origin) == other

    def __str__(self) -> str:
        values = " ".join(f"{name}={getattr(self, name)}" for name in self._fields[:-1])
        return f"{values} ({self.origin})"


def candidates(
    settings: Settings, usable: Collection[str], hosts: Sequence[int], nbytes: int, constants: Constants
) -> list[Knobs]:
    """What is worth trying for all-reduces of about `nbytes`, the defaults first.

    usable: the algorithms of Routes.usable;  hosts: of each rank.
    The grid: the algorithms that the cost model does not think hopeless, each with slots by powers of two no longer
    than the memory that was allocated for them, and where messages are used with as many in flight as that has room
    for. An algorithm that is forced, or the only one that sums in rank order, stays. At most 21.
    """
    default = Knobs.of(settings)
    grid = [default]
    for number, algorithm in enumerate(_algorithms(settings, usable, hosts, nbytes, constants)):
        named = default._replace(algorithm=AUTO if number == 0 else algorithm)
        if algorithm in WINDOW:
            grid += [named._replace(shared_slot_bytes=each) for each in _sizes(settings.shared_slot_bytes, HALVINGS)]
        else:
            grid += [
                named._replace(fusion_slot_bytes=each, slots_in_flight=width)
                for each in _sizes(settings.fusion_slot_bytes, MESSAGE_HALVINGS)
                for width in range(1, _most_in_flight(settings, algorithm) + 1)
            ]
    return list(dict.fromkeys(grid))


def _algorithms(
    settings: Settings, usable: Collection[str], hosts: Sequence[int], nbytes: int, constants: Constants
) -> list[str]:
    """What to try, what the settings or the cost model prefer first."""
    if settings.deterministic:
        return ["shared" if "shared" in usable else "direct"]
    if settings.algorithm in usable:
        return [settings.algorithm]
    costs = {each: predict_us(each, nbytes, hosts, constants) for each in usable if each != "mpi"}
    best = min(costs.values())
    hopeful = [each for each in costs if costs[each] <= HOPELESS * best]
    return sorted(hopeful, key=lambda each: costs[each])[:MOST_ALGORITHMS]


def _sizes(allocated: int, halvings: int) -> list[int]:
    """The slot as it was allocated, and by halves what is smaller."""
    least = max(64, min(LEAST_SLOT_BYTES, allocated // 4))
    halves = [(allocated >> power) // 64 * 64 for power in range(1, halvings + 1)]
    return [allocated, *(each for each in halves if each >= least)]


def _most_in_flight(settings: Settings, algorithm: str) -> int:
    """Slots for which the fusion buffer has blocks: a ring takes two for each, one for what comes in."""
    blocks = settings.fusion_buffer_bytes // 2 // settings.fusion_slot_bytes
    return max(1, min(MOST_IN_FLIGHT, blocks // (2 if algorithm in ("ring", "mpi") else 1)))
