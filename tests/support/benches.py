"""Scripts of bench/ as the tests see them: their modules, and the rows that they print and keep."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

PYTHON = Path(sys.executable)
BENCH = ROOT / "bench"
BOTH = f"{BENCH}:{BENCH / 'gpu'}"
MACHINE = ("cores", "processor", "ringreduce", "numpy", "python", "date", "mpi", "mpi4py", "torch")


def bench_module(name):
    """A module of bench/, which is no package: its scripts find each other beside themselves."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


network = bench_module("network")
NO_NETWORK = network.why_not()
between_hosts = pytest.mark.skipif(bool(NO_NETWORK), reason=NO_NETWORK)


def kept_by(finished, folder):
    """The JSON of a bench that ran well."""
    assert finished.returncode == 0, finished.stdout
    return json.loads((folder / "rows.json").read_text())


def outcome(finished, folder, headings=""):
    """The same, after the checks that benches with a picture have in common.  headings: of the printed rows."""
    kept = kept_by(finished, folder)
    assert not headings or len(table(finished, *headings.split())) == len(kept["rows"])
    assert set(MACHINE) <= set(kept["header"])
    assert all(row["wrong"] in (0, None) for row in kept["rows"])
    assert any(row["wrong"] == 0 for row in kept["rows"])
    assert all(row["time_us"] > 0 for row in kept["rows"] if "runs_us" in row and "backward_alone_us" not in row)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    return kept


def table(finished, *headings):
    """The printed rows, as lists of words; the headings stand above them."""
    lines = [re.sub(r"^\[0\] ", "", line) for line in finished.stdout.splitlines()]
    (first,) = (k for k, line in enumerate(lines) if line.split() == list(headings))
    assert lines[first - 2].startswith("# ")
    return [line.split() for line in lines[first + 2 :] if line and not line.startswith("#")]


def files(folder):
    return ["--json", folder / "rows.json", "--plot", folder / "plot.png"]
