"""Which all-reduce is the fastest: a cost model with a few constants, measured once at start-up (startup/measure.py).

An all-reduce moves units, some at a time. The model counts each algorithm's waits, messages and bytes for a unit alone,
and what of it nothing else can overlap: the wire's time, and the processor's. With k units of which w are under way

    time = alone + (k - 1) max(alone / w, busy),   busy = max(wire, processor), or their hypotenuse

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
UNITS_AHEAD = 8  # of `hierarchical`, under way at a time
BUCKETS_IN_FLIGHT = 2  # of the others
SEGMENT_BYTES = 60 << 10  # of a message between hosts
SEGMENT_MESSAGES = 4  # on a fast wire: a segment takes this many times as long as the processor needs to send it
STEPWISE_ALGORITHMS = ("hierarchical", "halving")  # wire and processor wait for each other now and then
STEPWISE = 1.1  # slowdown of a wire by `halving`, which does not begin a step before the last one has ended
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


class Plan(NamedTuple):
    """How long an all-reduce takes, and how."""

    us: float = math.inf
    unit_bytes: int = 0  # what travels together
    halves: bool = False  # of `hierarchical`: what goes across is halved


def segment_bytes(constants: Constants) -> int:
    """Bytes of a message between hosts: on a fast wire more, so that the processor keeps up."""
    return max(SEGMENT_BYTES, int(SEGMENT_MESSAGES * constants.message_us * constants.wire_gbs * 1e3))


class _Link(NamedTuple):
    """What the `size` ranks that take part have of a link: µs of a message, bytes per µs."""

    size: int
    latency: float
    rate: float
    segment: int


class _Load(NamedTuple):
    """Of one unit, in µs: alone; of the wire; of the processor."""

    alone: float
    wire: float
    processor: float


def _ring(unit: float, link: _Link, constants: Constants) -> _Load:
    steps, chunk, copy = 2 * (link.size - 1), unit / link.size, 1e3 * constants.copy_gbs
    segment = min(chunk, link.segment)
    wait = max(link.latency, constants.message_us) + segment / link.rate
    wire = steps * chunk / link.rate
    messages = steps * max(1.0, chunk / link.segment)
    alone = max(wire + link.latency, steps * wait) + unit / copy
    return _Load(alone, wire, messages * constants.message_us + SUMMING * unit / copy)


def _halving(unit: float, link: _Link, constants: Constants) -> _Load:
    steps, copy = 2 * math.ceil(math.log2(link.size)), 1e3 * constants.copy_gbs
    wire = 2 * unit * (link.size - 1) / link.size / link.rate
    alone = steps * max(link.latency, constants.message_us) + wire + unit / copy
    processor = (steps + 2 * unit / link.segment) * constants.message_us + SUMMING * unit / copy
    return _Load(alone, STEPWISE * wire, processor)


@functools.lru_cache(maxsize=64)
def _layout(hosts: tuple[int, ...]) -> tuple[int, int, int]:
    """How many ranks, hosts, and ranks of the largest host."""
    counted = collections.Counter(hosts)
    return len(hosts), len(counted), max(counted.values())


def _load(algorithm: str, unit: float, hosts: tuple[int, ...], constants: Constants, halves: bool) -> _Load | None:
    """The load of one unit; None: not usable, or `shared`."""
    size, num_hosts, most = _layout(hosts)
    one_host = num_hosts == 1
    latency = constants.message_us if one_host else constants.wire_us
    # one rank's share of a link; the ranks of a host share its wire
    rate = 1e3 * (constants.message_gbs if one_host else constants.wire_gbs)
    copy = 1e3 * constants.copy_gbs
    link = _Link(size, latency, rate, segment_bytes(constants))
    if algorithm == "ring":  # over hosts, only one rank of a host sends to another host
        return _ring(unit, link, constants)
    if algorithm == "halving":
        return _halving(unit, link._replace(rate=rate / (1 if one_host else most)), constants)
    if algorithm == "direct":
        share = 2 * unit * (size - 1) / size
        remote = share if one_host else share * most * (size - most) / max(1, size - 1)
        wire = remote * (CONVERGING if num_hosts > 2 else 1) / rate
        messages = 2 * (size - 1) * constants.message_us
        return _Load(2 * latency + messages + wire + unit / copy, wire, messages + unit / copy)
    if algorithm == "doubling":
        rounds = math.ceil(math.log2(size)) + (0 if size & (size - 1) == 0 else 1)
        wire = rounds * unit * (1 if one_host else most) / rate
        return _Load(rounds * (latency + unit / copy) + wire, wire, rounds * unit / copy)
    if algorithm == "hierarchical" and not one_host and most > 1:
        polling = min(unit, UNITS[0]) / copy  # what has arrived is looked at between two slots
        link = link._replace(size=num_hosts, rate=rate / most, latency=latency + polling)
        alone, wire, processor = (_halving if halves else _ring)(unit / most, link, constants)
        inside = (INWARD + OUTWARD) * unit / copy
        wire /= STEPWISE if halves else 1  # enough units are under way
        return _Load(constants.message_us + inside + alone, wire, inside + processor)  # two waits: about a message
    return None


def plan(algorithm: str, nbytes: float, hosts: Sequence[int], constants: Constants, units: Sequence[int] = ()) -> Plan:
    """The fastest plan for an all-reduce of `nbytes`, rank r on host hosts[r]; inf: not usable, or `shared`."""
    units = units or (UNITS if algorithm == "hierarchical" else BUCKETS)
    if len(hosts) == 1:
        return Plan(0.0, units[0])
    best = Plan()
    at_a_time = UNITS_AHEAD if algorithm == "hierarchical" else BUCKETS_IN_FLIGHT
    for halves in (False, True) if algorithm == "hierarchical" else (False,):
        for unit in units:
            load = _load(algorithm, min(unit, nbytes), tuple(hosts), constants, halves)
            if load is None:
                return best
            more = max(0.0, nbytes / unit - 1)
            busy = math.hypot(*load[1:]) if algorithm in STEPWISE_ALGORITHMS else max(load[1:])
            us = load.alone + more * max(load.alone / at_a_time, busy)
            if us < best.us * (LEAST_GAIN if unit > best.unit_bytes or halves > best.halves else 1):
                best = Plan(us, unit, halves)
    return best


def predict_us(algorithm: str, nbytes: float, hosts: Sequence[int], constants: Constants) -> float:
    """The predicted time of an all-reduce of `nbytes`, rank r on host hosts[r], in µs; inf: not usable, or `shared`."""
    return plan(algorithm, nbytes, hosts, constants).us


def choose(nbytes: int, wire_nbytes: int, hosts: Sequence[int], usable: Collection[str], constants: Constants) -> str:
    """The fastest of the usable algorithms.

    wire_nbytes: the bytes that all but `shared` and `direct` send for `nbytes`: more for 16-bit floats, whose sums
                 travel as float32, while those two keep 16 bits.
    """

    def cost(algorithm: str) -> float:
        return predict_us(algorithm, nbytes if algorithm in ("shared", "direct") else wire_nbytes, hosts, constants)

    candidates = [each for each in ALGORITHMS if each in usable and not (each == "direct" and len(hosts) > MANY)]
    return min(candidates or usable, key=cost)
