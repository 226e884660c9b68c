"""ringreduce.keras on every rank of a job: end_to_end/test_frameworks.py starts it. See on_ranks.py."""

import pytest

import ringreduce.keras as hvd
from tests.support import on_ranks


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    hvd.init(process_sets="dynamic")
    on_ranks.start(config)


def pytest_runtest_logreport(report):
    on_ranks.end_the_job_if_failed(report)
