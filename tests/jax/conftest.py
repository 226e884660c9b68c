"""ringreduce.jax on every rank of a job: end_to_end/test_frameworks.py starts it, where JAX is. See on_ranks.py."""

import jax
import pytest

import ringreduce.jax as hvd
from tests.support import on_ranks

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)  # programs of one device run on the first


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    hvd.init(process_sets="dynamic")
    on_ranks.start(config)


def pytest_runtest_logreport(report):
    on_ranks.end_the_job_if_failed(report)


@pytest.fixture(params=["eagerly", "in jit"])
def run(request):
    """run(function) is the function itself, or the jitted one."""
    return jax.jit if request.param == "in jit" else lambda function: function
