import ast
import collections
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ringreduce as rr
import ringreduce.dask as rr_dask
import ringreduce.ray as rr_ray
import ringreduce.spark as rr_spark
from ringreduce.arrays import cuda
from ringreduce.sweeps.study import Study
from tests.support.loops import in_a_loop
from tests.support.sources import parsed

MODULES = ["ringreduce", "ringreduce.torch"]


@in_a_loop("module", MODULES)
@in_a_loop(
    ("name", "says"),
    [
        ("run_elastic", "it is in ringreduce.spark; elsewhere start a script with `ringrun --elastic -np N"),
        ("RayHostDiscovery", r"Ray itself tells ElasticRayExecutor which hosts there are"),
        ("callbacks", "they are for Keras, in ringreduce.keras.callbacks"),
        ("mxnet", "MXNet was archived in 2023"),
        ("no_such_thing", "has no attribute 'no_such_thing'$"),
    ],
)
def test_what_is_not_there_yet_says_so(module, name, says):
    package = pytest.importorskip(module) if module.endswith("torch") else importlib.import_module(module)
    assert not hasattr(package, name)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'.*{says}|{says}"):
        getattr(package, name)


@pytest.mark.parametrize(("module", "library"), [("jax", "JAX"), ("keras", "Keras 3"), ("tensorflow", "TensorFlow 2")])
def test_without_its_framework_an_adapter_says_what_to_install(monkeypatch, module, library):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(rr.MissingExtraError, match=rf"needs {library}; .*: pip install {module}$"):
        importlib.import_module(f"ringreduce.{module}")
    assert f"ringreduce.{module}" not in sys.modules


@pytest.mark.parametrize(("module", "library"), [("jax", "JAX"), ("keras", "Keras 3"), ("tensorflow", "TensorFlow 2")])
def test_a_framework_that_lacks_something_itself_is_not_called_missing(monkeypatch, tmp_path, module, library):
    (tmp_path / f"{module}.py").write_text("import what_it_needs_itself")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    why = f"ringreduce.{module} needs {library}, which is installed but cannot be imported: No module named 'what_it_n"
    with pytest.raises(rr.MissingExtraError, match=why):
        importlib.import_module(f"ringreduce.{module}")


WITHOUT = [
    ("arrays/cuda.py", "cupy", "GPU arrays need CuPy", "'cupy-cuda12x", cuda.cupy),
    ("dask/tasks.py", "distributed", "ringreduce.dask needs Dask", "distributed", lambda: rr_dask.run(len)),
    ("dask/tasks.py", "distributed", "ringreduce.dask needs Dask", "distributed", lambda: rr_dask.map(len)),
    ("ray/tasks.py", "ray", "ringreduce.ray needs Ray", "ray", lambda: rr_ray.run(len)),
    ("ray/tasks.py", "ray", "ringreduce.ray needs Ray", "ray", lambda: rr_ray.RayExecutor(num_workers=1).start()),
    ("ray/tasks.py", "ray", "ringreduce.ray needs Ray", "ray", lambda: rr_ray.ElasticRayExecutor().run(len)),
    ("spark.py", "pyspark", "ringreduce.spark needs PySpark", "pyspark", lambda: rr_spark.run(len)),
    ("spark.py", "pyspark", "ringreduce.spark needs PySpark", "pyspark", lambda: rr_spark.run_elastic(len)),
    ("spark.py", "pyspark", "ringreduce.spark needs PySpark", "pyspark", lambda: next(rr_spark.rank(len)([]))),
    ("sweeps/study.py", "optuna", "sweep needs Optuna", "optuna", lambda: Study(1, None, "", "minimize", {})),
]


@pytest.mark.parametrize(("_", "module", "needs", "install", "call"), WITHOUT)
def test_without_its_package_a_function_says_what_to_install(monkeypatch, _, module, needs, install, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(rr.MissingExtraError, match=rf"^{needs}; install it with: pip install {install}"):
        call()


@pytest.mark.parametrize(("_", "module", "needs", "install", "call"), [each for each in WITHOUT if "/tasks" in each[0]])
def test_a_folder_of_that_name_beside_the_script_is_not_the_package(
    monkeypatch, tmp_path, _, module, needs, install, call
):
    folder = types.ModuleType(module)
    folder.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, module, folder)
    with pytest.raises(rr.MissingExtraError, match=rf"^{needs}; install it with: pip install {install}"):
        call()


def test_these_are_all_that_say_what_to_install():
    package = Path(rr.__file__).parent
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if "Error.of(" in path.read_text()}
    adapters = {f"{each}/__init__.py" for each in ("jax", "keras", "tensorflow", "torch")}
    assert files == adapters | {file for file, *_ in WITHOUT}


def test_an_old_keras_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(__version__="2.15.0"))
    with pytest.raises(
        rr.MissingExtraError, match=r"needs Keras 3, but Keras 2\.15\.0 is installed; pip install --upg"
    ):
        importlib.import_module("ringreduce.keras")


def test_mxnet_is_no_more():
    with pytest.raises(ImportError, match=r"ringreduce\.mxnet: MXNet was archived in 2023"):
        importlib.import_module("ringreduce.mxnet")


FRAMEWORKS = {"cupy", "jax", "keras", "ml_dtypes", "mpi4py", "optax", "tensorflow", "torch"}


@pytest.mark.parametrize(
    ("used", "loads"),
    [
        ("rr", set()),
        ("rr.InputError, rr.Sum", {"errors", "collectives.ops"}),
        (
            "[getattr(rr, name) for name in rr.__all__], rr.elastic, rr.ps",
            {"errors", "collectives.ops", "runtime", "elastic", "ps"},
        ),
    ],
)
def test_an_import_loads_what_is_used_and_no_framework(used, loads):
    """What a data loader's worker pays for that imports its rank's script, and never calls init()."""
    program = f"import sys, ringreduce as rr; {used}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert not modules & FRAMEWORKS
    ours = {"errors", "collectives.ops", "runtime", "elastic", "ps"}
    assert {name for name in ours if f"ringreduce.{name}" in modules} == loads


def test_the_public_names_are_those_of_their_modules():
    names_of = collections.defaultdict(set)
    for name in rr.__all__:
        names_of[rr._module_of[name]].add(name)
    for name, names in names_of.items():
        module = importlib.import_module(name)
        assert all(getattr(rr, each) is getattr(module, each) for each in names)
        if hasattr(module, "__all__") and module.__name__ != "ringreduce.sweeps":
            assert names == set(module.__all__)
    stub = parsed(Path(rr.__file__).with_suffix(".pyi"))
    told = {each.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert told == rr._module_of, "as a type checker reads it"
    assert set(rr.__all__) < set(dir(rr))
    files = {path.stem for path in Path(rr.__file__).parent.iterdir()}
    assert not files & set(rr.__all__), "importing a module puts it in the place of what has its name"
