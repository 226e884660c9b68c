"""Imports point downward: a file imports only what stands below it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringreduce
import ringrun

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ringreduce.__file__).parent
LAUNCHER = Path(ringrun.__file__).parent

# from the bottom to the top; modules between two < import none of each other
ORDER = """
_version, errors, log, not_there, pickling < mxnet, run_function, checks.setting, checks.fingerprint <
kernels.native < kernels.half < kernels.quantized <
settings, arrays.dtypes, partition, trees < gpu.runtime < gpu.device_selection < arrays.buffer < arrays.gpu_buffer <
arrays.torch_tensor, arrays.dlpack, arrays.memory, checks.scan < compression < ops, arrays.view, fusion < mpi < world <
transport.waiting, transport.futex, transport.counters, transport.traffic < transport.in_flight < transport.base <
transport.window, transport.blocks <
transport.message, transport.threads, transport.subset, monitor.excepthook, monitor.launcher_link, monitor.steps <
monitor.sampling <
collectives.ring, collectives.tree, collectives.bruck, collectives.pairwise <
collectives.direct, collectives.doubling, collectives.halving <
collectives.adasum, startup.clock, collectives.overlap, cost_model, wire_cost <
collectives.shared, collectives.hashed, startup.measure, startup.links <
collectives.compiled, collectives.shared_halves, collectives.shared_in_place, collectives.quantized <
collectives.hierarchical <
execution.signature < execution.submission, checks.blame < monitor.timeline, execution.algorithms <
execution.host, execution.batch < execution.gpu_backend < execution.context < execution.packing <
execution.point_to_point <
execution.halves, execution.allreduce < execution.operations, execution.into_outputs <
execution.executor, execution.opening <
execution.send_receive, execution.shared_arrays, execution.in_slot < execution.across <
execution.channel < execution.lane <
gpu.kernels, gpu.stage, gpu.ipc < gpu.cuda_aware, gpu.nccl, gpu.ipc_allreduce, gpu.stream < gpu.paths <
gpu.allreduce < gpu.backend <
engine.inbox, negotiation.protocol, negotiation.cache <
negotiation.coordinator, negotiation.leader, negotiation.neutral, negotiation.mailbox, negotiation.short <
negotiation.negotiator < negotiation.process_set < negotiation.errors_for < engine.ending < negotiation.negotiation <
monitor.side_job < monitor.recording, monitor.stalls, monitor.reporting < engine.channels < engine.process_sets <
engine.submitting, engine.timeline_control, engine.activity, engine.leaving, engine.polling <
engine.engine < startup.shared_memory < runtime <
recovery.membership, recovery.death_notice, recovery.daemon < recovery.rendezvous < recovery.elastic_runtime <
lifecycle < api.submit, api.world, api.info, api.steps, sampler < api.process_sets, api.arguments <
api.reduce, api.gather, api.broadcast, api.objects, checks.agreement < checks.nan, checks.resum, checks.twice <
checks.switch, checks.comparison < checks.divergence, checks.learning_rates < api.control <
api.ordered, api.own_channel, api.collective < api.common, powersgd, optim.parameters < optim.exchange <
optim.buckets, optim.shards, optim.shared_parameters < optim.reducer, local.options < local.steps <
ps.layout, ps.messages, ps.consistency, ps.arrays < ps.roles < ps.server, ps.worker < sweeps.study <
sweeps.teams < sweeps.trial < sweeps.sweep < optimizer, testing < local.optimizer <
sharded <
elastic.kept, elastic.libraries < elastic.commit, elastic.sampler < elastic.state < elastic.loop < elastic.common <
jax.xla, jax.host < jax.primitive < jax.ops, jax.parts, jax.compiled < jax.steering <
jax.optimizer < jax.local, jax.elastic <
tensorflow.host < tensorflow.ops, tensorflow.parts < tensorflow.training <
keras.ops, keras.saved, keras.parts, keras.committed < keras.together < keras.local <
keras.optimizer, keras.callbacks, keras.elastic < tensorflow.keras <
torch.ops, torch.sparse, torch.groups, torch.sync_batch_norm, torch.ps, torch.parts < torch.hooks, torch.pending <
torch.gradient, torch.wrapped, torch.outline < torch.functions, torch.reducer, torch.adasum_optimizer < torch.optimizer,
torch.shards < torch.sharded < torch.local, torch.elastic <
torch.distributed.tensors, torch.distributed.buckets, torch.distributed.uncompiled, torch.rendezvous <
torch.distributed.work < torch.distributed.operations < torch.distributed.group < torch.bucket_hook
"""


def layers(order):
    return [re.findall(r"[\w.]+", row) for row in order.split("<")]


LAYERS = layers(ORDER)
# the imports that point up: an optimizer is sent to its framework's adapter, inside a function
UPWARD = {("optimizer", name) for name in ("torch", "jax", "keras")} | {
    ("sharded", "torch"),
    ("tensorflow.training", "keras"),
    ("local.optimizer", "torch.local"),
    ("local.optimizer", "jax.local"),
    ("tensorflow.keras", "keras"),  # only a name of it
}
# who names a module of gpu/, but for its own: above its lowest two, that is the engine only
KNOW_GPU = {
    "gpu.runtime": {f"arrays.{name}" for name in ("buffer", "gpu_buffer", "torch_tensor", "dlpack", "view")},
    "gpu.device_selection": {"runtime", "lifecycle", "recovery.elastic_runtime"},
    "gpu.stream": {"engine.engine"},
    "gpu.backend": {"engine.engine"},
}


def height(module):
    return next(level for level, row in enumerate(LAYERS) if module in row)


def modules(folder=PACKAGE):
    for path in sorted(folder.rglob("*.py")):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(folder).with_suffix("").parts), path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ringreduce":
            base = node.module.removeprefix("ringreduce").removeprefix(".")
            for alias in node.names:
                dotted = f"{base}.{alias.name}".strip(".")
                is_module = (PACKAGE / (dotted.replace(".", "/") + ".py")).exists()
                yield dotted if is_module else base
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("ringreduce.") for a in node.names if a.name.startswith("ringreduce."))


def test_every_module_has_its_place():
    assert {name for name, _ in modules()} == {name for row in LAYERS for name in row}


@pytest.mark.parametrize("folder", [PACKAGE, LAUNCHER])
def test_every_folder_of_modules_is_a_package(folder):
    """Else an install that is not editable lacks it: setup.py finds packages only."""
    assert {path.parent for path in folder.rglob("*.py") if not (path.parent / "__init__.py").exists()} == set()


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_downward(module, path):
    for imported in imports(path):
        if (module, imported) not in UPWARD:
            assert height(imported) < height(module), f"{module} imports {imported}"


@pytest.mark.parametrize("path", list(PACKAGE.glob("*/**/__init__.py")), ids=lambda path: path.parent.name)
def test_a_package_imports_nothing_above_its_own_modules(path):
    package = ".".join(path.parent.relative_to(PACKAGE).parts)
    top = max(height(module) for module, _ in modules() if module.startswith(f"{package}."))
    for imported in imports(path):
        assert height(imported) <= top, f"{package} imports {imported}"


def test_every_upward_import_that_is_listed_is_there():
    assert {(module, imported) for module, path in modules() for imported in imports(path)} >= UPWARD


def test_only_arrays_the_choice_of_a_gpu_and_the_engine_know_the_modules_of_gpus():
    knowing = {}
    for name, path in modules():
        for imported in imports(path):
            if imported.startswith("gpu.") and not name.startswith("gpu."):
                knowing.setdefault(imported, set()).add(name)
    assert knowing == KNOW_GPU


def test_only_two_modules_and_two_of_the_transport_know_mpi():
    knowing = {name for name, path in modules() if "mpi4py" in {i.split(".")[0] for i in all_imports(path)}}
    assert knowing == {"mpi", "world", "transport.message", "gpu.cuda_aware"}


# the launcher's modules, and folders whose own modules are named only where they stand at different heights
LAUNCHER_LAYERS = layers("""
errors, text, hook, torch_backend < network < arguments, folders, processes, machine, forward <
hosts, ssh, connection.frames, connection.wire, config, elastic < environment <
engines, report, output, connection.link < run_report, connection.queued, connection.accepting <
connection.listener < remote < agent, preflight < job <
doctor, stacks, build, request, twice < top < cli < join < __main__
""")


def place_in_launcher(module):
    """The row and the entry of LAUNCHER_LAYERS that a module belongs to."""
    places = [(row, name) for row, names in enumerate(LAUNCHER_LAYERS) for name in names]
    return next((row, name) for row, name in places if f"{module}.".startswith(f"{name}."))


def launcher_imports(path):
    """The launcher's modules that a file of its own imports, all relative."""
    folder = path.relative_to(LAUNCHER).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            for alias in node.names:
                dotted = ".".join(filter(None, [*base, alias.name]))
                found = LAUNCHER / dotted.replace(".", "/")
                is_module = found.with_suffix(".py").exists() or found.is_dir()
                yield dotted if is_module else ".".join(filter(None, base))


