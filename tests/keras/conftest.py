"""ringreduce.keras on every rank of a job: end_to_end/test_frameworks.py starts it. See on_ranks.py."""

import pytest

import ringreduce.keras as hvd
from tests.support import on_ranks
from tests.support.on_ranks import pytest_runtest_logreport  # noqa: F401 - a hook


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    hvd.init(process_sets="dynamic")
    on_ranks.start(config)
