"""pytest, and each test that fails again, alone, twice: red is what fails all three times.

    python -m tests.support.again -m extended --minutes 10 --part $(git rev-parse HEAD)

The last lines name what failed and then passed, with the seeds of the day: it is flaky, mend it first. The exit
code is pytest's, or 0 when all that failed is flaky. More failures than MOST are no accident, and are not run again.
"""

import os
import subprocess
import sys

import pytest

MOST = 5
TRIES = 2


class Failures:
    """A plugin: what has failed, in setup, call or teardown."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Once for each phase of each test."""
        if report.failed:
            self.names[report.nodeid] = None


def passes(name: str) -> bool:
    """Run one test in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:cacheprovider", name]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments; return the exit code."""
    failures = Failures()
    code = pytest.main(arguments, plugins=[failures])
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.names) <= MOST:
        return int(code)
    verdicts = {}
    for name in failures.names:
        tries = next((number for number in range(1, TRIES + 1) if passes(name)), 0)
        verdicts[name] = f"FLAKY: failed, passed when run again ({tries} of {TRIES})" if tries else "FAILED three times"
    print(f"\n--- failures, run again alone, with TEST_SEED={os.environ.get('TEST_SEED')}")
    for name, verdict in verdicts.items():
        print(f"{verdict}: {name}", flush=True)
    return int(any(verdict.startswith("FAILED") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
