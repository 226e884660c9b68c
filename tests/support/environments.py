"""Virtual environments beside the one that runs the tests, made when the first test needs them, and kept.

Each sees the packages of the one that runs the tests, and this project, and has a ringrun of its own. Only what is not
there is installed: another MPI, which mpi4py finds by the environment's own folder, in seconds instead of a minute.
"""

import fcntl
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.support.jobs import ROOT

INSTALL_TIMEOUT_S = 1200


def interpreter(variable: str, folder: str, *requirements: str, alone: Sequence[str] = ()) -> Path:
    """The Python that $variable names, or that of ROOT/folder with these requirements, which is made if need be.

    alone: packages that are installed without what they require, as it is there by another name.
    """
    if path := os.environ.get(variable):
        return Path(path)
    made = ROOT / folder
    if Path(sys.prefix) == made:  # as where the launcher's tests run on MPICH
        return Path(sys.executable)
    runs_tests = sys.prefix, sys.version  # not its executable: `pytest` and `python -m pytest` name it differently
    wanted = "\n".join([*runs_tests, *requirements, *alone, *(ROOT.joinpath(name).read_text() for name in FILES)])
    stamp = made / "made-of"
    with (ROOT / f"{folder}.lock").open("w") as lock:  # two suites may run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            _run([sys.executable, "-m", "venv", "--clear", "--without-pip", made])
            own = sysconfig.get_path("purelib", vars={"base": str(made)})
            Path(own, "tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
            python = made / "bin" / "python"
            ringrun = python.with_name("ringrun")
            ringrun.write_text(f"#!{python}\nimport sys\nfrom ringrun.cli import main\nsys.exit(main())\n")
            ringrun.chmod(0o755)
            pip = [sys.executable, "-m", "pip", "--python", python]
            install = [*pip, "install", "-q", "--no-compile", "-c", "constraints.txt"]
            _run([*install, *requirements])
            if alone:
                _run([*install, "--no-deps", *alone])
            stamp.write_text(wanted)
    return made / "bin" / "python"


def packages(variable: str, folder: str, *requirements: str, alone: Sequence[str] = ()) -> str:
    """Where that Python has its packages, for the PYTHONPATH of the one that runs the tests."""
    command = [
        interpreter(variable, folder, *requirements, alone=alone),
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


FILES = ("setup.cfg", "constraints.txt")
"""What is installed stands there."""


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
