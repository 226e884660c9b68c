"""What is read of a machine: cores, nodes and GPUs, from files that may be missing or make no sense."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.machine.cpus import usable_cpus
from ringrun.machine.topology import Core, Gpu, Topology, parse_cpulist, read_topology
from ringrun.text import format_spans
from tests.support.fake_machines import FakeGpu, make_machine, two_sockets, write

ALL = range(64)
NODE_0 = frozenset([*range(16), *range(32, 48)])
NODE_1 = frozenset([*range(16, 32), *range(48, 64)])


def names(topology):
    return [gpu.name for gpu in topology.gpus]


def visible(root, text):
    return names(read_topology({"CUDA_VISIBLE_DEVICES": text}, root, ALL))


@pytest.mark.parametrize(
    ("machine", "cpus", "cores"),
    [
        pytest.param(two_sockets, ALL, [((cpu, cpu + 32), cpu // 16) for cpu in range(32)], id="hardware threads"),
        pytest.param(two_sockets, [3, 35, 21, 60], [((3, 35), 0), ((21,), 1), ((60,), 1)], id="a container's affinity"),
        pytest.param(
            lambda root: make_machine(root, [(cpu,) for cpu in range(4)], {0: "0,2", 1: "1,3"}),
            range(4),
            [((0,), 0), ((2,), 0), ((1,), 1), ((3,), 1)],
            id="numbers alternate between nodes",
        ),
        pytest.param(
            lambda root: make_machine(root, [(0,), (1,)], {10: "0", 9: "1"}),
            range(2),
            [((1,), 9), ((0,), 10)],
            id="node 10 after node 9",
        ),
        pytest.param(lambda root: make_machine(root, [(2, 5)]), [5, 2], [((2, 5),)], id="no NUMA"),
        pytest.param(lambda root: root, [5, 2], [((2,),), ((5,),)], id="no files"),
    ],
)
def test_cores_come_node_by_node(machine, cpus, cores, tmp_path):
    assert read_topology({}, machine(tmp_path), cpus) == Topology(tuple(Core(*core) for core in cores))


def test_files_that_make_no_sense_are_as_if_they_were_missing(tmp_path):
    root = make_machine(tmp_path, [], {0: "no list"}, [FakeGpu("0000:01:00.0", kind="?"), FakeGpu("nonsense")])
    write(root / "sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "9-,x,1-0")
    (root / "sys/devices/system/node/node²").mkdir()
    assert read_topology({}, root, [2]) == Topology((Core((2,)),))


def test_this_machine_can_be_read():
    cores = read_topology({}).cores
    assert (
        sorted(cpu for core in cores for cpu in core.cpus) == sorted(usable_cpus()) == sorted(os.sched_getaffinity(0))
    )


def test_gpus_are_counted_by_pci_address_and_near_their_node(tmp_path):
    gpus = read_topology({}, two_sockets(tmp_path, gpus=8), ALL).gpus
    addresses = [f"0000:{bus}:00.0" for bus in ("09", "1a", "2b", "3c", "4d", "5e", "6f", "fa")]
    assert gpus == tuple(Gpu(str(index), NODE_0 if index < 4 else NODE_1, addresses[index]) for index in range(8))


def test_addresses_are_compared_as_numbers(tmp_path):
    addresses = ["10000:01:00.0", "0000:02:00.0", "0001:01:00.0", "0000:01:1f.0", "0000:01:02.1"]
    gpus = [FakeGpu(address, near=str(cpu), minor=cpu) for cpu, address in enumerate(addresses)]
    found = read_topology({}, make_machine(tmp_path, gpus=gpus), ALL).gpus
    assert [min(gpu.near) for gpu in found] == [4, 3, 1, 2, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"vendor": "0x1002"},
        {"kind": "0x040300"},  # the sound of a graphics card
        {"kind": "0x038000"},  # another display controller
        {"kind": "0x068000"},  # an NVSwitch
        {"minor": None},
        {"accessible": False},
    ],
)
def test_what_cuda_cannot_use_is_no_gpu(change, tmp_path):
    good = FakeGpu("0000:01:00.0", near="0", kind="0x030000")
    bad = replace(FakeGpu("0000:00:00.0", minor=1), **change)
    assert read_topology({}, make_machine(tmp_path, gpus=[good, bad]), ALL).gpus == (
        Gpu("0", frozenset({0}), "0000:01:00.0"),
    )


def test_a_gpu_is_near_its_node_and_one_of_no_node_near_what_linux_calls_local(tmp_path):
    places = [{"node": 1}, {"node": 0, "near": "0-3"}, {"near": "0-3"}, {}, {"node": 7, "near": "1"}]
    gpus = [FakeGpu(f"0000:0{number}:00.0", **place) for number, place in enumerate(places)]
    found = read_topology({}, make_machine(tmp_path, nodes={0: "0-1", 1: "2-3"}, gpus=gpus), range(4)).gpus
    assert [set(gpu.near) for gpu in found] == [{2, 3}, {0, 1}, {0, 1, 2, 3}, set(), {1}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2,3", ["2", "3"]),
        (" 3 , 0", ["3", "0"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("1,8,2", ["1"]),
        ("0,1,0", []),
        ("NoDevFiles", []),
        ("1x,2", ["1", "2"]),  # CUDA reads numbers as C's strtoul does
        ("0,,1", ["0"]),
        ("99999999999999999999", []),
    ],
)
def test_cuda_visible_devices_chooses(text, expected, tmp_path):
    assert visible(two_sockets(tmp_path / "eight", gpus=8), text) == expected
    assert visible(two_sockets(tmp_path / "none"), text) == [], "on a host without GPUs no variable makes one"


def test_cuda_visible_devices_may_name_uuids_and_their_beginnings(tmp_path):
    root = two_sockets(tmp_path, gpus=8)
    text = "GPU-00000006-aaaa-bbbb-cccc-0123456789ab,GPU-00000001"
    gpus = read_topology({"CUDA_VISIBLE_DEVICES": text}, root, ALL).gpus
    assert gpus == (
        Gpu("GPU-00000006-aaaa-bbbb-cccc-0123456789ab", NODE_1, "0000:6f:00.0"),
        Gpu("GPU-00000001", NODE_0, "0000:1a:00.0"),
    )


@pytest.mark.parametrize(("order", "known"), [(None, False), ("FASTEST_FIRST", False), ("PCI_BUS_ID", True)])
def test_which_gpu_an_index_means_is_known_where_cuda_counts_by_address(order, known, tmp_path):
    environ = {"CUDA_VISIBLE_DEVICES": "7,0"} | ({} if order is None else {"CUDA_DEVICE_ORDER": order})
    gpus = read_topology(environ, two_sockets(tmp_path, gpus=8), ALL).gpus
    assert [gpu.bus_id for gpu in gpus] == (["0000:fa:00.0", "0000:09:00.0"] if known else ["", ""])
    assert [gpu.near for gpu in gpus] == [NODE_1, NODE_0], "a guess that does no harm"


def test_a_uuid_that_the_driver_does_not_tell_and_a_part_of_a_gpu_are_near_nothing_known(tmp_path):
    root = make_machine(tmp_path, gpus=[FakeGpu("0000:01:00.0", near="0")])
    gpus = read_topology({"CUDA_VISIBLE_DEVICES": "GPU-0123,MIG-4567"}, root, ALL).gpus
    assert gpus == (Gpu("GPU-0123"), Gpu("MIG-4567"))
    assert visible(two_sockets(tmp_path / "without"), "GPU-0123,MIG-4567") == []


@given(st.text() | st.text("0123456789,- +GPUMIG"))
def test_any_cuda_visible_devices_gives_some_gpus(text):
    with tempfile.TemporaryDirectory() as folder:
        found = visible(two_sockets(Path(folder), gpus=2), text)
    assert len(found) == len(set(found))


@given(st.text() | st.text("0123456789,-"))
def test_any_cpulist_is_a_set_of_the_cpus_in_question(text):
    assert parse_cpulist(text, range(8)) <= frozenset(range(8))


@given(st.frozensets(st.integers(0, 300)))
def test_a_cpulist_is_read_back(cpus):
    assert parse_cpulist(format_spans(cpus), range(301)) == cpus
