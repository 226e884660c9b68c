"""Every name of CuPy that ringreduce uses is in the fake, and in the real CuPy, and takes as many arguments.

The names are read in the source: `cupy().x.y`, `runtime().x`, and what is assigned from them in a function. The real
CuPy is asked in an interpreter of its own, which has no GPU: its modules tell their names without one.
"""

import ast
import functools
import inspect
import json
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import ringreduce
from tests.support import environments, fake_cupy, tiers

pytestmark = [tiers.extended, pytest.mark.timeout(600), pytest.mark.xdist_group("cupy")]

PACKAGE = Path(ringreduce.__file__).parent
ROOTS = {"cupy": "cupy", "runtime": "cupy.cuda.runtime"}
"""The functions of ringreduce/arrays/cuda.py, and what they return."""


class Use(NamedTuple):
    """A name that a file uses; called with so many arguments, or `None`: not called."""

    path: str
    positional: int | None
    keywords: tuple[str, ...]
    where: str


def path_of(node, names):
    """The dotted name of an expression that comes from CuPy, else None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Call) and not node.args:
        called = path_of(node.func, names) or ""
        return ROOTS.get(called.removeprefix("module.")) if called.startswith("module.") else None
    if isinstance(node, ast.Attribute):
        base = path_of(node.value, names)
        return base and f"{base}.{node.attr}"
    return None


def imported(tree):
    """What a file calls ringreduce/arrays/cuda.py ("module"), and its functions."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ringreduce.arrays":
            names.update({each.asname or each.name: "module" for each in node.names if each.name == "cuda"})
        if isinstance(node, ast.ImportFrom) and node.module == "ringreduce.arrays.cuda":
            names.update({each.asname or each.name: f"module.{each.name}" for each in node.names if each.name in ROOTS})
    return names


def uses_in(tree, file, roots):
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = dict(roots)
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    path = path_of(node.value, names) or ""
                    if path.startswith("cupy"):
                        names[node.targets[0].id] = path
            for node in ast.walk(function):
                where = f"{file}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Call) and (path := path_of(node.func, names) or "").startswith("cupy."):
                    yield Use(path, len(node.args), tuple(each.arg for each in node.keywords), where)
                elif isinstance(node, ast.Attribute) and (path := path_of(node, names) or "").startswith("cupy."):
                    yield Use(path, None, (), where)


OWN = {name: f"module.{name}" for name in ROOTS}


@functools.cache
def uses():
    """All of them; read when a test asks, since reading takes seconds."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        roots = OWN if file == PACKAGE / "arrays" / "cuda.py" else imported(tree)
        if roots:
            found.update({use[:3]: use for use in uses_in(tree, file.relative_to(PACKAGE), roots)})
    return sorted(found.values(), key=lambda use: use[:1] + use[3:])


def test_the_names_are_found():
    assert len(uses()) > 20
    assert {"cupy.cuda.runtime.memcpyAsync", "cupy.cuda.Stream", "cupy.cuda.UnownedMemory", "cupy.from_dlpack"} <= {
        use.path for use in uses()
    }
    tree = ast.parse(
        "from ringreduce.arrays import cuda\n"
        "from ringreduce.arrays.cuda import runtime\n"
        "def f():\n"
        "    module = cuda.cupy()\n"
        "    module.cuda.Strem(runtime().getDevise(1), non_blocking=True)"
    )
    assert [use[:3] for use in uses_in(tree, "", imported(tree)) if use.positional is not None] == [
        ("cupy.cuda.Strem", 1, ("non_blocking",)),
        ("cupy.cuda.runtime.getDevise", 1, ()),
    ]


def in_the_fake(path):
    return functools.reduce(getattr, path.split(".")[1:], fake_cupy)


def test_the_fake_has_what_ringreduce_uses():
    for use in uses():
        print(f"{use.where}: {use.path}")
        value = in_the_fake(use.path)
        if use.positional is not None:
            inspect.signature(value).bind(*range(use.positional), **dict.fromkeys(use.keywords))


@pytest.fixture(scope="module")
def real():
    """What the real CuPy says of each name: None, or [its signature or documentation, its value if a number]."""
    python = environments.interpreter("TEST_CUPY_PYTHON", ".venv-test-cupy", "cupy-cuda12x")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = json.dumps(sorted({use.path for use in uses()}))
    command = [python, "-W", "error", Path(__file__).parent / "programs" / "signatures.py"]
    asked = subprocess.run(command, input=paths, env=clean, capture_output=True, text=True, timeout=50)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def parameters(signature, name):
    """(how many must be given, how many may be given by place, the names) of a signature in a documentation's words."""
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
    parts = [each for each in (*parts, part.strip()) if each and each not in ("self", "/")]
    by_place = parts[: parts.index("*")] if "*" in parts else parts
    names = [re.split(r"[=:]", each)[0].split()[-1] for each in parts if each != "*"]
    return sum("=" not in each for each in by_place), len(by_place), names


def test_the_real_cupy_has_what_ringreduce_uses(real):
    for use in uses():
        answer = real[use.path]
        assert answer is not None, f"{use.where}: CuPy has no {use.path}"
        signature, value = answer
        if value is not None:
            assert in_the_fake(use.path) == value
        if use.positional is not None and not use.path.endswith("Error"):
            required, most, names = parameters(signature, use.path.split(".")[-1])
            assert required <= use.positional + len(use.keywords), f"{use.where}: {signature}"
            assert use.positional <= most, f"{use.where}: {signature}"
            assert set(use.keywords) <= set(names), f"{use.where}: {signature}"


def test_signatures_are_read():
    assert parameters("memsetAsync(intptr_t ptr, int value=0)\n\nFoo(1)", "memsetAsync") == (1, 2, ["ptr", "value"])
    assert parameters("(shape: 'A', dtype: 'B[x, y]' = <class 'float'>, *, order='C')", "empty") == (
        1,
        2,
        ["shape", "dtype", "order"],
    )
