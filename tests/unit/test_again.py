"""tests/support/again.py: what CI makes of tests that fail."""

import re
import sys

import pytest

from tests.support import jobs
from tests.support.tiers import extended

FAILS = """
import pathlib, pytest

@pytest.mark.parametrize("times", [{times}])
def test_fails(times):
    with pathlib.Path("runs-%d" % times).open("a") as file:
        file.write("x")
        assert file.tell() > times
"""


@pytest.mark.parametrize(
    ("times", "code", "told"),
    [
        pytest.param([0], 0, [], marks=extended),
        pytest.param([0, 1, 2], 0, [("FLAKY", "1"), ("FLAKY", "2")], marks=extended),
        ([1, 3], 1, [("FLAKY", "1"), ("FAILED", "3")]),
        pytest.param(range(1, 7), 1, [], marks=extended),
    ],
    ids=["passes", "flaky", "one fails", "too many"],
)
def test_what_fails_three_times_is_red_and_what_passes_then_is_named(tmp_path, times, code, told):
    (tmp_path / "test_it.py").write_text(FAILS.format(times=",".join(map(str, times))))
    command = [sys.executable, jobs.ROOT / "tests" / "support" / "again.py", "-n", "0", "-q", "test_it.py"]
    done = jobs.run(command, cwd=tmp_path, env=jobs.environment(TEST_SEED="20260722"), returncode=code)
    assert re.findall(r"^(FLAKY|FAILED)\b.*: test_it\.py::test_fails\[(\d)\]$", done.stdout, re.MULTILINE) == told
    assert ("TEST_SEED=20260722" in done.stdout) == bool(told)


def test_what_is_no_tests_failure_keeps_its_code(tmp_path):
    command = [sys.executable, jobs.ROOT / "tests" / "support" / "again.py", "-n", "0", "nowhere.py"]
    assert jobs.run(command, cwd=tmp_path).returncode == pytest.ExitCode.USAGE_ERROR