@pytest.mark.parametrize(("module", "path"), list(modules(LAUNCHER)))
def test_the_launcher_s_imports_point_downward_too(module, path):
    row, own = place_in_launcher(module)
    for imported in launcher_imports(path):
        below, name = place_in_launcher(imported)
        assert below < row or name == own, f"{module} imports {imported}"


def test_one_picture_shows_every_part_of_the_launcher():
    picture = ast.get_docstring(ast.parse((LAUNCHER / "__init__.py").read_text())).partition("a rank:\n\n")[2]
    parts = {path.name if path.is_dir() else path.stem for path in LAUNCHER.iterdir() if path.suffix in ("", ".py")}
    shown = set(re.findall(r"\w+", picture))
    assert parts - {"__init__", "__main__", "__pycache__"} <= shown


def test_the_picture_of_what_happens_after_a_death_names_files_that_exist():
    picture = ast.get_docstring(ast.parse((PACKAGE / "recovery" / "__init__.py").read_text())).partition("A spare")[0]
    files = re.findall(r"[\w/]+\.py", picture)
    assert len(files) > 5
    assert [file for file in files if not any((PACKAGE / folder / file).exists() for folder in ("", "recovery"))] == []


def test_the_launcher_starts_without_ringreduce():
    program = "import sys, ringrun.cli; print({'ringreduce', 'numpy', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def all_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_way_of_one_gradient_names_functions_that_exist():
    way = (ROOT / "docs" / "architecture.md").read_text().partition("The way of one gradient")[2].split("```")[1]
    named = re.findall(r"([\w/]+\.py) ((?:\w+, )*[\w.]+)", way)
    assert len(named) > 15
    for file, functions in named:
        source = (PACKAGE / file).read_text()
        for part in re.findall(r"\w+", functions):
            assert re.search(rf"^ *(def|class) {part}\b", source, re.MULTILINE), f"{file} has no {part}"


