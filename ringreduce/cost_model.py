"""Which all-reduce is the fastest: a cost model with a few constants, measured once at start-up (startup/measure.py).

The model counts each algorithm's waits, messages and bytes, and prices them:

    ring           2 (P - 1) messages one after the other; 2 n (P - 1) / P bytes over the slowest link
    direct         2 messages one after the other, P - 1 at a time; the same bytes
    doubling       log2 P messages one after the other, each of all n bytes
    hierarchical   each byte passes three times through the caches; a ring of H hosts, n bytes through each host's wire

`shared` is always chosen where it is usable. The model knows no congestion and no other jobs. bench/growth.py shows its
predictions beside measurements.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence

from ringreduce.errors import SettingsError

ALGORITHMS = ("shared", "hierarchical", "ring", "direct", "doubling", "nccl")
"""`nccl` is NVIDIA's library, for GPU arrays only; the model never chooses it, but the setting can."""
PASSES = 3  # times that shared memory touches each byte
MANY = 16  # with more ranks `direct` is not chosen: the model does not cover so many senders to one receiver
CONVERGING = 1.03  # slowdown of a wire to which several hosts send at a time (4 hosts at 1 Gbit/s: 2 to 4 %)
ONE_SHOT_BYTES = 64 << 10  # in shared memory every rank sums all of a buffer if the others' parts are at most this long


@dataclasses.dataclass(frozen=True)
class Constants:
    """Prices, equal on all ranks. 1 GB/s is 1000 bytes per µs."""

    copy_gbs: float = 5.0  # copy rate of a rank while all ranks of its host copy
    message_us: float = 10.0  # one message between two ranks of a host, Python included
    message_gbs: float = 2.0  # rate between two ranks of a host while all ranks send
    wire_us: float = 60.0  # one message between hosts
    wire_gbs: float = 1.0  # rate between two hosts while all hosts send

    @classmethod
    def parse(cls, text: str) -> Constants:
        """Parse `wire_us=50,copy_gbs=8`; others keep their defaults. Raises SettingsError."""
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


def is_one_shot(nbytes: int, size: int) -> bool:
    """True when it is faster that every rank of a host sums all: the others' bytes are at most `ONE_SHOT_BYTES`."""
    return nbytes * (size - 1) <= ONE_SHOT_BYTES


def predict_us(algorithm: str, nbytes: int, hosts: Sequence[int], constants: Constants) -> float:
    """The predicted time of an all-reduce of `nbytes`, rank r on host hosts[r], in µs; inf: not usable, or `shared`."""
    size, counted = len(hosts), collections.Counter(hosts)
    num_hosts, most = len(counted), max(counted.values())
    if size == 1:
        return 0.0
    one_host = num_hosts == 1
    latency = constants.message_us if one_host else constants.wire_us
    # one rank's share of a link; the ranks of a host share its wire
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
    """The fastest of the usable algorithms.

    wire_nbytes: the bytes that `ring`, `hierarchical` and `doubling` send for `nbytes`: more for 16-bit floats, whose
                 sums travel as float32, while `shared` and `direct` keep 16 bits.
    """

    def cost(algorithm: str) -> float:
        wide = algorithm in ("ring", "hierarchical", "doubling")
        return predict_us(algorithm, wire_nbytes if wide else nbytes, hosts, constants)

    candidates = [each for each in ALGORITHMS if each in usable and not (each == "direct" and len(hosts) > MANY)]
    return min(candidates or usable, key=cost)
