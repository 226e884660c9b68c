"""The command line: what is accepted, and one clear line for what is not."""

import contextlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun import cli
from ringrun.engines.detect import refuse_being_many
from ringrun.errors import UsageError
from ringrun.hosts import place_ranks
from ringrun.machine.placement import automatic_size
from ringrun.machine.topology import read_topology
from tests.support import jobs, tiers
from tests.support.loops import in_a_loop


def test_all_after_the_command_belongs_to_it():
    command = ["python", "train.py", "--verbose", "-np", "9", "-h", "-host", "-ho", "-c", "-p22", "--", "x"]
    options = cli.parse(["-np", "4", *command])
    assert options.np == 4
    assert not options.job.verbose
    assert options.job.command == command


def test_flags_before_the_command_are_ours():
    options = cli.parse(["--verbose", "-np", "2", "--dry-run", "--", "-strange"])
    assert (options.job.verbose, options.options.dry_run, options.job.command) == (True, True, ["-strange"])


def test_without_a_number_of_ranks_it_is_found_out():
    found = automatic_size(read_topology(os.environ))
    for arguments in (["true"], ["-np", "auto", "true"]):
        options = cli.parse(arguments)
        assert place_ranks(options.found, options.np) == (found, ())
    assert cli.parse(["true", "-np", "4"]).job.command == ["true", "-np", "4"]


def test_a_letter_and_its_value_may_be_one_word():
    options = cli.parse(["-n", "3", "-Hlocalhost:3", "-p2222", "true"])
    assert (options.np, options.options.hosts, options.options.ssh_port) == (3, "localhost:3", "2222")


ONE_MORE = "no command to run, as in: ringrun -np 4 python train.py"
WRONG = [
    *[
        (
            ["--metrics-port", text, "true"],
            f"--metrics-port {text}: expected an IPv6 address in brackets, as in [::1]:9400",
        )
        for text in ("::1", "[::1", "[::1]", "[::1]9400", "::1]:9400", "[]:9400")
    ],
    *[(arguments, ONE_MORE) for arguments in ([], ["-np", "4"], ["-np", "4", "--"])],
    *[
        ([flag, text, "true"], f"{flag}: expected {what}, got {text!r}")
        for flag, what, texts in (
            ("-np", "auto or a whole number from 1 to 999999", ("0", "-3", "99999999999", "four", "1.5")),
            ("--timeout", "a number of seconds above 0", ("soon", "0", "-1", "nan", "inf")),
            ("--forward-signals", "USR1, USR2 or USR1,USR2", ("USR3", "TERM", "USR1,")),
            ("--metrics-port", "a port from 0 to 65535", ("-1", "65536")),
            ("--restarts", "a whole number from 0 to 999999", ("-1", "x", "1.5", "²", "1" * 10)),
        )
        for text in texts
    ],
    *[
        ([flag, "", "true"], f"{flag}: expected a value, but it is empty, as a variable that is not set")
        for flag in ("-np", "-H", "--exclude", "--host-discovery-script", "--wdir", "--min-np", "--env", "--stdin")
    ],
    *[
        ([wrong, "2", "true"], f"there is no flag {wrong.partition('=')[0]}; did you mean {right}?")
        for wrong, right in (
            *(("--verb", "--verbose"), ("--verbos", "--verbose"), ("--hlep", "--help"), ("--Help", "--help")),
            *(("--time-out=5", "--timeout"), ("--np", "-np"), ("-np2", "-np 2"), ("-n16", "-np 16")),
            ("--cycle-time-sm", "--cycle-time-ms"),
            *(("-x", "--env NAME[=VALUE]"), ("-genv", "--env NAME[=VALUE]"), ("--nproc_per_node=2", "-np N")),
            *(("-host", "-H LIST"), ("-hosts", "-H LIST"), ("-ppn", "--slots-per-host N"), ("-wd", "--wdir DIR")),
            *(("-f", "--hostfile FILE"), ("-c", "-cb")),
        )
    ],
    (["--map-by", "node", "true"], 'there is no flag --map-by; for mpirun: --mpi-args="--map-by …"'),
    (["--verbose=2", "true"], "--verbose: it takes no value, got '2'; see ringrun --help"),
    (["--oversubscribe", "true"], "there is no flag --oversubscribe; leave it out: ringrun does that itself"),
    *[([flag, "2", "true"], f"there is no flag {flag}; see ringrun --help") for flag in ("-w", "-pxx")],
    (["-np"], "argument -np/--num-proc/-n: expected one argument; see ringrun --help"),
    (["-np", "4", "--ranks", "0-4", "true"], "--ranks: there is no rank 4; with -np 4 the ranks are 0 to 3"),
    (["-np", "2", "-m", "train"], "there is no flag -m; to run a module: ringrun … python -m MODULE"),
    (["doctor", "--host", "h1"], "there is no flag --host; did you mean --hosts?"),
    (["-np", "4", "no-such-command-here"], "command not found: 'no-such-command-here'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_command_line_is_one_clear_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ringrun", *arguments])
    for name in ("survive", "exit_at"):
        monkeypatch.setattr(cli, name, lambda _: None)  # the test's own signals stay as they are
    assert cli.main() == 2
    captured = capsys.readouterr()
    assert captured.err == f"ringrun: error: {message}\n"
    assert captured.out == ""


