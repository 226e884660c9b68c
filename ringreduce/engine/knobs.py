"""What may change while a job runs: how an all-reduce moves its data. All ranks use the same knobs for one operation.

A process set's coordinator sends new knobs in a response; they count for what that response runs, and all after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ringreduce.collectives.choose import MANY, Constants, choose, predict_us
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
    settings: Settings, algorithms: Collection[str], hosts: Sequence[int], nbytes: int, constants: Constants
) -> list[Knobs]:
    """What is worth trying for all-reduces of about `nbytes`, the defaults first; 25 at most.

    algorithms: those of Routes.candidates;  hosts: of each rank.
    The grid: the algorithms that the cost model does not think hopeless, each with slots by powers of two no longer
    than the memory that was allocated for them, and where messages are used with as many in flight as that has room
    for. In shared memory of one host no message is tried: messages there are made of shared memory.
    """
    default = Knobs.of(settings)
    grid = [default]
    for number, algorithm in enumerate(_hopeful(algorithms, hosts, nbytes, constants)):
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


def _hopeful(algorithms: Collection[str], hosts: Sequence[int], nbytes: int, constants: Constants) -> list[str]:
    """Those to try; first what the settings or the cost model take for such all-reduces."""
    first = choose(nbytes, nbytes, hosts, algorithms, constants) if len(algorithms) > 1 else next(iter(algorithms))
    if first == "shared":
        return [first]
    most_us = HOPELESS * predict_us(first, nbytes, hosts, constants)
    costs = {each: predict_us(each, nbytes, hosts, constants) for each in algorithms if each not in ("mpi", first)}
    others = sorted((each for each in costs if costs[each] <= most_us), key=lambda each: costs[each])
    if len(hosts) > MANY:
        others = [each for each in others if each != "direct"]
    return [first, *others][:MOST_ALGORITHMS]


def _sizes(allocated: int, halvings: int) -> list[int]:
    """The slot as it was allocated, and by halves what is smaller."""
    least = max(64, min(LEAST_SLOT_BYTES, allocated // 4))
    halves = [(allocated >> power) // 64 * 64 for power in range(1, halvings + 1)]
    return [allocated, *(each for each in halves if each >= least)]


def _most_in_flight(settings: Settings, algorithm: str) -> int:
    """Slots for which the fusion buffer has blocks: a ring takes two for each, one for what comes in."""
    blocks = settings.fusion_buffer_bytes // 2 // settings.fusion_slot_bytes
    return max(1, min(MOST_IN_FLIGHT, blocks // (2 if algorithm in ("ring", "mpi") else 1)))
