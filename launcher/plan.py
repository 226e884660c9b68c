"""What will be started: the user's command, found, and the command line around it. Pure but for the file system."""

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .engines.detect import Detected
from .environment import Settings
from .errors import UsageError
from .wire import ADDRESS_VARIABLE, AUTHKEY_VARIABLE

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")


def find_command(command: Sequence[str]) -> list[str]:
    """Return `command` with its program as an absolute path, found as a shell would; UsageError if it is not there.

    mpirun may change PATH for the ranks; the program is the one that the user's own shell would run.
    """
    name, *arguments = command
    path = shutil.which(name)
    if path is None:
        raise UsageError(f"command not found: {name!r}{_why_not_found(name)}")
    return [os.path.abspath(path), *arguments]


def _why_not_found(name: str) -> str:
    if Path(name).is_dir():
        return " (it is a folder)"
    if not Path(name).exists():
        return ""
    if name.endswith(".py"):
        return f" (it is a file here; to run it: ringrun … python {name})"
    return " (it is a file here, but not executable)" if os.sep in name else f" (to run the file here: ./{name})"


def interpreter_of(command: Sequence[str]) -> str:
    """Return the Python that tells which MPI the command needs: its own if it is one, else ringrun's."""
    return command[0] if _PYTHON.fullmatch(Path(command[0]).name) else sys.executable


@dataclass(frozen=True)
class Job:
    """What the user has asked for."""

    size: int
    """How many ranks."""
    command: Sequence[str]
    """What each of them runs; its program found."""
    verbose: bool = False
    bind: bool = True
    """Each rank has cores of its own."""
    mask_gpus: bool = False
    """Each rank sees its own GPU only."""
    mpi_args: Sequence[str] = ()
    """More arguments for mpirun."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """For all ranks, besides those that ringrun has itself."""
    shown: frozenset[int] | None = None
    """The ranks whose lines are printed; None: all."""
    fold: bool = False
    """Equal lines of several ranks are printed once."""
    timestamps: bool = False
    output_directory: str | None = None
    """Where files keep what the ranks write."""
    timeout_s: float | None = None


def job_command(detected: Detected, job: Job, *, as_root: bool) -> list[str]:
    """Return the argv that starts the job's agents, each of which starts its command."""
    program = [sys.executable, *agent_arguments(sys.version_info[:2]), *job.command]
    argv = detected.engine.command(detected.launcher, job.size, program, as_root=as_root)
    return [*_without(argv[: -len(program)], job.mpi_args), *job.mpi_args, *program]


def _without(argv: Sequence[str], mpi_args: Sequence[str]) -> list[str]:
    """Return `argv` without the placement that the user gives too: mpirun refuses a flag that stands there twice."""
    users = {argument.lstrip("-") for argument in mpi_args if argument.startswith("-")}
    twice = [at for at, flag in enumerate(argv) if flag in ("--map-by", "--bind-to") and flag.lstrip("-") in users]
    return [argument for at, argument in enumerate(argv) if at not in twice and at - 1 not in twice]


def agent_arguments(version: tuple[int, int]) -> list[str]:
    """Return what makes a Python of this version an agent.

    The current folder must not be on its path: a file of the user's may be called like a module that the agent imports.
    """
    if version >= (3, 11):
        return ["-P", "-m", f"{__package__}.agent"]
    return ["-c", f"import sys; del sys.path[0]; from {__package__}.agent import main; main()"]


def engine_variables(detected: Detected, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the engine wants and the user has not set."""
    wanted = detected.engine.environment(detected.launcher.path)
    return {name: value for name, value in wanted.items() if name not in inherited}


def job_environment(
    detected: Detected, inherited: Mapping[str, str], settings: Settings, address: str, authkey: bytes
) -> dict[str, str]:
    """Return the environment of mpirun, and through it of the agents."""
    channel = {ADDRESS_VARIABLE: address, AUTHKEY_VARIABLE: authkey.hex()}
    scratch = detected.engine.scratch(settings.directory)
    return {**scratch, **inherited, **engine_variables(detected, inherited), **settings.to_environment(), **channel}


def printable(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return `argv` with `variables` set for it, quoted for a shell."""
    assignments = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    return shlex.join([*assignments, *argv])


def free_port(address: str) -> int:
    """Return a TCP port at `address` that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
