"""ringreduce.jax on every rank of a job: end_to_end/test_frameworks.py starts it, where JAX is. See on_ranks.py."""

import jax
import pytest

import ringreduce.jax as hvd
from tests.support import on_ranks
from tests.support.on_ranks import found, pytest_runtest_logreport  # noqa: F401 - a fixture and a hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)  # programs of one device run on the first


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    hvd.init(process_sets="dynamic")
    on_ranks.start(config)


RUNS = {"eagerly": lambda function: function, "in jit": jax.jit, "in hvd.jit": hvd.jit}


@pytest.fixture(params=RUNS)
def run(request):
    """run(function) is the function itself, or the jitted one."""
    return RUNS[request.param]


@pytest.fixture(params=[jax.jit, hvd.jit], ids=["jit", "hvd.jit"])
def jit(request):
    return request.param
