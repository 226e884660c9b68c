"""The command that is run, and the variables around it: pure functions."""

import errno
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringrun.connection.wire import Address, Setup
from ringrun.engines import ENGINES, MPICH, Launcher, Library
from ringrun.engines.detect import Detected
from ringrun.environment import HOOK_DIRECTORY, HOROVOD_DIRECTORY, RankInfo, Settings, rank_environment
from ringrun.errors import MachineError, UsageError
from ringrun.folders import make_private_folder, private_folder
from ringrun.hosts import Host, Interface, Machine, Machines
from ringrun.job import plan
from ringrun.join.head import OverJoin
from ringrun.remote import OverSlurm, OverSsh
from ringrun.ssh import SshOptions
from tests.support.jobs import executable
from tests.support.loops import in_a_loop

ADDRESS = Address("here", "/tmp/private/socket")
SETTINGS = Settings(ADDRESS, "mpich", "/tmp/private")
SETUP = Setup(("true",), "127.0.0.1", 2345, "/home/me", {}, gives_stdin=False)
ONE_HOST = plan.Job(2, ["/bin/true"])
ABROAD = replace(
    ONE_HOST,
    size=5,
    hosts=((Host("h1", 4), 3), (Host("fe80::1", 2), 2)),
    reach=OverSsh(SshOptions(port=2222)),
    interfaces=("ib0", "eth0"),
    asked={"WANDB_API_KEY": "sent"},
)
OPEN_MPI = Detected(
    ENGINES["openmpi"], Library("Open MPI v5", "/v/bin/python", "/v"), Launcher("/v/bin/mpirun", (5, 0, 11))
)


