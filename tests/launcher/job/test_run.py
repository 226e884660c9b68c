"""Whole runs that go well: the ranks' environment, their MPI, their output and their input."""

import json
import os
import pwd
import socket
import sys
import zlib
from pathlib import Path

import pytest

from tests.support import jobs

SHOW_ENVIRONMENT = """
    import json, os
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
             "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
             "PYTHONPATH", "RINGRUN_AUTHKEY", "MINE"]
    print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def by_rank(text):
    """Return the lines of each rank; fails on a line without its prefix."""
    lines = {}
    for line in text.splitlines():
        prefix, _, rest = line.partition("]")
        assert prefix.startswith("["), f"no prefix: {line!r}"
        lines.setdefault(int(prefix[1:]), []).append(rest.removeprefix(" "))
    return lines


@pytest.mark.without_mpi
@pytest.mark.parametrize("outer", [[], ["--elastic", "--spares", 1, "--restarts", 1]])
def test_a_ringrun_in_a_rank_starts_a_job_of_its_own(outer, ringrun, ringrun_command, script):
    show = script("import json, os; print(json.dumps(dict(os.environ)))")
    of_outer = {"MASTER_ADDR": "10.1.2.3", "RINGREDUCE_STATE_DIR": "/mine"}
    between = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]  # which is the rank
    done = ringrun(*outer, "-np", 1, *between, *ringrun_command, "-np", 1, *show, env=of_outer)
    assert done.stderr == "ringrun: RINGREDUCE_STATE_DIR is ignored: ringrun sets it itself\n"
    for lines in by_rank(done.stdout).values():
        of_inner = json.loads(lines[0].removeprefix("[0] "))
        assert of_inner["MASTER_ADDR"] == "127.0.0.1"
        assert of_inner["RINGREDUCE_STATE_DIR"] == ""
        assert not {"RINGREDUCE_ELASTIC", "RINGREDUCE_SPARES", "RINGREDUCE_MIN_NP"} & of_inner.keys()


@pytest.mark.parametrize("size", [1, 3])
def test_the_environment_of_each_rank(size, ringrun, script):
    done = ringrun("-np", size, *script(SHOW_ENVIRONMENT), env={"MINE": "kept", "PYTHONPATH": None})
    assert (done.returncode, done.stderr) == (0, "")
    ranks = {rank: json.loads(lines[0]) for rank, lines in by_rank(done.stdout).items()}
    assert set(ranks) == set(range(size))
    assert len({variables["MASTER_PORT"] for variables in ranks.values()}) == 1
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    for rank, variables in ranks.items():
        assert int(variables.pop("MASTER_PORT")) > 0
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": None,  # by which torch takes torchrun for the owner of its store
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": None,
            "RINGRUN_AUTHKEY": None,
            "MINE": "kept",
        }


@pytest.mark.parametrize("variables", [{"HOME": None}, {"HOME": None, "PATH": None, "USER": None, "LANG": None}])
def test_a_service_s_few_variables_are_enough(variables, ringrun, script):
    """As systemd and `env -i` leave them; Open MPI needs HOME."""
    source = "import os; from mpi4py import MPI; print(MPI.COMM_WORLD.size, os.environ['HOME'])"
    done = ringrun("-np", 2, *script(source), env=variables, returncode=0)
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert sorted(done.stdout.splitlines()) == [f"[0] 2 {home}", f"[1] 2 {home}"]


def test_the_ranks_are_one_mpi_job(ringrun, script):
    source = """
        import os
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        assert (world.rank, world.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        MPI.Win.Allocate_shared(1024, comm=world).Free()  # prints no noise
        print("sum of squares", world.allreduce(world.rank**2), "of", world.size)
    """
    done = ringrun("-np", 5, *script(source))  # more ranks than most test machines have cores
    assert (done.returncode, done.stderr) == (0, "")
    assert by_rank(done.stdout) == {rank: ["sum of squares 30 of 5"] for rank in range(5)}


@pytest.mark.without_mpi
def test_long_lines_of_many_ranks_stay_whole(ringrun, script):
    source = """
        import os, sys
        rank = int(os.environ["RANK"])
        for count in range(2000):
            stream = sys.stdout if count % 2 else sys.stderr
            stream.write(f"{count:04} " + str(rank) * (count % 397))
            stream.write(" end\\n")
    """
    done = ringrun("-np", 4, *script(source), returncode=0)
    for first, text in ((1, done.stdout), (0, done.stderr)):
        ranks = by_rank(text)
        assert set(ranks) == {0, 1, 2, 3}
        for rank, lines in ranks.items():
            assert lines == [f"{count:04} {str(rank) * (count % 397)} end" for count in range(first, 2000, 2)]


@pytest.mark.without_mpi
def test_bytes_survive_and_the_last_line_gets_its_newline(ringrun, python):
    source = r"import os; os.write(1, b'\xff\xfe caf\xc3\xa9 \x00|\n\nno newline')"
    done = ringrun("-np", 1, python, "-c", source)
    assert done.stdout.encode(errors="surrogateescape") == b"[0] \xff\xfe caf\xc3\xa9 \x00|\n[0]\n[0] no newline\n"


@pytest.mark.without_mpi
def test_rank_0_reads_stdin_and_the_others_nothing(ringrun, python):
    text = "".join(f"line {count}\n" for count in range(100_000))
    source = "import sys, zlib; print(zlib.crc32(sys.stdin.buffer.read()))"
    done = ringrun("-np", 3, python, "-c", source, input=text)
    assert by_rank(done.stdout) == {0: [str(zlib.crc32(text.encode()))], 1: ["0"], 2: ["0"]}


def test_stdin_that_no_rank_reads_is_left_for_the_next_program(tmp_path):
    (tmp_path / "input").write_text("for the shell\n")
    with (tmp_path / "input").open() as stdin:
        done = jobs.run(["sh", "-c", '"$0" -np 1 true; cat', jobs.ringrun(Path(sys.executable))], stdin=stdin)
    assert done.stdout == "for the shell\n"


def test_the_words_of_a_command_are_nobody_s_but_its_own(ringrun, python):
    """What a shell, mpirun or hydra would read in its own way; and more than fits into one word of a command line."""
    arguments = [
        "a b",
        "$HOME",
        "'",
        '"',
        "*",
        "",
        "new\nline",
        "back\\slash",
        "é",
        "caf\udce9",
        "-np",
        "--verbose",
        "--",
    ]
    arguments += [
        "--map-by",
        "node",
        "--bind-to",
        "none",
        "--rank-by",
        "x",
        "-x",
        "A",
        "a",
        ":",
        "b",
        "x" * 131_000,
        ":",
    ]
    source = "import sys, json; print(json.dumps(sys.argv[1:]))"
    done = ringrun("-np", 2, python, "-c", source, *arguments, returncode=0)
    assert {rank: json.loads(line) for rank, [line] in by_rank(done.stdout).items()} == {0: arguments, 1: arguments}


@pytest.mark.without_mpi
def test_ranks_start_in_another_folder(ringrun, tmp_path):
    jobs.executable(tmp_path / "program", '#!/bin/sh\npwd\necho "$PWD"\ncat "$1"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "input").write_text("that of the run\n")
    folder = str(tmp_path / "run")
    done = ringrun("-np", 2, "--wdir", "run", "./program", "input")
    assert by_rank(done.stdout) == {rank: [folder, folder, "that of the run"] for rank in range(2)}


@pytest.mark.without_mpi
def test_a_folder_that_is_not_there_is_told_before_any_rank_starts(ringrun, tmp_path):
    done = ringrun("-np", 2, "--wdir", "nowhere", "true")
    assert (done.returncode, done.stdout) == (2, "")
    where = f"there is no folder {tmp_path / 'nowhere'} on host {socket.gethostname()}"
    assert done.stderr == f"ringrun: error: --wdir: {where}; make it, or name another\n"


def test_a_low_limit_of_open_files_is_raised_for_ringrun_and_not_for_the_ranks(python):
    source = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    ringrun = jobs.ringrun(Path(python))
    done = jobs.run(["sh", "-c", 'ulimit -Sn 30; exec "$@"', "sh", ringrun, "-np", 6, python, "-c", source])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 30" for rank in range(6)]


@pytest.mark.without_mpi
def test_the_private_folder_is_removed(ringrun, tmp_path):
    folder = tmp_path / "tmp"
    folder.mkdir()
    assert ringrun("-np", 2, "true", env={"TMPDIR": str(folder)}).returncode == 0
    assert not list(folder.glob("ringrun-*"))


def test_a_sitecustomize_of_the_user_s_still_runs(ringrun, tmp_path, python):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = 'yes'")
    done = ringrun("-np", 1, python, "-c", "print(customized)", env={"PYTHONPATH": str(tmp_path)})
    assert by_rank(done.stdout) == {0: ["yes"]}


@pytest.mark.without_mpi
def test_a_master_port_that_is_in_use_is_told_before_any_rank_starts(ringrun):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = ringrun("-np", 2, "echo", "started", env={"MASTER_PORT": port})
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(
        f"ringrun: error: MASTER_PORT={port} is in use on {socket.gethostname()}, where rank 0"
    )
    done = ringrun("-np", 2, "sh", "-c", "echo $MASTER_PORT", env={"MASTER_PORT": port})
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [f"[0] {port}", f"[1] {port}"])


@pytest.mark.without_mpi
def test_no_connection_can_take_the_master_port_before_the_script_listens_there(ringrun):
    done = ringrun("-np", 2, "sh", "-c", "echo $MASTER_PORT")
    [port] = {int(line.split()[-1]) for line in done.stdout.splitlines()}
    assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


@pytest.mark.without_mpi
@pytest.mark.parametrize("port", ["none", "0", "65536", "-1", "29500;x", " 1", "9" * 5000])
def test_a_master_port_that_is_none_is_told_too(ringrun, port):
    done = ringrun("-np", 2, "echo", "started", env={"MASTER_PORT": port})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ringrun: error: MASTER_PORT: expected a port from 1 to 65535, got '" + port[:9])
