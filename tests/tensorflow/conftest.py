"""ringreduce.tensorflow on every rank of a job: end_to_end/test_frameworks.py starts it. See on_ranks.py."""

import pytest
import tensorflow as tf

import ringreduce.tensorflow as hvd
from tests.support import on_ranks
from tests.support.on_ranks import found, pytest_runtest_logreport  # noqa: F401 - a fixture and a hook


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    tf.get_logger().setLevel("ERROR")  # it warns of functions that are traced often
    hvd.init(process_sets="dynamic")
    on_ranks.start(config)


@pytest.fixture(params=["eagerly", "in a function"])
def run(request):
    """run(function) is the function itself, or tf.function of it."""
    return tf.function if request.param == "in a function" else lambda function: function
