"""Which all-reduce is the fastest: a cost model with a few constants, measured once at start-up (startup/measure.py).

An all-reduce moves units, some at a time. The model counts each algorithm's waits, messages and bytes for a unit alone,
and what of it nothing else can overlap: the wire's time, and the processor's. With k units of which w are under way

    time = alone + (k - 1) max(alone / w, busy),   busy = max(wire, processor), or a little more

    ring           2 (P - 1) messages one after the other; 2 u (P - 1) / P bytes of a unit over the slowest link
    halving        2 log2 P messages one after the other; the same bytes
    direct         2 messages one after the other, P - 1 at a time; the same bytes
    doubling       log2 P messages one after the other, each of all u bytes
    hierarchical   each byte passes INWARD + OUTWARD times through the caches; ring or halving of H hosts, u bytes
                   through each host's wire

Longer units have fewer waits and messages, and take longer to fill the wire: the model chooses their length, too.
`shared` is always chosen where it is usable. The model knows no congestion and no other jobs. bench/growth.py shows its
predictions beside measurements, bench/scale.py beside simulations of many hosts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ringreduce.errors import SettingsError

ALGORITHMS = ("shared", "hierarchical", "ring", "halving", "direct", "doubling", "nccl")
"""`nccl` is NVIDIA's library, for GPU arrays only; the model never chooses it, but the setting can."""
INWARD, OUTWARD = 1.5, 1.0  # how often shared memory touches each byte before it is on the wire, and after
SUMMING = 1.5  # bytes that a sum reads and writes, beside those of a copy
UNITS = tuple(1 << power for power in range(20, 26))  # lengths of `hierarchical` to choose from, in bytes
BUCKETS = UNITS[1:4]  # and of the others, which fill the fusion buffer
LEAST_GAIN = 0.97  # of a longer unit, which needs memory, and of halving across, which ran on few networks
LARGE_BYTES = 100_000_000  # units are as long as is best for so many bytes: a model's gradients
UNITS_AHEAD = 8  # of `hierarchical`, under way at a time
BUCKETS_IN_FLIGHT = 2  # of the others
SEGMENT_BYTES = 60 << 10  # of a message between hosts
SEGMENT_MESSAGES = 4  # on a fast wire: a segment takes this many times as long as the processor needs to send it
STEPWISE_ALGORITHMS = ("hierarchical", "halving")  # wire and processor wait for each other now and then
STEPWISE = 1.1  # slowdown of a wire by `halving`, which does not begin a step before the last one has ended
MANY = 16  # with more ranks `direct` is not chosen: the model does not cover so many senders to one receiver
CONVERGING = 1.03  # slowdown of a wire to which several hosts send at a time (4 hosts at 1 Gbit/s: 2 to 4 %)
SHORT_BYTES = 8 << 10  # at most, of an all-reduce between hosts whose elements travel with its negotiation
ENGINE_US = 60.0  # of Python, for an all-reduce whose elements travel on their own
ONE_SHOT_BYTES = 64 << 10  # in shared memory every rank sums all of a buffer if the others' parts are at most this long


@dataclasses.dataclass(frozen=True)
class Constants:
    """Prices, equal on all ranks. 1 GB/s is 1000 bytes per µs."""

    copy_gbs: float = 5.0  # copy rate of a rank while all ranks of its host copy
    message_us: float = 10.0  # one message between two ranks of a host, Python included
    message_gbs: float = 2.0  # rate between two ranks of a host while all ranks send
    wire_us: float = 60.0  # one message between hosts
    wire_gbs: float = 1.0  # rate between two hosts while all hosts send

    @property
    def short_bytes(self) -> int:
        """Elements of this many bytes pass a wire in about the time that messages of their own would take, Python
        included: see negotiation/short.py."""
        return min(SHORT_BYTES, int(1e3 * (ENGINE_US + self.wire_us) * self.wire_gbs))

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
                    f"RINGREDUCE_COSTS: {item!r}; expected name=number, where number is above 0 and name is one of "
                    f"{', '.join(names)}"
                )
        return cls(**values)

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name):.4g}" for field in dataclasses.fields(self))


def is_one_shot(nbytes: int, size: int) -> bool:
    """True when it is faster for every rank of a host to sum all: the others' bytes are at most `ONE_SHOT_BYTES`."""
    return nbytes * (size - 1) <= ONE_SHOT_BYTES


class Units(NamedTuple):
    """What travels together, in bytes; of `hierarchical`: buffers up to which length are halved across."""

    unit_bytes: int
    halved_bytes: float = 0  # longer ones go around a ring


class _Load(NamedTuple):
    """The load of one unit, in µs: alone; of the wire; of the processor."""

    alone: float
    wire: float
    processor: float


def segment_bytes(constants: Constants) -> int:
    """Bytes of a message between hosts: on a fast wire more, so that the processor keeps up."""
    return max(SEGMENT_BYTES, int(SEGMENT_MESSAGES * constants.message_us * constants.wire_gbs * 1e3))


def _ring(unit: float, size: int, latency: float, rate: float, constants: Constants) -> _Load:
    steps, chunk, copy, segment = 2 * (size - 1), unit / size, 1e3 * constants.copy_gbs, segment_bytes(constants)
    wire = steps * chunk / rate
    alone = max(wire + latency, steps * (latency + min(chunk, segment) / rate)) + unit / copy
    return _Load(alone, wire, steps * max(1.0, chunk / segment) * constants.message_us + SUMMING * unit / copy)


