"""Who gets which cores and which GPU; and that the ranks which ringrun starts do."""

import json
import os
import textwrap
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.agent import agent
from ringrun.connection.wire import Address, Setup
from ringrun.environment import RankInfo, Settings
from ringrun.machine.placement import automatic_size, crowd, describe, place
from ringrun.machine.topology import Core, Gpu, Topology, read_topology
from ringrun.text import format_spans
from tests.support.fake_machines import FakeGpu, make_machine, two_sockets
from tests.support.loops import in_a_loop

ALL = range(64)


def cpus(shares):
    return [format_spans(share.cpus) for share in shares]


def gpu_names(shares):
    return [share.gpu.name if share.gpu else None for share in shares]


def one_node(cores):
    return Topology(tuple(Core((cpu,), 0) for cpu in range(cores)))


def test_more_ranks_than_cores_are_said_to_rarely_pay():
    line = "ringrun: 5 ranks on n1 share 4 cores, which rarely pays off; ringrun scaling measures how many pay off"
    assert [crowd(one_node(4), ranks, "n1") for ranks in (4, 5)] == ["", line]
    assert "2 local ranks on n1 share 1 core, " in crowd(one_node(4)._replace(quota=1.5), 2, "n1", "local rank")
    assert crowd(one_node(4)._replace(gpus=(Gpu("0"),)), 5, "n1") == "", "they compute on the GPU"
    two_threads_each = Topology(tuple(Core((cpu, cpu + 2)) for cpu in range(2)))
    assert "3 ranks on n1 share 2 cores" in crowd(two_threads_each, 3, "n1")


@pytest.mark.parametrize(
    ("visible", "gpus", "usable", "ranks", "expected"),
    [
        pytest.param(None, 0, ALL, 4, ["0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"], id="whole cores"),
        pytest.param(None, 0, [5, 7, 37, 22], 1, ["5,7,22,37"], id="a container with three odd cores"),
        pytest.param(None, 0, [5, 7, 37, 22], 2, ["5,7,37", "22"], id="of which two ranks"),
        pytest.param(None, 0, [5, 7, 37, 22], 3, ["5,37", "7", "22"], id="three"),
        pytest.param(None, 0, [5, 7, 37, 22], 4, ["5,37", "7", "22", "5,37"], id="or four have a share"),
        pytest.param(None, 8, ALL, 2, ["0-7,32-39", "8-15,40-47"], id="two GPUs of one node share it"),
        pytest.param("7", 8, [0, 1], 1, ["0-1"], id="a GPU near no usable core has the others"),
        pytest.param("7,0", 8, ALL, 2, ["16-31,48-63", "0-15,32-47"], id="visible GPUs decide"),
    ],
)
def test_the_cores_of_each_rank(visible, gpus, usable, ranks, expected, tmp_path):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    shares = place(read_topology(environ, two_sockets(tmp_path, gpus), usable), ranks)
    assert cpus(shares) == expected
    names = visible.split(",") if visible else [str(index) for index in range(gpus)] or [None]
    assert gpu_names(shares) == [names[rank % len(names)] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("visible", "gpus", "ranks", "nodes", "cores"),
    [
        pytest.param(None, 0, 3, [0, None, 1], [10, 11, 11], id="across nodes where shares must be even"),
        pytest.param(None, 8, 8, [0] * 4 + [1] * 4, [4] * 8, id="a GPU each"),
        pytest.param(None, 2, 6, [0, 1] * 3, [5, 5, 5, 5, 6, 6], id="more ranks than GPUs take turns, and stay near"),
        pytest.param("0", 2, 16, [0] * 16, [1] * 16, id="as many ranks as cores near the GPU"),
        pytest.param("0", 2, 32, [0] * 16 + [1] * 16, [1] * 32, id="too few cores near it: all cores"),
        pytest.param(None, 2, 40, [0, 1] * 20, [1] * 40, id="too few cores at all: near the GPUs"),
    ],
)
def test_the_nodes_of_the_ranks(visible, gpus, ranks, nodes, cores, tmp_path):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    shares = place(read_topology(environ, two_sockets(tmp_path, gpus), ALL), ranks)
    assert [share.node for share in shares] == nodes
    assert sorted(len(share.cores) for share in shares) == cores


@in_a_loop("sizes", [(2, 1), (1, 2), (5, 4), (4, 5)])
def test_the_longer_shares_go_where_a_node_has_more(sizes):
    cores = tuple(Core((cpu,), int(cpu >= sizes[0])) for cpu in range(sum(sizes)))
    ranks = 2 if sum(sizes) == 3 else 4
    assert None not in [share.node for share in place(Topology(cores), ranks)]


