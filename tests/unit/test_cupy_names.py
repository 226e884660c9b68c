"""What the fake CuPy has, the real one has, too, with the same parameters: so what ringreduce calls is there.

The real CuPy is asked in an interpreter of its own, which has no GPU: its modules tell their names without one.
"""

import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import environments, fake_cupy, tiers

pytestmark = [tiers.extended, pytest.mark.timeout(600), pytest.mark.xdist_group("cupy")]
MODULES = {"cupy": fake_cupy.arrays, "cupy.cuda": fake_cupy.cuda, "cupy.cuda.runtime": fake_cupy.cuda.runtime}
OWN = ("PooledMemory", "memory", "HANDLE_BYTES")
"""What only the fake has."""


def of(namespace, module):
    """The functions, classes and numbers that are made in a module, by name."""
    for name, value in vars(namespace).items():
        made_here = getattr(value, "__module__", module) == module and getattr(value, "__name__", name) == name
        if made_here and name not in OWN and not name.startswith("_") and isinstance(value, int | Callable):
            yield name, value


def names():
    """Of the fake, by their paths; with the methods of classes."""
    found = {"cupy.RawModule": fake_cupy.RawModule}
    for path, module in MODULES.items():
        for name, value in of(module, module.__name__):
            found[f"{path}.{name}"] = value
            if isinstance(value, type):
                found |= {f"{path}.{name}.{method}": each for method, each in of(value, module.__name__)}
    return found


@pytest.fixture(scope="module")
def real():
    """What the real CuPy says of each name: None, or [its signature or documentation, its value if a number]."""
    python = environments.interpreter("TEST_CUPY_PYTHON", ".venv-test-cupy", "cupy-cuda12x")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-W", "error", Path(__file__).parent / "programs" / "signatures.py"]
    asked = subprocess.run(command, input=json.dumps([*names()]), env=clean, capture_output=True, text=True, timeout=50)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def parameters(signature, name):
    """The names of a signature in a documentation's words, and which of them must be given."""
    begin = re.search(rf"(?:^|\b(?:{name}|__init__))\(", signature)
    assert begin, f"{name}: no signature in {signature[:80]!r}"
    depth, parts, part = 1, [], ""
    for character in signature[begin.end() :]:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if depth == 0:
            break
        if character == "," and depth == 1:
            parts, part = [*parts, part.strip()], ""
        else:
            part += character
    parts = [each for each in (*parts, part.strip()) if each and each not in ("self", "/", "*")]
    read = {re.split(r"[=:]", each)[0].split()[-1]: "=" not in each for each in parts}
    return [*read], [each for each in read if read[each]]


def test_the_real_cupy_has_what_the_fake_has(real):
    assert len(real) > 70
    for path, fake in names().items():
        assert real[path] is not None, f"CuPy has no {path}"
        signature, value = real[path]
        if isinstance(fake, int):
            assert value == fake, path
        elif signature:
            own = [each for each in inspect.signature(fake).parameters.values() if each.kind != each.VAR_KEYWORD]
            given, required = parameters(signature, path.split(".")[-1])
            needed = {each.name for each in own if each.default is each.empty}
            assert any(each.kind == each.VAR_POSITIONAL for each in own) or {*required} <= needed, (
                f"{path}: {signature}"
            )
            named = {each.name for each in own if each.kind != each.VAR_POSITIONAL} - {"self"}
            assert named <= {*given}, f"{path}: {signature}"