def shown(request):
    return cli._shown_ranks(request, request.np or 0)


@pytest.mark.parametrize(("text", "signals"), [("USR1", {10}), ("sigusr2, usr1", {10, 12})])
def test_signals_to_forward(text, signals):
    job = cli.parse(["--forward-signals", text, "--grace", "60", "true"]).job
    assert (job.forwarded, job.grace_s) == (signals, 60.0)


@given(st.text())
def test_any_timeout_gives_seconds_or_one_usage_error(text):
    with contextlib.suppress(UsageError):
        assert 0 < cli.parse(["-np", "1", f"--timeout={text}", "true"]).job.timeout_s < math.inf


@pytest.mark.parametrize(("flag", "columns"), [("-h", "60"), ("--help", "200")])
def test_help_is_the_manual_on_two_screens(flag, columns, ringrun):
    done = ringrun(flag, env={"COLUMNS": columns}, returncode=0)
    for part in (
        "ringrun -np 4 python train.py",
        "LOCAL_WORLD_SIZE",
        "Exit code",
        "--output-filename DIR",
        "stacks [JOB]",
    ):
        assert part in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 2 * 45
    assert max(map(len, lines)) <= 100


def test_a_reader_that_has_gone():
    command = [str(Path(sys.executable).parent / "ringrun"), "--show-config"]
    gone, write = os.pipe()
    os.close(gone)
    with os.fdopen(write, "wb") as nowhere:
        done = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.without_mpi
@pytest.mark.parametrize(
    ("stream", "arguments", "code", "said"),
    [
        *[("stderr", [*flags, "-np", 1, "touch", "ran"], 0, "") for flags in ([], ["--autotune"], ["--verbose"])],
        ("stderr", ["--np", "1"], 2, ""),
        *[("stdout", [flag, "true"], 3, "error: stdout cannot be written") for flag in ("--show-config", "--dry-run")],
        ("stdout", ["-np", 1, "sh", "-c", "echo lost; touch ran"], 0, "stdout cannot be written"),
    ],
)
def test_a_stream_on_a_full_disk_costs_its_lines_and_no_job(stream, arguments, code, said, ringrun, tmp_path):
    with open("/dev/full", "w") as full:
        done = ringrun(*arguments, env={"RINGREDUCE_ELASTIC": "1"}, **{stream: full})
    assert (done.returncode, (tmp_path / "ran").exists()) == (code, code == 0)
    ignored = "ringrun: RINGREDUCE_ELASTIC is ignored: ringrun sets it itself\n"
    lost = f"ringrun: {said}: No space left on device"
    assert (done.stderr or "").partition(lost)[:2] == ((ignored, lost) if said else ("", ""))


