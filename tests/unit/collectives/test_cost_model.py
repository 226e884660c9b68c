"""The cost model: what it predicts, what is chosen by it, and how both are written and read."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.cost_model import (
    ALGORITHMS,
    MANY,
    ONE_SHOT_BYTES,
    Constants,
    best_units,
    choose,
    is_one_shot,
    predict_us,
)
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.execution.algorithms import candidates, check, tuned, usable_algorithms
from ringreduce.execution.host import HostResources, window_bytes
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.threads import ThreadNetwork
from ringreduce.transport.window import Window, block_bytes
from ringreduce.transport.world import World
from tests.support.loops import in_a_loop

ONE_HOST = [[0] * size for size in (2, 3, 4, 9, 16)]
PAIRS = [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 2, 2, 2], [0, 1, 0, 1], [0] * 8 + [1] * 8]
SINGLES = [[0, 1], [0, 1, 2, 3], list(range(9))]
LAYOUTS = ONE_HOST + PAIRS + SINGLES
SIZES = [0, 1, 8, 100, *(1 << power for power in range(10, 41, 3))]
COSTS = [Constants(), Constants(wire_us=500, wire_gbs=0.0125), Constants(message_us=1, message_gbs=20, copy_gbs=1)]


def usable(hosts):
    """By the model: what has a price there."""
    return [each for each in ALGORITHMS if predict_us(each, 1000, hosts, Constants()) < math.inf]


@in_a_loop("constants", COSTS)
@in_a_loop("hosts", LAYOUTS)
def test_more_bytes_never_take_less_time(hosts, constants):
    for algorithm in usable(hosts):
        times = [predict_us(algorithm, nbytes, hosts, constants) for nbytes in SIZES]
        assert times == sorted(times), algorithm
        assert times[-1] > times[0] > 0


def test_how_many_bytes_travel_with_the_news_is_a_matter_of_the_rate_more_than_of_the_latency():
    assert Constants(wire_us=20, wire_gbs=0.119).short_bytes == 8 << 10, "1 Gbit/s, though a message is fast"
    assert Constants(wire_us=20, wire_gbs=0.00119).short_bytes < 1000, "10 Mbit/s: they would delay every message"
    assert Constants(wire_us=5000, wire_gbs=0.00119).short_bytes > 5000, "where a message takes 5 ms anyway, more"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ONE_HOST, ["ring", "halving", "direct", "doubling"]),
        (PAIRS, ["hierarchical", "ring", "halving", "direct", "doubling"]),
        (SINGLES, ["ring", "halving", "direct", "doubling"]),
    ],
    ids=["one host", "several ranks a host", "one rank a host"],
)
def test_what_cannot_be_used_takes_for_ever(kind, expected):
    for hosts in kind:
        assert usable(hosts) == expected
        for algorithm in set(ALGORITHMS) - set(expected):
            assert predict_us(algorithm, 8, hosts, Constants()) == math.inf


def test_a_rank_alone_pays_nothing():
    assert [predict_us(each, 1 << 30, [0], Constants()) for each in ALGORITHMS] == [0] * len(ALGORITHMS)


@in_a_loop("hosts", PAIRS)
def test_the_numbers_of_hosts_do_not_matter(hosts):
    renamed = [7 - 3 * host for host in hosts]
    for algorithm, nbytes in itertools.product(ALGORITHMS, SIZES):
        assert predict_us(algorithm, nbytes, hosts, Constants()) == predict_us(algorithm, nbytes, renamed, Constants())


@in_a_loop(
    ("hosts", "sizes", "names"),
    [
        ([0, 0, 1, 1], [4 << 20, 64 << 20, 1 << 32], ["hierarchical"]),
        *((hosts, [8], ["doubling", "direct"]) for hosts in (list(range(4)), list(range(9)), [0, 0, 1, 1])),
        *((hosts, [64 << 20], ["ring", "direct"]) for hosts in SINGLES[1:]),
    ],
)
def test_between_hosts_tiny_buffers_take_few_steps_and_large_ones_few_bytes(hosts, sizes, names):
    for nbytes in sizes:
        assert choose(nbytes, nbytes, hosts, usable(hosts), Constants()) in names


def test_several_hosts_send_large_buffers_around_the_ring_and_not_all_to_one():
    usable = ["ring", "direct", "doubling"]
    four = (0, 1, 2, 3)
    assert choose(256 << 10, 256 << 10, four, usable, Constants()) == "direct"
    assert choose(64 << 20, 64 << 20, four, usable, Constants()) == "ring"
    bytes_alone = Constants(message_us=1e-9, wire_us=1e-9)
    for hosts in ((0, 1), (0, 0, 0, 0)):  # nobody's flows meet there
        prices = [predict_us(algorithm, 1 << 30, hosts, bytes_alone) for algorithm in ("ring", "direct")]
        assert prices[0] == pytest.approx(prices[1])


def test_of_many_ranks_not_all_send_to_one_at_a_time():
    """How that goes the model does not know."""
    found = [
        {choose(nbytes, nbytes, range(size), ["ring", "direct"], Constants()) for nbytes in SIZES}
        for size in (MANY, MANY + 1)
    ]
    assert found == [{"ring", "direct"}, {"ring"}]


def test_what_travels_wider_costs_more_where_sums_travel():
    """Between hosts 16-bit floats prefer `direct`, which sends them as they are."""
    hosts, nbytes = list(range(4)), 64 << 20
    slow = Constants(wire_gbs=0.1)
    assert choose(nbytes, 2 * nbytes, hosts, ["ring", "direct"], slow) == "direct"
    assert predict_us("ring", 2 * nbytes, hosts, slow) > 1.5 * predict_us("direct", nbytes, hosts, slow)


def test_a_short_buffer_is_one_whose_copies_fit_into_a_cache():
    assert is_one_shot(ONE_SHOT_BYTES, 2)
    assert not is_one_shot(ONE_SHOT_BYTES + 1, 2)
    assert is_one_shot(ONE_SHOT_BYTES // 8, 9)
    assert not is_one_shot(ONE_SHOT_BYTES // 8 + 1, 9)


# Constants as text


def test_constants_are_read_as_they_are_written():
    for constants in (*COSTS, Constants(12.34, 7, 8.25, 1e4, 1e-3)):
        assert Constants.parse(str(constants)) == constants
    assert str(Constants()) == "copy_gbs=5,message_us=10,message_gbs=2,wire_us=60,wire_gbs=1"


def test_what_is_not_named_keeps_its_default():
    assert Constants.parse("") == Constants()
    assert Constants.parse(" wire_us=7.5 , copy_gbs=1e1, ") == Constants(wire_us=7.5, copy_gbs=10)


@in_a_loop(
    "item",
    ["wire_us", "wire_us=", "wire_us=fast", "wire_us=0", "wire_us=-1", "wire_us=inf", "wire_us=nan", "wait_us=1", "=1"],
)
def test_constants_that_do_not_parse_are_refused(item):
    names = "copy_gbs, message_us, message_gbs, wire_us, wire_gbs"
    message = f"RINGREDUCE_COSTS: {item!r}; expected name=number, where number is above 0 and name is one of {names}"
    with pytest.raises(rr.SettingsError, match=f"^{re.escape(message)}$"):
        Constants.parse(f"copy_gbs=3,{item},wire_us=7")


# A process set's table


def routes_of(hosts, settings=None, *, shared=True, constants=None):
    """The routes of the set of all ranks, on rank 0."""
    knobs = settings or Settings()
    nbytes = block_bytes(knobs.shared_slot_bytes, knobs.shared_regions)
    blocks = [np.zeros(nbytes, np.uint8) for host in hosts if host == hosts[0]]
    window = Window(blocks) if shared and len(set(hosts)) < len(hosts) else None
    world = World(0, len(hosts), tuple(hosts))
    host = HostResources(world, ThreadNetwork(len(hosts)).transport(0), knobs, window, constants)
    return host.algorithms((0, 0, 0), range(len(hosts)))


FLOAT32, FLOAT16, INT32 = (
    Reduction(op, TABLE[name], 2) for op, name in ((Sum, "float32"), (Sum, "float16"), (Average, "int32"))
)
"""Partial results of the last travel as int64."""


@in_a_loop("hosts", LAYOUTS)
def test_the_table_is_the_models_choice(hosts):
    algorithms = routes_of(hosts)
    assert sorted(algorithms.usable) == sorted(usable(hosts) + ["shared"] * (len(set(hosts)) == 1))
    for nbytes in SIZES:
        rounded = (1 << nbytes.bit_length()) * 3 // 4
        for reduction, wider in ((FLOAT32, 1), (FLOAT16, 1), (INT32, 2)):
            expected = "shared" if "shared" in algorithms.usable else None
            expected = expected or choose(rounded, wider * rounded, hosts, algorithms.usable, Constants())
            assert algorithms.choose(nbytes, reduction) == expected
    assert algorithms.choose(1 << 60, FLOAT32) == algorithms.choose(1 << 47, FLOAT32)


def test_the_text_tells_where_the_choice_changes():
    hosts = list(range(4))
    text = routes_of(hosts).text()
    assert re.fullmatch(r"(\w+ below \d+ B, then )+\w+", text), text
    limits = re.findall(r"(\w+) below (\d+) B", text)
    algorithms = routes_of(hosts)
    for (name, limit), following in zip(limits, [*limits[1:], (text.rpartition(" ")[2], "")], strict=True):
        assert algorithms.choose(int(limit) - 1, FLOAT32) == name
        assert algorithms.choose(int(limit), FLOAT32) == following[0] != name
    assert routes_of([0, 0]).text() == "shared"


@in_a_loop("algorithm", ["shared", "ring", "direct", "doubling"])
def test_one_can_be_forced(algorithm):
    algorithms = routes_of([0, 0, 0], Settings(algorithm=algorithm))
    assert algorithms.text() == algorithm
    assert {algorithms.choose(nbytes, FLOAT16) for nbytes in SIZES} == {algorithm}


@pytest.mark.parametrize(("hosts", "expected"), [([0, 0], "shared"), ([0, 0, 1], "direct"), ([0, 1], "direct")])
def test_deterministic_sums_in_the_order_of_the_ranks(hosts, expected):
    assert routes_of(hosts, Settings(deterministic=True)).text() == expected
    assert routes_of([0, 0], Settings(deterministic=True), shared=False).text() == "direct"
    assert routes_of([0, 0], Settings(deterministic=True, algorithm="direct")).text() == "direct", "as it was asked for"


# Demands that cannot be met


def told(hosts, settings, why_not="", shared=True):
    """The message of the refusal, or none."""
    usable = usable_algorithms(hosts, shared)
    try:
        check(settings, usable, hosts, why_not)
    except rr.SettingsError as exc:
        return str(exc)
    return ""


UNKNOWN = f"RINGREDUCE_ALGORITHM='rings': expected auto or one of {', '.join(ALGORITHMS)}"
SEVERAL = "several hosts, one of them with several ranks, and shared memory"


@in_a_loop(
    ("algorithm", "hosts", "message"),
    [
        *(("rings", hosts, UNKNOWN) for hosts in ([0], [0, 0], [0, 1])),
        (
            "shared",
            [0, 0, 1],
            "=shared: needs all ranks on one host, and shared memory; there are 3 ranks on 2 hosts; ",
        ),
        ("hierarchical", [0, 0], f"=hierarchical: needs {SEVERAL}; there are 2 ranks on 1 host; usable: "),
        ("hierarchical", [0, 1, 2], f"=hierarchical: needs {SEVERAL}; there are 3 ranks on 3 hosts; usable: "),
        *((algorithm, [0], "") for algorithm in ALGORITHMS),
        *(("shared", [0, 0], ""), ("hierarchical", [0, 0, 1], ""), ("ring", [0, 1], ""), ("auto", [0, 1], "")),
    ],
)
def test_a_forced_algorithm_that_cannot_be_used_is_refused(algorithm, hosts, message):
    found = told(hosts, Settings(algorithm=algorithm))
    assert message in found if message else found == ""
    assert "needs" not in message or found.endswith(f"; usable: {', '.join(routes_of(hosts).usable)}")


def test_the_refusal_says_why_there_is_no_shared_memory():
    message = told([0, 0], Settings(algorithm="shared"), "rank 1: /dev/shm has 1 MiB free", shared=False)
    there = "there are 2 ranks on 1 host, and rank 1: /dev/shm has 1 MiB free; usable: ring, halving, direct"
    assert there in message


def test_deterministic_allows_what_sums_in_the_order_of_the_ranks():
    for algorithm in ("ring", "doubling", "nccl"):
        message = told([0, 1], Settings(algorithm=algorithm, deterministic=True))
        expected = f"RINGREDUCE_ALGORITHM={algorithm} and RINGREDUCE_DETERMINISTIC=1: its results depend on"
        assert message.startswith(expected)
        assert message.endswith("unset one of them, or use shared or direct")
    assert told([0, 1], Settings(algorithm="direct", deterministic=True)) == ""


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1], [0, 0, 1]], ids=str)
def test_nccl_may_be_asked_for_and_host_arrays_go_as_without(hosts):
    asked = Settings(algorithm="nccl")
    assert told(hosts, asked) == ""
    assert routes_of(hosts, asked).text() == routes_of(hosts).text()
    assert "nccl" not in candidates(Settings(), routes_of(hosts).usable)


def test_info_tells_the_choice_and_its_reasons():
    for info in run_ranks(4, rr.info, hosts=[0, 0, 1, 1], settings=Settings(costs="wire_us=77")):
        assert info.usable_algorithms == ("ring", "halving", "direct", "doubling", "hierarchical")
        assert info.constants == Constants(wire_us=77)
        assert info.algorithm.endswith(", then hierarchical (between hosts: ring, 1 MiB at a time)")
        assert re.search(r"^constants +copy_gbs=5,.*wire_us=77,wire_gbs=1$", str(info), re.MULTILINE)
        assert re.search(rf"^algorithm +{re.escape(info.algorithm)}$", str(info), re.MULTILINE)
        assert info.shared_memory_bytes == window_bytes(Settings())


def layout(hosts, per_host):
    """The host of each rank."""
    return tuple(host for host in range(hosts) for _ in range(per_host))


FAST = Constants(copy_gbs=25, message_us=11, message_gbs=10, wire_us=30, wire_gbs=12.5)
"""100 Gbit/s, 20 µs: see bench/scale.py."""


@in_a_loop(("hosts", "gbits", "low", "high"), [(2, 1, 0, 0), (4, 1, 1e3, 1e6), (8, 10, 1e6, 1e7),
                                                              (64, 100, math.inf, math.inf)])  # fmt: skip
def test_many_hosts_halve_and_few_only_what_is_short(hosts, gbits, low, high):
    made = best_units("hierarchical", layout(hosts, 8), dataclasses.replace(FAST, wire_gbs=gbits / 8))
    assert low <= made.halved_bytes <= high


def test_what_travels_together_is_longer_on_a_faster_wire_and_among_more_hosts():
    lengths = [best_units("hierarchical", layout(hosts, 8), constants).unit_bytes for hosts, constants in
               [(8, Constants(wire_gbs=0.125)), (8, FAST), (512, FAST)]]  # fmt: skip
    assert lengths[0] == 1 << 20
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize("constants", COSTS, ids=["default", "slow wire", "slow memory"])
def test_on_one_host_nothing_is_fitted_and_on_several_the_users_own_lengths_stay(constants):
    usable = ["ring", "halving", "direct", "doubling"]
    assert tuned(Settings(), [0, 0], [*usable, "shared"], constants) == Settings()
    own = Settings(fusion_slot_bytes=1 << 20)
    assert tuned(own, range(64), usable, constants) is own
    longer = tuned(Settings(), tuple(range(512)), usable, FAST)
    assert longer.fusion_slot_bytes == 8 << 20
    assert longer.fusion_buffer_bytes == 64 << 20