def test_gpus_of_no_or_of_an_unknown_node_leave_all_cores_to_all(tmp_path):
    gpus = [FakeGpu(f"0000:0{bus}:00.0", near="0-3") for bus in range(2)]
    shares = place(read_topology({}, make_machine(tmp_path, gpus=gpus), range(4)), 2)
    assert (cpus(shares), gpu_names(shares)) == (["0-1", "2-3"], ["0", "1"])
    one_unknown = Topology(one_node(8).cores, (Gpu("0", frozenset({0, 1})), Gpu("1")))
    assert cpus(place(one_unknown, 2)) == ["0-3", "4-7"]


def test_one_rank_per_gpu_or_per_physical_core(tmp_path):
    root = two_sockets(tmp_path, gpus=8)
    assert automatic_size(read_topology({}, root, ALL)) == 8
    assert automatic_size(read_topology({"CUDA_VISIBLE_DEVICES": ""}, root, ALL)) == 32
    assert automatic_size(read_topology({"CUDA_VISIBLE_DEVICES": "-1"}, root, [0, 32, 1])) == 2


@st.composite
def machines(draw):
    """Some CPUs of a machine, their threads and nodes drawn at random, with up to 5 GPUs that are near anything."""
    numbers = draw(st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True))
    cores, left = [], list(numbers)
    while left:
        threads = draw(st.integers(1, 4))
        cores.append(Core(tuple(sorted(left[:threads])), draw(st.sampled_from([None, 0, 1, 2]))))
        left = left[threads:]
    cores.sort(key=lambda core: (core.node is None, core.node or 0, core.cpus))
    near = st.frozensets(st.sampled_from(numbers))
    gpus = draw(st.lists(near, max_size=5))
    return Topology(tuple(cores), tuple(Gpu(str(index), each) for index, each in enumerate(gpus)))


@given(machines(), st.integers(1, 60))
def test_no_rank_is_without_a_core_and_none_has_half_a_core(topology, ranks):
    shares = place(topology, ranks)
    assert len(shares) == ranks
    for rank, share in enumerate(shares):
        assert set(share.cores) <= set(topology.cores)
        assert share.cores
        assert share.gpu == (topology.gpus[rank % len(topology.gpus)] if topology.gpus else None)
    used = Counter(core for share in shares for core in share.cores)
    if ranks <= len(topology.cores):
        assert max(used.values()) == 1


@given(machines(), st.integers(1, 60))
def test_without_gpus_every_core_is_given_out_evenly(topology, ranks):
    shares = place(Topology(topology.cores), ranks)
    counts = [len(share.cores) for share in shares]
    used = Counter(core for share in shares for core in share.cores)
    assert set(used) == set(topology.cores)
    assert max(counts) - min(counts) <= 1
    assert max(used.values()) - min(used.values()) <= 1
    if ranks <= len(topology.cores):
        assert [core for share in shares for core in share.cores] == list(topology.cores)
    else:
        assert set(counts) == {1}


def test_two_ranks_are_told_one_by_one(tmp_path):
    shares = place(read_topology({}, two_sockets(tmp_path, gpus=2), ALL), 2)
    assert describe(shares, "gpuhost", bound=True) == (
        "ringrun: 2 ranks on gpuhost: rank 0 GPU 0 cores 0-15,32-47; rank 1 GPU 1 cores 16-31,48-63"
    )
    assert describe(shares, "gpuhost", bound=False) == "ringrun: 2 ranks on gpuhost: rank 0 GPU 0; rank 1 GPU 1"
    assert describe(place(one_node(1), 1), "h", bound=True, noun="local rank") == (
        "ringrun: 1 local rank on h: local rank 0 core 0"
    )
    many = describe(place(one_node(2), 64), "h", bound=True)
    assert many.endswith("; rank 6 core 0; rank 7 core 1; and 56 more")


SHOW = """
    import json, os, sys
    print(json.dumps([sorted(os.sched_getaffinity(0)), *map(os.environ.get, sys.argv[1:])]))
"""


