"""The folders are layers: a room imports only from rooms below it, and inside of one there is no circle."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringreduce
import ringrun
from tests.support.loops import in_a_loop
from tests.support.sources import parsed

pytestmark = pytest.mark.xdist_group("layers")  # one worker reads the files

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ringreduce.__file__).parent
LAUNCHER = Path(ringrun.__file__).parent

# the rooms of ringreduce/, folders and single files, from the bottom to the top: each imports only from those below
ROOMS = """
errors, kernels < settings < arrays < compression, transport < collectives < execution < gpu, negotiation < monitor <
engine < runtime < api < checks, ps, sweeps < elastic, frameworks, optim, testing < jax, keras, numpy <
dask, mxnet, ray, spark, tensorflow, torch
"""
MOST_ROOMS = 30


def layers(order):
    return [re.findall(r"[\w.]+", row) for row in order.split("<")]


LAYERS = layers(ROOMS)
# who names a module of gpu/, but for its own
KNOW_GPU = {"gpu.stream": {"engine.engine"}, "gpu.backend": {"engine.engine"}}


def height(module):
    room = module.partition(".")[0]
    return next(level for level, row in enumerate(LAYERS) if room in row)


def modules(folder=PACKAGE):
    """The dotted name and the file of each; a folder's own file has the name of the folder."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if name := ".".join(parts[:-1] if parts[-1] == "__init__" else parts):
            yield name, path


@functools.cache
def import_nodes(path):
    """The import statements of a file, wherever they stand."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


@functools.cache
def imports(path):
    """The modules that a file of ringreduce imports from it, wherever and for whatever: for types too."""
    found = []
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ringreduce":
            base = node.module.removeprefix("ringreduce").removeprefix(".")
            for alias in node.names:
                dotted = f"{base}.{alias.name}".strip(".")
                file = PACKAGE / dotted.replace(".", "/")
                found.append(dotted if file.with_suffix(".py").exists() or file.is_dir() else base)
        else:
            found += [a.name.removeprefix("ringreduce.") for a in node.names if a.name.startswith("ringreduce.")]
    return found


def rooms():
    return {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}


def arrows():
    """The rooms that each room with a place in the picture imports from."""
    found = {room: set() for room in rooms() - {"__init__", "mxnet"}}
    for name, path in modules():
        own, others = name.partition(".")[0], {each.partition(".")[0] for each in imports(path)}
        if own in found:
            found[own] |= others & found.keys() - {own}
    return found


def test_every_room_has_its_place_and_there_are_not_too_many():
    assert rooms() - {"__init__"} == {room for row in LAYERS for room in row}
    assert len(rooms()) - 1 <= MOST_ROOMS


@pytest.mark.parametrize("folder", [PACKAGE, LAUNCHER])
def test_every_folder_of_modules_is_a_package(folder):
    """Else an install that is not editable lacks it: setup.py finds packages only."""
    assert {path.parent for path in folder.rglob("*.py") if not (path.parent / "__init__.py").exists()} == set()


def upward(module, imported):
    """Whether an import leads to a room that does not stand below the module's own."""
    own, other = module.partition(".")[0], imported.partition(".")[0]
    return bool(other) and other != own and height(imported) >= height(module)


def test_imports_point_downward():
    assert [
        f"{module} imports {each}" for module, path in modules() for each in imports(path) if upward(module, each)
    ] == []


def test_an_import_that_points_up_is_found():
    assert upward("kernels.half", "settings")
    assert upward("gpu.paths", "negotiation.leader"), "they stand beside each other"
    assert not upward("jax.ops", "runtime.submit")
    assert not upward("torch.local", "torch.wrapped")


def test_the_picture_has_every_room_and_no_import_points_up_in_it():
    drawing = (ROOT / "docs" / "architecture.svg").read_text()
    titles = re.findall(r'x="411".*"bold">(.*)<', drawing)[2:]  # without "in every rank" and "your script"
    rows = [re.findall(r"\w+", text.replace("&#160;", "")) for text in titles]
    drawn = {room: -row for row, names in enumerate(rows) for room in names}
    assert rooms() - drawn.keys() == {"__init__", "mxnet"}
    assert drawn.keys() <= rooms()
    assert [(own, other) for own, others in arrows().items() for other in others if drawn[other] >= drawn[own]] == []


def test_the_page_has_every_arrow():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert dict(re.findall(r"^([a-z]+) +-> (.*)$", page, re.MULTILINE)) == {
        own: " ".join(sorted(others)) or "nothing" for own, others in arrows().items()
    }