def _halving(unit: float, size: int, latency: float, rate: float, constants: Constants) -> _Load:
    steps, copy = 2 * math.ceil(math.log2(size)), 1e3 * constants.copy_gbs
    wire = 2 * unit * (size - 1) / size / rate
    processor = (steps + 2 * unit / segment_bytes(constants)) * constants.message_us + SUMMING * unit / copy
    return _Load(steps * latency + wire + unit / copy, STEPWISE * wire, processor)


@functools.lru_cache(maxsize=64)
def _layout(hosts: tuple[int, ...]) -> tuple[int, int, int]:
    """The numbers of ranks, of hosts, and of ranks on the largest host."""
    counted = collections.Counter(hosts)
    return len(hosts), len(counted), max(counted.values())


def _load(algorithm: str, nbytes: float, hosts: tuple[int, ...], constants: Constants, units: Units) -> _Load | None:
    """The load of one unit of `nbytes`; None: not usable, or `shared`."""
    unit = min(units.unit_bytes, nbytes)
    size, num_hosts, most = _layout(hosts)
    one_host = num_hosts == 1
    latency = constants.message_us if one_host else max(constants.wire_us, constants.message_us)
    rate = 1e3 * (constants.message_gbs if one_host else constants.wire_gbs)
    share = rate / (1 if one_host else most)  # the ranks of a host share its wire
    copy = 1e3 * constants.copy_gbs
    if algorithm == "ring":  # over hosts, only one rank of a host sends to another host
        return _ring(unit, size, latency, rate, constants)
    if algorithm == "halving":
        return _halving(unit, size, latency, share, constants)
    if algorithm == "direct":
        remote = 2 * unit * (size - 1) / size * (1 if one_host else most * (size - most) / max(1, size - 1))
        wire = remote * (CONVERGING if num_hosts > 2 else 1) / rate
        messages = 2 * (size - 1) * constants.message_us
        return _Load(2 * latency + max(messages, wire) + unit / copy, wire, messages + unit / copy)
    if algorithm == "doubling":
        rounds = math.ceil(math.log2(size)) + (0 if size & (size - 1) == 0 else 1)
        wire = rounds * unit / share
        return _Load(rounds * (latency + unit / copy) + wire, wire, rounds * unit / copy)
    if algorithm == "hierarchical" and not one_host and most > 1:
        polled = latency + min(nbytes - unit, UNITS[0]) / copy  # what has arrived is looked at between others' slots
        halves = nbytes <= units.halved_bytes
        across = _halving if halves else _ring
        alone, wire, processor = across(unit / most, num_hosts, polled, share, constants)
        inside = (INWARD + OUTWARD) * unit / copy
        wire /= STEPWISE if halves else 1  # enough units are under way
        return _Load(constants.message_us + inside + alone, wire, inside + processor)  # two waits: about a message
    return None


def _time_us(algorithm: str, nbytes: float, hosts: tuple[int, ...], constants: Constants, units: Units) -> float:
    load = _load(algorithm, nbytes, hosts, constants, units)
    if load is None:
        return math.inf
    at_a_time = UNITS_AHEAD if algorithm == "hierarchical" else BUCKETS_IN_FLIGHT
    busy = max(load[1:])
    if algorithm in STEPWISE_ALGORITHMS:
        busy = (load.wire**3 + load.processor**3) ** (1 / 3)
    return load.alone + max(0.0, nbytes / units.unit_bytes - 1) * max(load.alone / at_a_time, busy)


@functools.lru_cache(maxsize=64)
def best_units(algorithm: str, hosts: tuple[int, ...], constants: Constants) -> Units:
    """The units that are best for `LARGE_BYTES`, and taken for all sizes; rank r is on host hosts[r]."""
    candidates = [Units(unit) for unit in BUCKETS]
    if algorithm == "hierarchical":
        candidates = [Units(unit, halved) for halved in (0, math.inf) for unit in UNITS]
    best, best_us = candidates[0], math.inf
    for each in candidates:
        us = _time_us(algorithm, LARGE_BYTES, hosts, constants, each)
        if us < LEAST_GAIN * best_us:
            best, best_us = each, us
    if algorithm == "hierarchical" and not best.halved_bytes:
        best = best._replace(halved_bytes=_halved_bytes(hosts, constants, best))
    return best


def _halved_bytes(hosts: tuple[int, ...], constants: Constants, around: Units) -> int:
    """The longest buffer that gains by fewer steps across, where long ones go around a ring."""

    def gains(nbytes: int) -> bool:
        both = around, around._replace(halved_bytes=nbytes)
        ring_us, halving_us = (_time_us("hierarchical", nbytes, hosts, constants, each) for each in both)
        return halving_us < LEAST_GAIN * ring_us

    lengths = (1 << power for power in range(LARGE_BYTES.bit_length()))
    return max(itertools.takewhile(gains, lengths), default=0)


def predict_us(
    algorithm: str, nbytes: float, hosts: Sequence[int], constants: Constants, units: Units | None = None
) -> float:
    """The predicted time of an all-reduce of `nbytes`, rank r on host hosts[r], in µs; inf: not usable, or `shared`."""
    layout = tuple(hosts)
    if len(layout) == 1:
        return 0.0
    return _time_us(algorithm, nbytes, layout, constants, units or best_units(algorithm, layout, constants))


def choose(nbytes: int, wire_nbytes: int, hosts: Sequence[int], usable: Collection[str], constants: Constants) -> str:
    """The fastest of the usable algorithms.

    wire_nbytes: the bytes that all but `shared` and `direct` send for `nbytes`: more where partial results are wider.
    """

    def cost(algorithm: str) -> float:
        return predict_us(algorithm, nbytes if algorithm in ("shared", "direct") else wire_nbytes, hosts, constants)

    candidates = [each for each in ALGORITHMS if each in usable and not (each == "direct" and len(hosts) > MANY)]
    return min(candidates or usable, key=cost)
