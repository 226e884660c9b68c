"""Runs the examples as a user would: with the `ringrun` that stands beside this Python."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import jobs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Ringrun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def ringrun(tmp_path_factory):
    """ringrun(size, *python_arguments) runs that many ranks of this Python; it must end with `returncode`.

    flags: of ringrun itself.
    """
    directory = tmp_path_factory.mktemp("cwd")
    python = Path(sys.executable)

    def run(size, *arguments, returncode=0, flags=()):
        flags = [*jobs.start_timeout(), *flags]
        ended = jobs.run([jobs.ringrun(python), "-np", size, *flags, python, *arguments], cwd=directory)
        assert ended.returncode == returncode, f"{ended.stdout}\n{ended.stderr}"
        return ended

    return run


@pytest.fixture(scope="session")
def examples():
    return EXAMPLES


@pytest.fixture(scope="session")
def lines():
    """The lines that rank 0 printed, without ringrun's `[0] `; no other rank may have printed any."""

    def unprefixed(text):
        prefixed = text.rstrip("\n").split("\n")
        assert all(line.startswith("[0]") for line in prefixed), text
        return [line[4:] for line in prefixed]

    return unprefixed
