"""Which all-reduce is the quickest: a cost model with a few constants, measured once at the start (measure.py).

The model counts what each algorithm does, in waits, messages and bytes, and prices it:

    ring           2 (P - 1) messages one after the other; 2 n (P - 1) / P bytes over the slowest link
    direct         2 messages one after the other, P - 1 at a time; the same bytes
    doubling       log2 P messages one after the other, each of all n bytes
    hierarchical   each byte passes three times through the caches; a ring of H hosts, n bytes through each host's wire

`shared` is always taken where it can be. It is a model: no congestion, no other jobs. bench/growth.py shows its
predictions beside measurements.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence

from ringreduce.errors import SettingsError

ALGORITHMS = ("shared", "hierarchical", "ring", "direct", "doubling", "nccl")
"""`nccl` is NVIDIA's library, for GPU arrays only; it is never chosen, but can be asked for."""
PASSES = 3
"""Times that shared memory touches each byte."""
MANY = 16
"""Ranks from which on `direct` is not chosen: the model knows nothing of what happens when so many send to one."""
CONVERGING = 1.03
"""Where several hosts send to one at a time its wire carries so much less (4 hosts at 1 Gbit/s: 2 to 4 %)."""
ONE_SHOT_BYTES = 64 << 10
"""In shared memory, a short buffer is summed by every rank: up to this many bytes of the others' together."""


@dataclasses.dataclass(frozen=True)
class Constants:
    """Prices, equal on all ranks. 1 GB/s is 1000 bytes per µs."""

    copy_gbs: float = 5.0
    """What a rank copies while all ranks of its host copy."""
    message_us: float = 10.0
    """One message between two ranks of a host, and what Python adds."""
    message_gbs: float = 2.0
    """What a rank sends another of its host while all do."""
    wire_us: float = 60.0
    """One message between hosts."""
    wire_gbs: float = 1.0
    """What a host sends another while all hosts do."""

    @classmethod
    def parse(cls, text: str) -> Constants:
        """Read `wire_us=50,copy_gbs=8`; what is not named keeps its default. Raises SettingsError."""
        names = [field.name for field in dataclasses.fields(cls)]
        values = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = item.partition("=")
            try:
                values[name] = float(number)
            except ValueError:
                values[name] = math.nan
            if name not in names or not 0 < values[name] < math.inf:
                raise SettingsError(
                    f"RINGREDUCE_COSTS: {item!r}; expected name=number, the number above 0, the name one of "
                    f"{', '.join(names)}"
                )
        return cls(**values)

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name):.4g}" for field in dataclasses.fields(self))


def is_one_shot(nbytes: int, size: int, longest_bytes: int = ONE_SHOT_BYTES) -> bool:
    """True when it is quicker that every rank of a host sums all: of the others' together at most `longest_bytes`."""
    return nbytes * (size - 1) <= longest_bytes


def predict_us(algorithm: str, nbytes: int, hosts: Sequence[int], constants: Constants) -> float:
    """How long an all-reduce of `nbytes` takes over ranks of which rank r is on host hosts[r], in µs.

    infinity: the algorithm cannot be used there, or is `shared`.
    """
    size, counted = len(hosts), collections.Counter(hosts)
    num_hosts, most = len(counted), max(counted.values())
    if size == 1:
        return 0.0
    one_host = num_hosts == 1
    latency = constants.message_us if one_host else constants.wire_us
    # what one rank gets of a link; on a wire the ranks of a host share it
    rate = 1e3 * (constants.message_gbs if one_host else constants.wire_gbs)
    copy = 1e3 * constants.copy_gbs
    share = 2 * nbytes * (size - 1) / size
    if algorithm == "ring":
        # in a ring over hosts, only one rank of a host sends to another host
        return 2 * (size - 1) * max(latency, constants.message_us) + share / rate + nbytes / copy
    if algorithm == "direct":
        remote = share if one_host else share * most * (size - most) / max(1, size - 1)
        remote *= CONVERGING if num_hosts > 2 else 1
        return 2 * latency + 2 * (size - 1) * constants.message_us + remote / rate + nbytes / copy
    if algorithm == "doubling":
        rounds = math.ceil(math.log2(size)) + (0 if size & (size - 1) == 0 else 1)
        return rounds * (latency + nbytes * (1 if one_host else most) / rate + nbytes / copy)
    if algorithm == "hierarchical" and not one_host and most > 1:
        across = 2 * (num_hosts - 1) * latency + 2 * nbytes * (num_hosts - 1) / num_hosts / rate
        return constants.message_us + PASSES * nbytes / copy + across  # two waits for flags take about a message's time
    return math.inf


def choose(nbytes: int, wire_nbytes: int, hosts: Sequence[int], usable: Collection[str], constants: Constants) -> str:
    """The quickest of the usable algorithms.

    wire_nbytes: what `ring`, `hierarchical` and `doubling` send for `nbytes`: more for 16-bit floats, whose sums travel
                 as float32, while `shared` and `direct` keep 16 bits.
    """

    def cost(algorithm: str) -> float:
        wide = algorithm in ("ring", "hierarchical", "doubling")
        return predict_us(algorithm, wire_nbytes if wide else nbytes, hosts, constants)

    candidates = [each for each in ALGORITHMS if each in usable and not (each == "direct" and len(hosts) > MANY)]
    return min(candidates or usable, key=cost)