def test_the_index_of_tests_names_every_folder_and_each_file_that_no_module_has_given_its_name():
    index = (ROOT / "CONTRIBUTING.md").read_text().partition("### Where is the test of")[2].partition("\n### ")[0]
    roots = {"ringreduce": PACKAGE, "launcher": LAUNCHER}
    folders = {f"{name}/{path.parent.name}" for name, root in roots.items() for path in root.glob("*/__init__.py")}
    assert folders <= set(re.findall(r"`([^`]+)`", index))
    places = {"U": "unit", "R": "ranks", "L": "launcher", "E": "end_to_end"}
    files = {path for place in places.values() for path in (ROOT / "tests" / place).glob("test_*.py")}
    for place, names in re.findall(r"\b([URLE]) ((?:`test_[\w*]+`(?: \([^)]*\))?(?:, )?)+)", index):
        for name in re.findall(r"`(test_[\w*]+)`", names):
            found = set((ROOT / "tests" / places[place]).glob(f"{name}.py"))
            assert found, f"{place} {name}"
            files -= found
    paths = [path.relative_to(root).with_suffix("").parts for root in roots.values() for path in root.rglob("*.py")]
    named = {"_".join(parts[start:]) for parts in paths for start in range(len(parts))} | {each[0] for each in paths}
    assert {path.name for path in files if path.stem.removeprefix("test_") not in named} == set()