def test_the_command_becomes_an_absolute_path(tmp_path, monkeypatch):
    program = executable(tmp_path / "program", "#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    assert plan.find_command(["./program", "a b", "-np"]) == [str(program), "a b", "-np"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert plan.find_command(["program"]) == [str(program)]


OWN = os.path.dirname(sys.executable)


@pytest.mark.parametrize(
    ("name", "variables", "is_own"),
    [
        ("python", {"PATH": "/nowhere"}, True),
        ("python", {"PATH": "/nowhere", "VIRTUAL_ENV": "/v"}, True),
        ("python3", {}, True),
        ("python3", {"VIRTUAL_ENV": "/v"}, False),
        ("python3", {"CONDA_PREFIX": "/v"}, False),
        ("python3", {"PATH": "{here}:" + OWN}, False),
        ("{here}/python3", {}, False),
    ],
)
def test_a_bare_python_is_ringruns_own_where_no_environment_is_activated(
    name, variables, is_own, tmp_path, monkeypatch
):
    other = executable(tmp_path / "python3", "#!/bin/sh\n")
    for key in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(key, raising=False)
    for key, value in ({"PATH": "{here}"} | variables).items():
        monkeypatch.setenv(key, value.format(here=tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    expected = sys.executable if is_own else str(other)
    assert plan.find_command([name.format(here=tmp_path), "train.py"]) == [expected, "train.py"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "command not found: 'nowhere'"),
        (
            "python9",
            f"command not found: 'python9'; ringrun's own is {sys.executable}: name that, or activate its environment",
        ),
        ("./nowhere", "command not found: './nowhere'"),
        ("train.py", "command not found: 'train.py' (it is a file here; to run it: ringrun … python train.py)"),
        ("program", "command not found: 'program' (to run the file here: ./program)"),
        ("./data", "command not found: './data' (it is a file here, but not executable)"),
        ("folder", "command not found: 'folder' (it is a folder)"),
        ("", "command not found: '' (it is empty, as a variable that is not set)"),
        ("x" * 5000, f"command not found: '{'x' * 5000}'"),
        ("doktor", "command not found: 'doktor'; did you mean ringrun doctor …?"),
        ("stack", "command not found: 'stack'; did you mean ringrun stacks …?"),
        ("help", "command not found: 'help'; ringrun --help prints the manual"),
        (
            "SEED=1",
            "command not found: 'SEED=1'; to set a variable for the ranks: ringrun … --env SEED=… COMMAND",
        ),
        (
            "python train.py",
            "command not found: 'python train.py'; a program and its arguments are several words: leave out the "
            "quotes, or write sh -c '…'",
        ),
        ("source", "command not found: 'source'; only shells have it: ringrun … sh -c '…'"),
    ],
)
def test_a_missing_command_is_told_with_its_cure(name, message, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for file, mode in {"train.py": 0o644, "program": 0o755, "data": 0o644}.items():
        (tmp_path / file).touch(mode)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        plan.find_command([name], ["doctor", "join", "report", "scaling", "stacks", "top"])
    assert str(caught.value) == message


@in_a_loop(
    ("words", "flag"),
    [
        ("python -np 2 x.py", "-np"),
        ("python3 -u --timeout=3 x.py", "--timeout=3"),
        ("python -W ignore -H h1:2 x.py", "-H"),
        ("python -X dev --check nan x.py", "--check"),
    ],
)
def test_a_flag_of_ringruns_behind_python_is_told(words, flag):
    python = words.partition(" ")[0]
    expected = (
        f"{flag} comes after {python}, which has no such flag; ringrun's own flags come first: ringrun {flag} … "
        f"{python}"
    )
    with pytest.raises(UsageError, match=re.escape(expected)):
        plan.find_command(words.split())


@in_a_loop(
    "words",
    [
        "python x.py -np 2", "python -Bu x.py -H", "python -m pytest -n 2", "python -c pass -np", "python -ic pass -np",
        "python -X dev x.py", "python -Xdev -Wignore x.py", "python - -np", "python -- -np", "python -W x.py",
        "python --check-hash-based-pycs never x.py", "python --version", "sh -np", "python",
    ],
)  # fmt: skip
def test_flags_of_python_and_of_the_script_are_theirs(words):
    assert plan.find_command(words.split())[1:] == words.split()[1:]


@in_a_loop("name", ["python", "python3.12", "python3.13t", "bash", "pythonista", "ipython", "torchrun"])
def test_a_python_command_is_asked_for_its_mpi_and_instead_of_others_ours(name):
    is_python = name in ("python", "python3.12", "python3.13t")
    assert plan.interpreter_of([f"/opt/bin/{name}", "train.py"]) == (
        f"/opt/bin/{name}" if is_python else sys.executable
    )


def test_the_job_is_agents_that_hear_their_command_from_ringrun():
    argv = plan.job_command(OPEN_MPI, plan.Job(4, ["/bin/echo", "$HOME", "a;b"]), None, as_root=False)
    assert argv[0] == "/v/bin/mpirun"
    assert argv[argv.index("-np") + 1] == "4"
    agent = plan.run_module("ringrun.agent")
    assert argv[argv.index(sys.executable) :] == [sys.executable, *agent]


@pytest.mark.parametrize("version", [(3, 10), sys.version_info[:2]])
def test_an_agent_of_every_version_imports_nothing_from_the_current_folder(version, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong file')")
    run = subprocess.run(
        [sys.executable, *plan.run_module("ringrun.agent", version)], cwd=tmp_path, capture_output=True, text=True
    )
    assert "ringrun.agent is started by ringrun, not by hand" in run.stderr


def test_the_user_s_mca_settings_win():
    scratch, ours = "PRTE_MCA_prte_local_tmpdir_base", {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^ofi"}
    users = {"OMPI_MCA_osc": "rdma", "A": "b", scratch: "/mine"}
    assert plan.engine_variables(OPEN_MPI, users) == ours
    assert plan.job_environment(OPEN_MPI, ONE_HOST, users, SETTINGS, b"key").items() >= (users | ours).items()
    assert plan.job_environment(OPEN_MPI, ONE_HOST, {}, SETTINGS, b"key")[scratch] == SETTINGS.directory
    for_all_hosts = {"PRTE_MCA_prte_tmpdir_base": "/mine"}  # beside ours prterun refuses it
    assert scratch not in plan.job_environment(OPEN_MPI, ONE_HOST, for_all_hosts, SETTINGS, b"key")


@pytest.mark.parametrize("job", [ONE_HOST, ABROAD, replace(ABROAD, reach=OverSlurm(1.0))], ids=["here", "ssh", "slurm"])
def test_no_launcher_looks_for_hosts_by_itself(job):
    """Where it starts nothing by Slurm it needs none of its variables, of which a container may have a part."""
    users = {"PRTE_MCA_prte_default_hostfile": "/h", "HYDRA_HOST_FILE": "/h", "A": "b"}
    environment = plan.job_environment(OPEN_MPI, job, users, SETTINGS, b"key")
    assert environment.get("PRTE_MCA_ras", "").startswith("^") == (not isinstance(job.reach, OverSlurm))
    assert environment.keys() & users == {"A"}
    assert plan.local_variables(job, users).keys() == users.keys() - {"A"}, "a rank may start a ringrun"
    mine = {"PRTE_MCA_ras": "slurm"}
    assert plan.job_environment(OPEN_MPI, job, mine, SETTINGS, b"key").items() >= mine.items()


def test_what_is_printed_can_be_pasted_into_a_shell():
    text = plan.printable(["mpirun", "echo", "a b", "$x"], {"OMPI_MCA_osc": "^ucx"})
    assert shlex.split(text) == ["env", "OMPI_MCA_osc=^ucx", "mpirun", "echo", "a b", "$x"]
    assert plan.printable(["mpirun", "x"], {}) == "mpirun x"


def test_settings_survive_the_environment():
    address = Address("h;1", "/tmp/a;b c", 2345, ("10.0.0.1", "fd00::1"), 0.1, 1e9)
    odd = SETTINGS._replace(address=address, directory="/tmp/a;b \udcff", master_port=29500)
    for settings in (SETTINGS, SETTINGS._replace(bind=False, verbose=True), SETTINGS._replace(mask_gpus=True), odd):
        assert Settings.from_environment(settings.to_environment()) == settings
    with pytest.raises(KeyError):
        Settings.from_environment({})


INFO = RankInfo(rank=5, size=8, local_rank=1, local_size=4)


def test_the_variables_of_a_rank():
    inherited = {**SETTINGS.to_environment(), "RINGRUN_AUTHKEY": "secret", "HOME": "/root", "RANK": "99"}
    assert rank_environment(INFO, SETUP, "/tmp/private", inherited, threads=2) == {
        "HOME": "/root",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "2345",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": HOOK_DIRECTORY,
        "RINGREDUCE_ERROR_FILE": "/tmp/private/rank5.json",
        "RINGREDUCE_PLACED_GPU": "",
        "RINGREDUCE_STATE_DIR": "",
    }


GPUS = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
KEPT = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}
PLACED = {"RINGREDUCE_PLACED_GPU": "0000:01:00.0", "RINGREDUCE_CUDA_DEVICE": "1"}


def test_with_horovod_ranks_and_what_they_start_find_it_and_its_variables():
    inherited = {"RINGREDUCE_HOROVOD": "1", "PYTHONPATH": "/mine"}
    environment = rank_environment(INFO, SETUP, "/tmp/private", inherited, threads=2)
    assert environment["PYTHONPATH"].split(os.pathsep) == [HOOK_DIRECTORY, HOROVOD_DIRECTORY, "/mine"]
    theirs = {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4"}
    assert environment.items() >= theirs.items()
    inherited = {"PYTHONPATH": f"/mine{os.pathsep}{HOROVOD_DIRECTORY}"}  # a job of a driver that has it there
    assert rank_environment(INFO, SETUP, "/tmp/private", inherited, threads=2).items() >= theirs.items()
    inherited = {"RINGREDUCE_HOROVOD": "0", "PYTHONPATH": "/mine"}
    without = rank_environment(INFO, SETUP, "/tmp/private", inherited, threads=2)
    assert not {*theirs} & {*without}
    assert HOROVOD_DIRECTORY not in without["PYTHONPATH"]


@pytest.mark.parametrize(
    ("sent", "inherited", "gpu", "expected"),
    [
        pytest.param({}, KEPT, {}, KEPT, id="what the user has set is kept"),
        pytest.param(
            {"MASTER_ADDR": ""},
            {"MASTER_PORT": "", "OMP_NUM_THREADS": ""},
            {},
            {"MASTER_ADDR": SETUP.master_address, "MASTER_PORT": str(SETUP.master_port), "OMP_NUM_THREADS": "2"},
            id="an empty one is none",
        ),
        pytest.param({}, {"PYTHONPATH": "/mine"}, {}, {"PYTHONPATH": f"{HOOK_DIRECTORY}{os.pathsep}/mine"}, id="path"),
        pytest.param({}, GPUS, {}, GPUS, id="all GPUs"),
        pytest.param(
            {}, GPUS, {"only_gpu": "3"}, {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, id="one GPU"
        ),
        pytest.param(
            {"RINGREDUCE_RESTART_COUNT": "2"}, {}, {}, {"TORCHELASTIC_RESTART_COUNT": "2"}, id="torchrun's name of it"
        ),
        # whatever a job around it says; the user's own wish stays
        pytest.param({}, PLACED, {"placed_gpu": "b"}, PLACED | {"RINGREDUCE_PLACED_GPU": "b"}, id="placed"),
        pytest.param({}, PLACED, {}, PLACED | {"RINGREDUCE_PLACED_GPU": ""}, id="not placed"),
        pytest.param(
            {"LANG": "C.UTF-8", "PYTHONPATH": "/theirs", "RINGRUN_X": "private"},
            {"LANG": "C", "HOME": "/root"},
            {},
            {"LANG": "C.UTF-8", "HOME": "/root", "PYTHONPATH": f"{HOOK_DIRECTORY}{os.pathsep}/theirs"},
            id="what ringrun sends counts more than what an agent has",
        ),
    ],
)
def test_what_becomes_of_variables_that_are_set(sent, inherited, gpu, expected):
    environment = rank_environment(INFO, SETUP._replace(variables=sent), "/tmp/private", inherited, threads=2, **gpu)
    assert environment.items() >= expected.items()
    assert "RINGRUN_X" not in environment


@in_a_loop(("rank", "host"), [(0, "h1"), (2, "h1"), (3, "fe80::1"), (4, "fe80::1")])
def test_hosts_are_filled_in_order(rank, host):
    assert ABROAD.host_of(rank) == host


def test_only_names_of_variables_stand_on_the_command_line():
    beyond = plan.across(ABROAD, {"PYTHONPATH": "/secret/path", "MY_TOKEN": "hush"}, "/tmp/private")
    argv = plan.job_command(OPEN_MPI, ABROAD, beyond, as_root=False)
    assert {"RINGRUN_AUTHKEY", "RINGRUN_SETTINGS", "PYTHONPATH"} <= set(argv)
    assert not [word for word in argv if "secret" in word or "hush" in word or "TOKEN" in word or "sent" in word]
    assert argv[argv.index("-H") + 1] == "h1:3,ringrun-host-0:2"
    assert plan.aliases(ABROAD) == {"ringrun-host-0": "fe80::1"}
    for name in ("::1", "LOCALHOST"):
        own = replace(ABROAD, hosts=[(Host(name), 1), *ABROAD.hosts])
        assert list(plan.aliases(own).values()) == ["fe80::1"]
        assert plan.across(own, {}, "/tmp/private").ranks[0] == (Host(socket.gethostname()), 1), (
            "no ssh to this host itself"
        )
    assert argv[argv.index("plm_ssh_agent") + 1] == "ssh -F /tmp/private/ssh_config"
    assert argv[argv.index("prte_if_include") + 1] == "ib0,eth0"
    assert plan.across(ONE_HOST, {}, "/tmp/private") is None


def known(name, number, **changes):
    interfaces = [Interface("eth0", is_running=True, networks=(f"10.0.0.{number}/24",))]
    docker = Interface("docker0", is_running=True, networks=("172.17.0.1/16",))
    return Machine(name, f"boot {number}", (*interfaces, docker), reached="10.0.0.9")._replace(**changes)


KNOWN = replace(
    ABROAD, interfaces=(), machines=Machines({"h1": known("h1", 1), "fe80::1": known("h2", 2, rdma=("m:1",))})
)


def test_the_launcher_hears_of_the_address_that_others_have_reached():
    assert plan.across(KNOWN, {}, "/tmp/private").address == "10.0.0.9"
    assert plan.across(ABROAD, {}, "/tmp/private").address == "", "nobody has been asked"
    in_slurm = replace(KNOWN, reach=OverSlurm(30.0))
    assert plan.across(in_slurm, {}, "/tmp/private").address == "", "names are known there"
    own = replace(KNOWN, hosts=[(Host("localhost"), 1), *KNOWN.hosts])
    assert plan.across(own, {}, "/tmp/private").address == "10.0.0.9", "nobody asks this host whether it reaches itself"


def test_each_host_s_mpi_leaves_out_interfaces_that_lead_nowhere():
    mpich, of_open_mpi = replace(OPEN_MPI, engine=MPICH()), {"OMPI_MCA_btl_tcp_if_include": "eth0"}
    assert plan.network_variables(OPEN_MPI, KNOWN, {}) == {"h1": of_open_mpi, "fe80::1": of_open_mpi}
    assert [each["UCX_NET_DEVICES"] for each in plan.network_variables(mpich, KNOWN, {}).values()] == [
        "eth0",
        "m:1,eth0",
    ]
    for changes, inherited in (
        ({"interfaces": ("ib0",)}, {}),
        ({"asked": {"OMPI_MCA_btl_tcp_if_exclude": "lo"}}, {}),
        ({}, {"OMPI_MCA_btl_tcp_if_exclude": "lo"}),
        ({"mpi_args": ["--mca", "btl_tcp_if_include", "ib0"]}, {}),
    ):
        assert plan.network_variables(OPEN_MPI, replace(KNOWN, **changes), inherited) == {}


def test_other_hosts_get_what_may_leave_this_one():
    inherited = {"LANG": "C", "MY_TOKEN": "hush", "WANDB_API_KEY": "sent", "HOME": "/root", "RINGREDUCE_COSTS": "x=1"}
    environment = plan.job_environment(OPEN_MPI, ABROAD, inherited, SETTINGS, b"key")
    assert "MY_TOKEN" not in environment, "a batch system would send mpirun's environment along"
    assert environment["PRTE_MCA_prte_local_tmpdir_base"] == SETTINGS.directory
    assert plan.local_variables(ABROAD, inherited) == {"MY_TOKEN": "hush"}
    assert plan.local_variables(ONE_HOST, inherited) == {}
    few = replace(ABROAD, allowed=["LC_*"])
    assert plan.local_variables(few, inherited) == {"MY_TOKEN": "hush", "LANG": "C"}
    assert "LANG" not in plan.job_environment(OPEN_MPI, few, inherited, SETTINGS, b"key")
    sent = plan.remote_variables(ABROAD, environment)
    ours = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx"}
    assert sent == {"LANG": "C", "WANDB_API_KEY": "sent", "RINGREDUCE_COSTS": "x=1", **ours}
    assert plan.remote_variables(ONE_HOST, environment) == {}


def test_hosts_that_are_lent_keep_their_own_variables():
    """A head without ranks is a notebook's host, say: only what is about the job leaves it."""
    lent = replace(ABROAD, reach=OverJoin("/hub", 1.0, sends_environment=False))
    inherited = {
        "LANG": "C",
        "PATH": "/bin",
        "PYTHONPATH": "/mine",
        "RINGREDUCE_COSTS": "x=1",
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    environment = plan.job_environment(OPEN_MPI, lent, inherited, SETTINGS, b"key")
    sent = plan.remote_variables(lent, environment)
    ours = {"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx"}
    assert sent == {"WANDB_API_KEY": "sent", "RINGREDUCE_COSTS": "x=1", **ours}
    assert "PYTHONPATH" not in plan.across(lent, inherited, "/d").variables
    assert "PYTHONPATH" in plan.across(ABROAD, inherited, "/d").variables


@pytest.mark.parametrize(
    ("usual", "chosen"),
    [
        ("/dev/shm", "/dev/shm"),
        ("/tmp/my files", "/tmp"),
        ("/tmp/o'brien", "/tmp"),
        ("/tmp/a;b", "/tmp"),
        (f"/tmp/{'x' * 90}", "/tmp"),
        (f"/tmp/{'é' * 40}", "/tmp"),
    ],
)
def test_the_private_folder_has_a_name_that_every_launcher_takes(usual, chosen, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", usual)
    with private_folder() as folder:
        assert Path(folder).parent == Path(chosen)
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert not Path(folder).exists()


def test_where_none_can_be_made_the_cure_is_told(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    with pytest.raises(MachineError, match=r"no folder for temporary files can be made: .*; make room, or set TMPDIR$"):
        make_private_folder()


def test_where_there_is_no_room_in_place_of_a_folder_that_is_not_taken_it_is_told_why(monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/ringrun-x")

    monkeypatch.setattr("tempfile.tempdir", "/scratch/my files")
    monkeypatch.setattr("tempfile.mkdtemp", full)
    cure = "set TMPDIR to a path of at most 60 characters, without spaces and the like, unlike '/scratch/my files'"
    with pytest.raises(MachineError, match=f"No space left on device: '/tmp/ringrun-x'; make room, or {cure}$"):
        make_private_folder()
