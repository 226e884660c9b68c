"""What the hook in a rank's Python tells the agent, without a job: exit codes in every Python that is to be found."""

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
from tests.launcher.job.test_endings import HEAD, WAYS_OUT

UNTOLD = {"os._exit(7)": 7, "os.kill(os.getpid(), 9)": -9, "raise KeyboardInterrupt": -2, "leave(256)": 0}
"""What ends a process without a word of it, and with which code."""


@pytest.fixture(scope="session")
def pythons():
    """The one that runs the tests, and those of other versions that are installed, each once and not by a shim."""
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
    installed = Path("~/.pyenv/versions").expanduser().glob("3.1[0-9].*/bin/python")
    found = [sys.executable, *filter(None, named), *map(str, installed)]
    by_prefix = {}
    for path in found:
        asked = [path, "-c", "import sys; print(sys.base_prefix, sys.executable, sep='\\n')"]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode == 0:
            by_prefix.setdefault(*done.stdout.splitlines())
    return [*by_prefix.values()]


def told(python, source, folder, **variables):
    """The code with which the script `source` ends, and what the hook tells the agent of it."""
    (folder / "script.py").write_text(HEAD + source + "\n")
    error_file = folder / "rank0.json"
    environment = {"PYTHONPATH": HOOK_DIRECTORY, "RINGREDUCE_ERROR_FILE": str(error_file), "PATH": os.environ["PATH"]}
    environment |= variables
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(f"{error_file}.agent")
        done = subprocess.run([python, folder / "script.py"], env=environment, capture_output=True, timeout=60)
        Path(f"{error_file}.agent").unlink()
        agent.setblocking(False)
        said = []
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(json.loads(agent.recv(1000)))
    return done.returncode, said


@pytest.mark.parametrize("way", [*WAYS_OUT, *UNTOLD])
def test_the_agent_is_told_of_an_exit_code_that_ends_the_script(pythons, tmp_path, way):
    heard = [WAYS_OUT[way]] if WAYS_OUT.get(way, 14) != 14 else []
    for python in pythons:
        ended, said = told(python, way, tmp_path)
        assert (ended, [each["exits"] for each in said]) == ((heard or [UNTOLD.get(way, 0)])[0], heard), python


CAUGHT = """
import code
console = code.InteractiveInterpreter()
console.runsource("1 / 0")
sys.excepthook(*(type(sys.last_value), sys.last_value, sys.last_value.__traceback__))
try: leave(7)
except SystemExit as error: print(error.code)
sys.excepthook = print
print(sys.modules["_ringrun_hook"].exit_code(), file=open("code", "w"))
"""


def test_what_a_console_shows_and_a_program_catches_ends_nothing(pythons, tmp_path):
    with contextlib.chdir(tmp_path):
        for python in pythons:
            assert told(python, CAUGHT, tmp_path) == (0, []), python
            assert Path("code").read_text() == "0\n"


@pytest.mark.parametrize(("end", "code"), [("raise ValueError('x')", 1), ("raise SystemExit(7)", 7), ("pass", 0)])
def test_at_its_end_a_process_knows_its_code_whoever_set_the_excepthook(pythons, tmp_path, end, code):
    at_exit = "atexit.register(lambda: print(sys.modules['_ringrun_hook'].exit_code(), file=open('code', 'w')))"
    with contextlib.chdir(tmp_path):
        for python in pythons:
            told(python, f"import atexit\n{at_exit}\nsys.excepthook = print\n{end}", tmp_path)
            assert Path("code").read_text() == f"{code}\n", python


def test_a_process_that_does_not_find_the_hook_can_be_started_with_sys_exit(pythons):
    start = "get_context('spawn').Process(target=sys.exit, args=(5,)); p.start(); p.join()"
    program = f"import pickle, sys; from multiprocessing import *; p = {start}; pickle.dumps(sys.excepthook)"
    for python in pythons:
        done = subprocess.run(
            [python, "-c", f"{program}; print(p.exitcode)"],
            env={"PYTHONPATH": HOOK_DIRECTORY},
            capture_output=True,
            text=True,
        )
        assert (done.stdout, done.stderr) == ("5\n", ""), python


def test_a_code_is_told_before_threads_and_children_are_waited_for(tmp_path):
    say = """time.sleep(0.5), sys.modules['_ringrun_hook']._tell('{"later": 1}')"""
    _, said = told(sys.executable, f"threading.Thread(target=lambda: ({say})).start()\nleave(7)", tmp_path)
    assert [next(iter(each)) for each in said] == ["exits", "later"]


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
TRAINS = HOOK + "import torch; hook.torch_groups = 1; hook.torch_trained_alone = lambda: True"
ALONE = {
    "a program": ("", None, 0),
    "one that computes": ("import numpy", "numpy", 0),
    "with a child": ("import numpy; os.fork()", "numpy", 0),
    "that ends otherwise": ("import numpy; os._exit(0)", None, 0),
    "that fails": ("import numpy; os.kill(os.getpid(), 9)", None, 0),
    "of one rank": ("import numpy; os.environ['WORLD_SIZE'] = '1'", None, 0),
    "of TensorFlow's": ("import numpy; os.environ['TF_CONFIG'] = '{}'", None, 0),
    "of MPI's": (MPI + "import numpy", None, 0),
    "of Lightning's, which loads MPI": (MPI + "import lightning, numpy", "lightning", 0),
    "of torch's, whose groups nobody counts": ("import torch", None, 0),
    "of torch's, without a group": (HOOK + "import torch; hook.torch_groups = 0", "torch", 0),
    "of torch's, with a group": (HOOK + "import torch; hook.torch_groups = 1", None, 0),
    "of torch's, in a group that reduces little": (TRAINS, "torch", 1),
    "of accelerate's, in such a group": ("import accelerate; " + TRAINS, "torch", 1),
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
    with contextlib.chdir(tmp_path):
        _, said = told(sys.executable, source, tmp_path, WORLD_SIZE="2")
    assert said == ([{"alone": alone, "ends": 1, "in_vain": in_vain}] if alone else [])
