"""ringreduce.keras on every rank of a job: end_to_end/test_frameworks.py starts it. See on_ranks.py."""

import pytest

import ringreduce.keras as hvd
from ringreduce.settings.log import JOB
from tests.support import on_ranks
from tests.support.on_ranks import found, pytest_runtest_logreport  # noqa: F401 - a fixture and a hook


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    hvd.init(process_sets="dynamic")
    on_ranks.start(config)


@pytest.fixture
def said(monkeypatch):
    """What the log warns of."""
    texts = []
    monkeypatch.setattr(JOB, "warning", texts.append)
    return texts
