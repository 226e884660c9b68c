"""Which exit code the hook in a rank's Python tells the agent, without a job: in every Python that is to be found."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringrun.environment import HOOK_DIRECTORY
from tests.launcher.test_endings import HEAD, WAYS_OUT


@pytest.fixture(scope="session")
def pythons():
    """The one that runs the tests, and those of other versions that are installed."""
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
    installed = Path("~/.pyenv/versions").expanduser().glob("3.1[0-9].*/bin/python")
    found = [sys.executable, *filter(None, named), *map(str, installed)]
    return [path for path in found if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]


def told(python, source, folder, **variables):
    """What the hook leaves for the agent when the script `source` has ended."""
    (folder / "script.py").write_text(HEAD + source + "\n")
    error_file = folder / "rank0.json"
    environment = {"PYTHONPATH": HOOK_DIRECTORY, "RINGREDUCE_ERROR_FILE": str(error_file), "PATH": os.environ["PATH"]}
    subprocess.run([python, folder / "script.py"], env=environment | variables, capture_output=True, timeout=60)
    left = folder / "rank0.json.exit"
    text = left.read_text() if left.exists() else None
    left.unlink(missing_ok=True)
    return text


@pytest.mark.parametrize("way", WAYS_OUT)
def test_the_agent_is_told_of_an_exit_code_that_ends_the_script(pythons, tmp_path, way):
    expected = None if WAYS_OUT[way] == 14 else str(WAYS_OUT[way])  # 14: nothing is told there
    assert {python: told(python, way, tmp_path) for python in pythons} == dict.fromkeys(pythons, expected)


@pytest.mark.parametrize("broken", ["sys.version_info = (3, 99)", "opcode.opname = []"])
def test_a_python_that_nobody_knows_yet_takes_an_exit_for_the_end(tmp_path, broken):
    reraised = f"import opcode, sys\n{broken}\ntry: leave(7)\nfinally: print('tidied up')"
    assert told(sys.executable, reraised, tmp_path) == "7"
    went_on = f"import opcode, sys\n{broken}\ndef caught():\n    try: leave(7)\n    except SystemExit: pass\ncaught()"
    assert told(sys.executable, went_on, tmp_path) is None, "it was caught below the outermost frame"
