"""The run report names who keeps the ranks of real jobs waiting, and why. Hosts and links: tests/cluster."""

import json

import pytest

from tests.end_to_end.conftest import PROGRAMS
from tests.support import jobs


@pytest.mark.parametrize(
    ("kind", "expected", "where"),
    [
        ("rank", "computes longer", 'if (kind == "rank"'),
        ("loader", "data loader", "LATE_S * (rr"),
        ("core", "core shared", ""),
    ],
)
def test_a_made_straggler_is_first_with_its_kind(kind, expected, where, python, tmp_path):
    program = PROGRAMS / "straggles.py"
    jobs.run([jobs.ringrun(python), "-np", 2, "--report", tmp_path, python, program, kind], timeout_s=120, returncode=0)
    first = json.loads((tmp_path / "report.json").read_text())["stragglers"][0]
    assert (first["who"], first["kind"]) == ("rank 1", expected)
    assert first["delay_ms"] > 0
    if where:
        file, _, line = first["where"].partition(":")
        assert (file, where in "".join(program.read_text().splitlines()[int(line) - 2 : int(line)])) == (
            program.name,
            True,
        )
