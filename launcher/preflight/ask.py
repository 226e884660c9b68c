"""Asks hosts about themselves (probe.py) and reads their answers."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_interface
from typing import Any

from ..hosts import Interface, Machine
from ..remote import Answer, Problem, Remote
from . import probe

# what decides what a Python there finds, and which GPUs; the job's whole environment is sent to its ranks only
_FORWARDED = (
    *("PYTHONPATH", "LD_LIBRARY_PATH", "OPAL_PREFIX", "MPI4PY_LIBMPI", "MPI4PY_MPIABI"),
    "CUDA_VISIBLE_DEVICES",
)

# -c puts the current folder onto the path: a file of the user's may be called like a module that the probe imports
_BOOT = "import sys; sys.path[:] = [entry for entry in sys.path if entry]; exec(sys.argv[1])"


@dataclass(frozen=True)
class Question:
    """What a host is asked.

    python:     the interpreter of the job, an absolute path;  agent_python: that of the agents.
    directory:  must be there;  programs: these files, too, and be executable.
    addresses:  where this host listens: one of them must take a connection.
    """

    python: str
    directory: str
    programs: Sequence[str] = ()
    addresses: Sequence[tuple[str, int]] = ()
    agent_python: str = sys.executable
    timeout_s: float = 30.0


@dataclass(frozen=True)
class Version:
    """A part that a job needs: its version, or why it is not there."""

    text: str = ""
    error: str = ""
    digest: str = ""
    """Of its files; empty where nobody asks for it."""


@dataclass(frozen=True)
class Facts:
    """The answer of a host."""

    machine: Machine
    python: str
    ringreduce: Version
    ringrun: Version
    mpi4py: Version
    numpy: Version
    cupy: str
    """Its wheel and version; empty if there is none."""
    mpi: Version
    """The first line of MPI_Get_library_version."""
    gpus: int
    ranks: int
    """How many it gets if nobody says."""
    shm_bytes: int | None
    """Free in /dev/shm; None if there is none."""
    both_mpi_wheels: bool
    """Both MPIs' wheels are installed, of which one has overwritten files of the other."""
    missing_directory: bool
    bad_programs: Mapping[str, str]
    """Why each of those that cannot be executed cannot."""
    no_temporary_file: str
    """Why none can be written; empty if one can."""
    not_connected: str
    """Why no connection to this host came about; empty if one did."""
    clock_skew_s: float
    """How far its clock is ahead of this host's."""


def ask(
    names: Sequence[str], remote: Remote, question: Question, environ: Mapping[str, str]
) -> dict[str, Facts | Problem]:
    """Return the answer of each of the hosts `names`, or why there is none."""
    argv = [question.python, "-c", _BOOT, inspect.getsource(probe), json.dumps(dataclasses.asdict(question))]
    variables = {name: environ[name] for name in _FORWARDED if name in environ}
    return {name: read_answer(answer) for name, answer in remote.run(names, argv, variables).items()}


def read_answer(answer: Answer) -> Facts | Problem:
    """Return the facts in what the probe has printed on one host; a Problem if there are none."""
    if answer.problem is not None:
        return answer.problem
    for line in reversed(answer.stdout.decode(errors="replace").splitlines()):
        try:
            fields = json.loads(line)
            if fields.pop(probe.MARK, None) == 1:
                return _facts(fields, answer.arrived_s)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    last = (answer.stderr.strip().splitlines() or ["nothing"])[-1]
    return Problem(
        f"its Python did not report what is there: exit code {answer.code}, and it wrote: {last[:200]}",
        "run that interpreter there by hand, with the same path, and see whether it works",
    )


def _facts(fields: dict[str, Any], arrived_s: float) -> Facts:
    # read there last of all, and so until its line was here: no connection, no start of a Python lies in between
    skew_s = float(fields.pop("clock_s")) - arrived_s
    for name in ("ringreduce", "ringrun", "mpi4py", "numpy", "mpi"):
        fields[name] = Version(**fields[name])
    (name, identity, found, rdma), connection = fields.pop("machine"), fields.pop("connection")
    interfaces = [
        Interface(name, bool(is_running), tuple(str(ip_interface(network)) for network in networks))
        for name, is_running, networks in found
    ]
    machine = Machine(name, identity, tuple(interfaces), tuple(rdma), connection.get("address", ""))
    return Facts(machine, **fields, not_connected=connection.get("error", ""), clock_skew_s=skew_s)