def test_inside_of_the_rooms_no_modules_import_each_other():
    graph = {module: {each for each in imports(path) if each != module} for module, path in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which has the circle


def constants(path):
    """The names that a module sets at its top, once for each time."""
    statements = [node for node in parsed(path).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [each for node in statements for each in getattr(node, "targets", None) or [node.target]]
    names = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [each.id for each in names if isinstance(each.ctx, ast.Store)]  # others are those of sys.path and the like


@pytest.mark.parametrize("folder", [PACKAGE, LAUNCHER], ids=["ringreduce", "launcher"])
def test_no_module_sets_a_constant_twice(folder):
    """All its functions see the second value, also those that were written for the first."""
    named = {name: constants(path) for name, path in modules(folder)}
    assert sum(map(len, named.values())) > 200
    assert [(name, each) for name, of in named.items() for each in set(of) if of.count(each) > 1] == []


def test_only_the_engine_knows_the_modules_of_gpus():
    knowing = {}
    for name, path in modules():
        for imported in imports(path):
            if imported.startswith("gpu.") and not name.startswith("gpu."):
                knowing.setdefault(imported, set()).add(name)
    assert knowing == KNOW_GPU


def test_only_the_transport_and_one_module_of_gpus_know_mpi():
    knowing = {name for name, path in modules() if "mpi4py" in {i.split(".")[0] for i in all_imports(path)}}
    assert knowing == {"transport.library", "transport.mpi", "transport.world", "transport.message", "gpu.cuda_aware"}


# the launcher's modules, and folders whose own modules are named only where they stand at different heights
LAUNCHER_LAYERS = layers("""
errors, text, records, hook, horovod < network < arguments, folders, processes, machine, forward <
hosts, ssh, connection.frames, connection.wire, config, elastic < environment <
engines, report, output, connection.link < run_report, connection.queued <
connection.listener < remote < agent, preflight < job <
doctor, pmi, stacks, build, request, twice, run_function < lending, top < cli < join, scaling < __main__
""")


def place_in_launcher(module):
    """The row and the entry of LAUNCHER_LAYERS that a module belongs to."""
    places = [(row, name) for row, names in enumerate(LAUNCHER_LAYERS) for name in names]
    return next((row, name) for row, name in places if f"{module}.".startswith(f"{name}."))


def launcher_imports(path):
    """The launcher's modules that a file of its own imports, all relative."""
    folder = path.relative_to(LAUNCHER).parts[:-1]
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            for alias in node.names:
                dotted = ".".join(filter(None, [*base, alias.name]))
                found = LAUNCHER / dotted.replace(".", "/")
                is_module = found.with_suffix(".py").exists() or found.is_dir()
                yield dotted if is_module else ".".join(filter(None, base))


@in_a_loop(("module", "path"), [each for each in modules(LAUNCHER) if each[1].name != "__init__.py"])
def test_the_launcher_s_imports_point_downward_too(module, path):
    row, own = place_in_launcher(module)
    for imported in launcher_imports(path):
        below, name = place_in_launcher(imported)
        assert below < row or name == own, f"{module} imports {imported}"


def test_the_page_says_what_ranks_import_of_the_launcher():
    wanted = set()
    for _, path in modules():
        for node in import_nodes(path):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [f"{within}{alias.name}".split(".") for alias in node.names]
            wanted |= {name[1] for name in names if name[0] == "ringrun"}
    page = (ROOT / "docs" / "architecture.md").read_text().partition("![The layers")[0]
    of_launcher = page.partition("`launcher/` what")[2]
    assert {re.split(r"[/.]", name)[0] for name in re.findall(r"`([\w/]+\.py)`", of_launcher)} == wanted


def test_the_run_report_is_entered_by_one_door_and_knows_little_of_the_launcher():
    inside, outside = set(), set()
    for module, path in modules(LAUNCHER):
        from_within = module.partition(".")[0] == "run_report"
        for imported in launcher_imports(path):
            if (imported.partition(".")[0] == "run_report") != from_within:
                (inside if from_within else outside).add(imported)
    assert outside == {"run_report"}
    assert inside == {"errors", "text", "records", "output.files", "report.outcome"}


def test_one_picture_shows_every_part_of_the_launcher():
    picture = ast.get_docstring(parsed(LAUNCHER / "__init__.py")).partition("a rank:\n\n")[2]
    parts = {path.name if path.is_dir() else path.stem for path in LAUNCHER.iterdir() if path.suffix in ("", ".py")}
    shown = set(re.findall(r"\w+", picture))
    assert parts - {"__init__", "__main__", "__pycache__"} <= shown


def test_the_picture_of_what_happens_after_a_death_names_files_that_exist():
    recovery = PACKAGE / "runtime" / "recovery"
    picture = ast.get_docstring(parsed(recovery / "__init__.py")).partition("A spare")[0]
    files = re.findall(r"[\w/]+\.py", picture)
    assert len(files) > 5
    assert [
        file for file in files if not any((PACKAGE / folder / file).exists() for folder in ("", "runtime/recovery"))
    ] == []


def test_the_launcher_starts_without_ringreduce():
    program = "import sys, ringrun.cli; print({'ringreduce', 'numpy', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def all_imports(path):
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        else:
            yield from (alias.name for alias in node.names)


def test_what_benches_and_examples_import_from_ringreduce_is_there():
    """Most of them run in the extended tier only."""
    missing = []
    for path in [each for folder in ("bench", "examples", "docs") for each in (ROOT / folder).rglob("*.py")]:
        for node in import_nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ringreduce":
                file = PACKAGE.parent / node.module.replace(".", "/")
                for alias in [each for each in node.names if node.module != "ringreduce"]:
                    source = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
                    is_module = (file / alias.name).with_suffix(".py").exists() or (file / alias.name).is_dir()
                    if not is_module and not (source.exists() and alias.name in defined(source)):
                        missing.append(f"{path.relative_to(ROOT)}: {node.module} has no {alias.name}")
    assert missing == []


def defined(path):
    """The names that a file defines or assigns at its top, or imports."""
    names = set()
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            names.update(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            names.update(each.asname or each.name for each in ast.walk(node) if isinstance(each, ast.alias))
    return names


OF_THE_TREE = {
    "unit": "cupy_names docs examples extras fake_cupy inside layers mutants release",
    "ranks": "architecture pool",
    "launcher": "",
}
"""Tests of no room: of the tree, its pages, and what tests are made of."""


@pytest.mark.parametrize("folder", OF_THE_TREE)
def test_tests_lie_in_the_room_of_what_they_test(folder):
    package = LAUNCHER if folder == "launcher" else PACKAGE
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    files = {path.stem for path in package.glob("*.py")} | set(OF_THE_TREE[folder].split())
    for path in (ROOT / "tests" / folder).rglob("test_*.py"):
        room, *deeper = path.relative_to(ROOT / "tests" / folder).parts
        assert room in folders if deeper else path.stem.removeprefix("test_") in files, path