def seen(text):
    """Return what each rank of SHOW printed."""
    return {int(line[1 : line.index("]")]): tuple(json.loads(line.partition(" ")[2])) for line in text.splitlines()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_run_where_they_are_placed(size, ringrun, script):
    done = ringrun("-np", size, *script(SHOW), "OMP_NUM_THREADS")
    assert (done.returncode, done.stderr) == (0, "")
    shares = place(read_topology({"CUDA_VISIBLE_DEVICES": ""}), size)
    expected = {rank: (sorted(share.cpus), str(len(share.cores))) for rank, share in enumerate(shares)}
    assert seen(done.stdout) == expected


@pytest.mark.without_mpi
def test_the_number_of_threads_stays_as_the_user_set_it(ringrun, script):
    done = ringrun("-np", 2, *script(SHOW), "OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "7"})
    assert [threads for _, threads in seen(done.stdout).values()] == ["7", "7"]


@pytest.mark.parametrize("size", [2, 4])
def test_no_bind_leaves_all_cores_to_every_rank(size, ringrun, script):
    done = ringrun("-np", size, "--no-bind", "--verbose", *script(SHOW), "OMP_NUM_THREADS")
    usable = sorted(os.sched_getaffinity(0))
    assert seen(done.stdout) == dict.fromkeys(range(size), (usable, str(max(1, len(usable) // size))))
    assert " ranks on " not in done.stderr


def test_ringruns_own_affinity_is_what_ranks_share(ringrun, script):
    before = os.sched_getaffinity(0)
    one = min(before)
    try:
        os.sched_setaffinity(0, {one})
        done = ringrun("-np", 2, *script(SHOW), "OMP_NUM_THREADS")
    finally:
        os.sched_setaffinity(0, before)
    assert seen(done.stdout) == {0: ([one], "1"), 1: ([one], "1")}


@pytest.mark.without_mpi
def test_verbose_tells_who_has_what(ringrun):
    done = ringrun("-np", 2, "--verbose", "true")
    shares = place(read_topology({"CUDA_VISIBLE_DEVICES": ""}), 2)
    assert describe(shares, os.uname().nodename, bound=True) in done.stderr.splitlines()
    assert "\nringrun: running " in done.stderr


@pytest.mark.without_mpi
def test_masking_where_there_is_no_gpu_is_told_and_changes_nothing(ringrun, python):
    source = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('CUDA_DEVICE_ORDER')])"
    done = ringrun("-np", 1, "--mask-gpus", python, "-c", source)
    assert done.stdout == "[0] ['', None]\n"
    assert done.stderr == f"ringrun: --mask-gpus: {os.uname().nodename} has no NVIDIA GPU that its ranks may use\n"


# put on the path of ringrun and its agents: they read a machine of files in place of this one
OTHER_MACHINE = """
    import functools
    from pathlib import Path
    from ringrun.machine import topology
    topology.read_topology = functools.partial(topology.read_topology, root=Path({root!r}))
"""
OF_GPUS = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "RINGREDUCE_PLACED_GPU"]


@pytest.fixture
def gpu_machine(tmp_path):
    """Variables that show this machine's CPUs as two nodes with a GPU each, and one GPU that may not be used."""
    first, *rest = sorted(os.sched_getaffinity(0))
    nodes = {0: str(first), 1: format_spans(rest)}
    gpus = [FakeGpu(f"0000:0{bus}:00.0", node, nodes[node], bus) for bus, node in ((1, 1), (2, 0))]
    gpus.append(FakeGpu("0000:00:00.0", 0, nodes[0], 0, accessible=False))
    root = make_machine(tmp_path / "machine", [], nodes, gpus)
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(OTHER_MACHINE.format(root=str(root))))
    paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    return {"CUDA_VISIBLE_DEVICES": None, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture
def gpu_shares(gpu_machine, tmp_path):
    return place(read_topology({}, tmp_path / "machine"), 2)


@pytest.mark.without_mpi
def test_threads_are_counted_by_physical_cores(ringrun, script, gpu_machine, tmp_path):
    usable = sorted(os.sched_getaffinity(0))
    make_machine(tmp_path / "machine", [usable])  # all are hardware threads of one core
    assert seen(ringrun("-np", 1, *script(SHOW), "OMP_NUM_THREADS", env=gpu_machine).stdout) == {0: (usable, "1")}
    done = ringrun("-np", 1, "--no-bind", *script(SHOW), "OMP_NUM_THREADS", env=gpu_machine)
    assert seen(done.stdout) == {0: (usable, str(len(usable)))}


def test_ranks_that_join_on_too_few_cores_hear_that_this_rarely_pays(ringrun, script, gpu_machine, tmp_path):
    make_machine(tmp_path / "machine", [sorted(os.sched_getaffinity(0))])  # one core
    told = "share 1 core, which rarely pays off"
    of_ringreduce = script("import ringreduce as rr; rr.init()")
    hidden = gpu_machine | {"CUDA_VISIBLE_DEVICES": ""}
    assert ringrun("-np", 2, *of_ringreduce, env=hidden, returncode=0).stderr.count(told) == 1
    assert told not in ringrun("-np", 2, "true", env=hidden, returncode=0).stderr, "they need no core for long"


@pytest.mark.without_mpi
def test_on_a_gpu_host_each_gpu_gets_a_rank_that_sees_all_gpus(ringrun, script, gpu_machine, gpu_shares):
    done = ringrun(*script(SHOW), *OF_GPUS, env=gpu_machine)
    addresses = ["0000:01:00.0", "0000:02:00.0"]
    assert seen(done.stdout) == {
        rank: (sorted(share.cpus), None, None, addresses[rank]) for rank, share in enumerate(gpu_shares)
    }
    assert done.stderr == describe(gpu_shares, os.uname().nodename, bound=True) + "\n"


@pytest.mark.without_mpi
def test_a_masked_rank_sees_its_own_gpu(ringrun, script, gpu_machine):
    usable = sorted(os.sched_getaffinity(0))
    done = ringrun("-np", 3, "--mask-gpus", "--no-bind", *script(SHOW), *OF_GPUS, env=gpu_machine)
    addresses = ["0000:01:00.0", "0000:02:00.0", "0000:01:00.0"]
    assert seen(done.stdout) == {rank: (usable, "010"[rank], "PCI_BUS_ID", addresses[rank]) for rank in range(3)}
    told = "rank 0 GPU 0; rank 1 GPU 1; rank 2 GPU 0"
    assert done.stderr == f"ringrun: 3 ranks on {os.uname().nodename}: {told}\n"


FASTEST_FIRST = """
    class CUDARuntimeError(RuntimeError): pass
    class cuda:
        class runtime:
            CUDARuntimeError, now = CUDARuntimeError, 0
            getDeviceCount, getDevice = staticmethod(lambda: 2), staticmethod(lambda: cuda.runtime.now)
            deviceGetPCIBusId = staticmethod(["0000:02:00.0", "0000:01:00.0"].__getitem__)
        class Device:
            def __init__(self, index): self.index = index
            def use(self): cuda.runtime.now = self.index
"""
"""A CuPy to which CUDA shows the GPU of the higher address first, since it is the faster one."""


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (
            None,
            ["1 (ringrun has placed this rank on 0000:01:00.0)", "0 (ringrun has placed this rank on 0000:02:00.0)"],
        ),
        ("1", ["1 (RINGREDUCE_CUDA_DEVICE=1)"] * 2),
    ],
)
def test_a_rank_gets_the_gpu_that_it_is_placed_at_however_cuda_counts(
    wish, told, ringrun, script, gpu_machine, tmp_path
):
    (tmp_path / "cupy.py").write_text(textwrap.dedent(FASTEST_FIRST))
    show = script("import cupy, ringreduce as rr; rr.init(); print(rr.info().gpu)")
    done = ringrun("-np", 2, *show, env=gpu_machine | {"RINGREDUCE_CUDA_DEVICE": wish})
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {each}" for rank, each in enumerate(told)], done.stderr


@pytest.mark.without_mpi
def test_gpus_that_the_user_has_hidden_stay_hidden(ringrun, script, gpu_machine):
    done = ringrun("--mask-gpus", *script(SHOW), *OF_GPUS, env=gpu_machine | {"CUDA_VISIBLE_DEVICES": "1"})
    assert [values[1:] for values in seen(done.stdout).values()] == [("1", "PCI_BUS_ID", "")]


def test_a_rank_on_another_host_is_placed_by_the_variables_that_it_is_sent(tmp_path, monkeypatch):
    """The agent there has not got them from mpirun."""
    root = two_sockets(tmp_path, gpus=8)
    given = {}
    monkeypatch.setattr(agent, "read_topology", lambda environ: read_topology(environ, root, ALL))
    monkeypatch.setattr(agent.subprocess, "Popen", lambda *_, env, **__: given.update(env))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = agent.Agent.__new__(agent.Agent)
    there._rank_info, there._settings = RankInfo(1, 2, 1, 2), Settings(Address("h0", ""), "openmpi", str(tmp_path))
    there._directory, there._shm_cleanup = str(tmp_path), SimpleNamespace(variables=lambda *_: {})
    there._port = None
    sent = {"CUDA_VISIBLE_DEVICES": "7,6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    there._start(Setup(("true",), "h0", 1, os.getcwd(), sent, gives_stdin=False))
    assert given["RINGREDUCE_PLACED_GPU"] == "0000:6f:00.0"
    assert there._device == "GPU 6"
