"""Which exit code the hook in a rank's Python tells the agent, without a job: in every Python that is to be found."""

import contextlib
import json
import os
import shutil
import socket
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


MPI = "import mmap\nwith open('libmpi.so', 'w+b') as file: file.truncate(1); mapped = mmap.mmap(file.fileno(), 1)\n"
HOOK = "hook = sys.modules['_ringrun_hook']\n"
JAX = "import argparse, jax._src.distributed as d; d.global_state = argparse.Namespace(num_processes=%d)"
ACCELERATE = (
    "import argparse, enum, torch, accelerate.state as state\n"
    "Kind = enum.Enum('Kind', [('NO', 'NO'), ('MULTI_CPU', 1)])\n"
    "state.PartialState = argparse.Namespace(_shared_state={'distributed_type': Kind.%s})\n"
    + HOOK
    + "hook.torch_groups = 1\n"
)
ALONE = {
    "a program": ("", None, 0),
    "one that computes": ("import numpy", "numpy", 0),
    "with a child": ("import numpy; os.fork()", "numpy", 0),
    "that ends otherwise": ("import numpy; os._exit(0)", None, 0),
    "that fails": ("import numpy; leave(3)", None, 0),
    "of one rank": ("import numpy; os.environ['WORLD_SIZE'] = '1'", None, 0),
    "of TensorFlow's": ("import numpy; os.environ['TF_CONFIG'] = '{}'", None, 0),
    "of MPI's": (MPI + "import numpy", None, 0),
    "of Lightning's, which loads MPI": (MPI + "import lightning, numpy", "lightning", 0),
    "of torch's, whose groups nobody counts": ("import torch", None, 0),
    "of torch's, without a group": (HOOK + "import torch; hook.torch_groups = 0", "torch", 0),
    "of torch's, with a group": (HOOK + "import torch; hook.torch_groups = 1", None, 0),
    "of JAX's": (JAX % 1, "jax", 0),
    "of JAX's, with others": (JAX % 2, None, 0),
    "of accelerate's": (ACCELERATE % "MULTI_CPU", None, 0),
    "of accelerate's, which uses no group": (ACCELERATE % "NO", "accelerate", 1),
    "of accelerate's, with MPI beside it": (MPI + ACCELERATE % "NO", None, 0),
    "of accelerate's, with MPI for its group": (
        MPI + ACCELERATE % "NO" + "hook.torch_started_mpi = True",
        "accelerate",
        1,
    ),
}


@pytest.mark.parametrize("program", ALONE)
def test_a_rank_that_has_computed_and_joined_no_other_says_so_at_its_end(tmp_path, program):
    source, alone, in_vain = ALONE[program]
    for module in ("numpy", "lightning", "torch", "jax/_src/distributed", "accelerate/state"):
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with contextlib.chdir(tmp_path), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "rank0.json.agent"))
        told(sys.executable, source, tmp_path, WORLD_SIZE="2")
        agent.setblocking(False)
        said = []
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(json.loads(agent.recv(1000)))
    assert said == ([{"alone": alone, "ends": 1, "in_vain": in_vain}] if alone else [])
