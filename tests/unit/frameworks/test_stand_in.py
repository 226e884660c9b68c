"""What `import horovod` finds in jobs of `ringrun --horovod`: every public name of Horovod 0.28.1, or what to use."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys

import pytest

import ringreduce
import ringreduce.ray
import ringreduce.spark
import ringreduce.torch
from ringreduce.frameworks.horovod import INSTEAD, MODULES, instead
from ringrun.environment import HOROVOD_DIRECTORY
from tests.support.loops import in_a_loop
from tests.support.names import standing_in, unexplained


@pytest.fixture(autouse=True)
def horovod():
    with standing_in():
        yield importlib.import_module("horovod")


def imported(line):
    """What this line leaves under its last name."""
    names = {}
    exec(line, names)
    return names[line.split()[-1]]


@in_a_loop("prefix", [f"horovod.{each}" for each in ("torch", "common", "data", "ray", "runner", "spark")])
def test_every_name_is_there_or_says_what_to_use(prefix):
    assert unexplained(prefix) == []


def test_the_table_names_nothing_twice_and_explains_only_names_that_there_are():
    everything = {name for module in MODULES.values() for name in module.names.split()}
    for module in MODULES.values():
        names = module.names.split()
        assert names == sorted(set(names))
    assert len(instead()) == sum(len(names.split()) for names in INSTEAD)
    ways_of_changed_imports = {"keras", "mxnet", "tensorflow", "torch"}
    submodules = {name.rpartition(".")[2] for name in MODULES}
    assert instead().keys() - everything - submodules <= ways_of_changed_imports


OF_TWO = "in ringreduce.tensorflow and ringreduce.keras use "


@pytest.mark.parametrize("module", [ringreduce, ringreduce.torch])
def test_a_function_that_is_to_be_used_instead_is_in_the_module_that_was_asked(module):
    texts = [re.sub(f"{OF_TWO}\\w+", "", text) for text in instead().values()]
    named = {name for text in texts for name in re.findall(r"(?<![\w.])(\w+)\(", text)}
    named -= {"run", "state_dict", "load_state_dict"}  # of a module that is named, too, or of the user's objects
    assert {"broadcast_parameters", "broadcast_object", "cuda_built", "rank"} <= named, "or this test finds nothing"
    assert {name for name in named if not hasattr(module, name)} == set()


@in_a_loop(
    ("line", "ours"),
    [
        ("import horovod.torch as hvd", "torch"),
        ("from horovod.torch.mpi_ops import allreduce_async_", "torch.allreduce_async_"),
        ("from horovod.torch import PowerSGD", "torch.PowerSGD"),
        ("from horovod.torch.elastic.sampler import ElasticSampler", "torch.elastic.ElasticSampler"),
        ("from horovod.torch.elastic.state import broadcast_object", "broadcast_object"),
        ("from horovod.common.exceptions import HorovodInternalError", "HorovodInternalError"),
        ("from horovod.common.process_sets import global_process_set", "global_process_set"),
        ("from horovod.torch.compression import FP16Compressor", "Compression.fp16"),
        ("from horovod.common.util import gloo_built", "gloo_built"),
        ("from horovod.runner import run", "run"),
        ("from horovod import run", "run"),
        ("from horovod.ray import RayExecutor", "ray.RayExecutor"),
        ("from horovod.ray import ElasticRayExecutor", "ray.ElasticRayExecutor"),
        ("from horovod.spark import run_elastic", "spark.run_elastic"),
    ],
)
def test_what_scripts_and_libraries_import_is_ringreduces(line, ours):
    found, wanted = imported(line), ringreduce
    for name in ours.split("."):
        wanted = getattr(wanted, name)
    if ours == "torch":  # a module of its own, with the same functions
        assert (found.__name__, found.rank, found.elastic.run) == ("horovod.torch", wanted.rank, wanted.elastic.run)
        assert found.mpi_ops.Sum is wanted.Sum, "ignite does not import it"
        assert {"rank", "DistributedOptimizer", "elastic"} <= {*dir(found), *found.__all__, "elastic"}
    else:
        assert found is wanted


def test_libraries_that_look_for_it_find_it(horovod):
    assert horovod.__version__ == importlib.metadata.version("horovod") == "0.28.1"
    assert importlib.util.find_spec("horovod")
    assert importlib.util.find_spec("horovod.torch.elastic.state")
    assert importlib.util.find_spec("horovod.no_such_thing") is None


@in_a_loop(
    ("line", "says"),
    [
        ("from horovod.torch import check_extension", "from 'horovod.torch': `ringrun --check-build` prints"),
        ("from horovod.torch.elastic.state import StateHandler", "a state takes any object with state_dict"),
        ("from ringreduce.torch import check_extension", "from 'ringreduce.torch': `ringrun --check-build` prints"),
        ("import horovod.mxnet", "there is no horovod.mxnet in ringreduce: MXNet was archived"),
        ("from horovod.runner.launch import run_commandline", "ranks are started by `ringrun`"),
        ("from horovod.spark.keras import KerasEstimator", "there are no estimators, see docs/choose.md"),
        ("from horovod.ray.elastic import RayHostDiscovery", "which hosts there are; leave settings.discovery out"),
        ("from horovod.ray.strategy import PackStrategy", "ringreduce.ray has RayExecutor"),
        ("from horovod.torch import no_such_thing", "cannot import name 'no_such_thing' from 'horovod.torch'"),
    ],
)
def test_an_import_of_what_is_missing_says_so(line, says):
    with pytest.raises(ImportError) as caught:
        imported(line)
    assert says in str(caught.value)


def test_looking_for_a_name_that_is_missing_raises_no_import_error():
    hvd = importlib.import_module("horovod.torch")
    assert not hasattr(hvd, "check_extension")
    assert not hasattr(ringreduce.torch, "check_extension")
    assert not hasattr(importlib.import_module("horovod"), "mxnet")


def test_horovod_alone_imports_no_framework():
    program = "import sys, horovod.common.util, horovod.runner; print({'torch', 'keras', 'mpi4py'} & set(sys.modules))"
    environment = {"PYTHONPATH": HOROVOD_DIRECTORY}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