@pytest.mark.without_mpi
def test_a_python_beside_an_environment_that_is_not_activated_is_ringruns_own(ringrun):
    activated = {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    done = ringrun("-np", 1, "python", "-c", "import sys; print(sys.executable)", env=activated, returncode=0)
    assert done.stdout == f"[0] {sys.executable}\n"
    meant = f"python runs ringrun's own {sys.executable}, because its environment is not activated"
    assert done.stderr == f"ringrun: {meant}\n"


def test_a_ringrun_that_torchrun_has_started_is_refused(ringrun):
    done = ringrun("-np", 2, "true", env={"TORCHELASTIC_RUN_ID": "none"}, returncode=2)
    assert done.stderr == (
        "ringrun: error: torchrun has started ringrun; start it once, by itself: ringrun -np 2 python train.py\n"
    )


@pytest.mark.parametrize("python", ["openmpi", pytest.param("mpich", marks=tiers.extended)], indirect=True)
@pytest.mark.parametrize(
    "words", [["ringrun", "-np", "1", "true"], ["sh", "-c", "ringrun -np 1 true; exit $?"]], ids=["itself", "a shell"]
)
def test_a_ringrun_that_mpirun_starts_once_for_every_rank_is_refused(words, python):
    beside = Path(python).parent
    known = subprocess.run([beside / "mpirun", "--version"], capture_output=True, text=True).stdout
    as_root, size = ([], "PMI_SIZE") if "HYDRA" in known else (["--allow-run-as-root"], "OMPI_COMM_WORLD_SIZE")
    argv = [beside / "mpirun", *as_root, "-np", "2", *words]
    done = jobs.run(argv, env=jobs.environment(PATH=f"{beside}:{os.environ['PATH']}"), timeout_s=50)
    assert done.returncode != 0
    assert f" has started ringrun 2 times ({size}=2), and each would start all ranks; start it once" in done.stderr


@pytest.mark.parametrize("python", [pytest.param("mpich", marks=tiers.extended)], indirect=True)
def test_an_mpi_that_binds_ranks_itself_is_told_before_any_starts(python):
    """Each would get its share of its share of the cores."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("takes two cores")
    command = [jobs.ringrun(Path(python)), "-np", 2]
    bound = jobs.environment(HYDRA_BINDING="core")
    done = jobs.run([*command, python, "-c", "print('started')"], env=bound, returncode=3)
    assert re.search(r"error: rank \d is to get its share of the CPUs \S+ of \S+, but was started on \d; ", done.stderr)
    assert "; unset HYDRA_BINDING" in done.stderr
    assert "started" not in done.stdout
    jobs.run([*command, "--no-bind", python, "-c", ""], env=bound, returncode=0)


@pytest.mark.parametrize("between", [[], ["sh", "-c", '"$@"; exit $?', "sh"]], ids=["itself", "a shell"])
def test_a_ringrun_that_is_each_rank_of_another_is_refused(ringrun, between):
    inner = [sys.executable, "-m", "ringrun", "-np", 2, "true"]
    done = ringrun("-np", 2, *between, *inner, returncode=2)
    assert "error: ringrun has started ringrun 2 times (" in done.stderr
    ringrun("-np", 1, *between, *inner, returncode=0)
    program = f"import subprocess; subprocess.run({[*inner[:4], '1', 'true']}, check=True)"
    ringrun("-np", 2, sys.executable, "-c", program, returncode=0)


@in_a_loop(
    ("starter", "environ", "is_many"),
    [
        ("prterun", {"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ("prted", {"OMPI_COMM_WORLD_SIZE": "64"}, True),
        ("hydra_pmi_proxy", {"PMI_SIZE": "2"}, True),
        ("hydra_pmi_proxy", {"PMI_SIZE": "1"}, False),
        ("ringrun", {"PMI_SIZE": "2"}, True),
        ("ringrun", {"PMI_SIZE": "1"}, False),
        ("prterun", {}, False),
        ("python3", {"OMPI_COMM_WORLD_SIZE": "2"}, False),
        ("", {"PMI_SIZE": "2"}, False),
    ],
)
def test_a_program_in_a_rank_may_start_ringrun(starter, environ, is_many):
    with pytest.raises(UsageError, match=r"started ringrun (2|64) times") if is_many else contextlib.nullcontext():
        refuse_being_many(environ, starter)


def test_version(ringrun):
    from importlib.metadata import version

    done = ringrun("--version")
    assert (done.returncode, done.stdout) == (0, f"ringrun {version('ringreduce')}\n")


def test_dry_run_prints_the_commands_and_runs_nothing(ringrun, tmp_path):
    done = ringrun("-np", 3, "--deterministic", "--mpi-args=-x 'A B'", "--dry-run", "touch", "made here", returncode=0)
    assert done.stdout.startswith("env RINGREDUCE_DETERMINISTIC=1 ")
    assert " -x 'A B' " in done.stdout
    assert done.stdout.endswith("-m ringrun.agent\neach rank: /usr/bin/touch 'made here'\n")
    assert " 3 " in done.stdout
    assert not list(tmp_path.iterdir())


def test_flags_of_the_display_in_a_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "ranks: 0,2-3\nfold: true\nprefix_output_with_timestamp: true\noutput_filename: DIR\ntimeout: 5\nreport: run\n"
    )
    options = cli.parse(["-np", "4", "--config-file", str(path), "--timeout", "7", "true"])
    assert (shown(options), options.job.fold, options.job.timestamps) == ({0, 2, 3}, True, True)
    assert (options.job.output_directory, options.job.timeout_s) == ("DIR", 7)
    assert (options.job.report_directory, options.job.variables["RINGREDUCE_REPORT"]) == ("run", "1")
    path.write_text("ranks: 4\n")
    with pytest.raises(UsageError, match=rf"^{path}:1: --ranks: there is no rank 4; with -np 4 the ranks are 0 to 3$"):
        cli.run(["-np", "4", "--config-file", str(path), "--dry-run", "true"])
    path.write_text("np: 4\ntimeout: -5\n")
    with pytest.raises(UsageError, match=rf"^{path}:2: --timeout: expected a number of seconds above 0, got '-5'$"):
        cli.parse(["--config-file", str(path), "true"])


def test_a_flag_overrules_what_it_excludes_in_a_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("hosts: localhost:3\n")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    flags = ["--config-file", str(path), "--hostfile", str(tmp_path / "hosts")]
    options = cli.parse([*flags, "true"])
    assert place_ranks(options.found, options.np) == (2, ())


def test_a_wrong_host_in_a_file_is_told_with_its_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("np: 2\nhosts: a:b\n")
    with pytest.raises(UsageError, match=rf"^{path}:2: -H, item 1, 'a:b': slots: expected a whole number"):
        cli.parse(["--config-file", str(path), "true"])


@pytest.mark.parametrize(
    "arguments",
    [
        *(["-np", "1", *flags, "true"] for flags in ((), ("--wdir", "sub"), ("--wdir", "/tmp"), ("-i", "key"))),
        ["-H", "h1,localhost", "true"],
        ["scaling", "-np", "1", "true"],
    ],
)
def test_in_a_folder_that_was_deleted_nothing_runs(ringrun_command, arguments, tmp_path):
    there = f"mkdir '{tmp_path}/gone'; cd '{tmp_path}/gone'; rmdir '{tmp_path}/gone'; exec \"$@\""
    done = jobs.run(["sh", "-c", there, "-", *ringrun_command, *arguments], returncode=3)
    assert "ringrun: error: the current folder has been deleted; go to one that exists (cd), and" in done.stderr


@pytest.mark.parametrize(("flags", "expected"), [([], 0), (["--stdin=1"], 1), (["--stdin=0-1"], None)])
def test_one_rank_reads_stdin(flags, expected):
    request = cli.parse([*flags, "true"])
    if expected is not None:
        assert cli._stdin_rank(request, 2) == expected
        return
    with pytest.raises(UsageError, match=r"^--stdin 0-1: expected one rank, since only one can read it$"):
        cli._stdin_rank(request, 2)
