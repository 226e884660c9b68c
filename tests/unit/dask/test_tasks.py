"""When the tasks of a Dask cluster cannot lend, without Dask; jobs: end_to_end/test_dask.py."""

import types

import pytest

from ringreduce.dask import tasks
from ringrun import lending


class Client:
    """Of Dask: its futures fail on these workers, at once."""

    def __init__(self, failing):
        self.failing = failing

    def submit(self, function, ticket, *, workers, **_):
        (name,) = workers
        status = "error" if name in self.failing else "pending"
        return types.SimpleNamespace(status=status, exception=lambda: RuntimeError(f"{name} cannot lend"))


@pytest.mark.parametrize(
    ("elastic", "comes", "failing", "expected"),
    [
        (False, False, "b", "b cannot lend"),
        (True, False, "b", ""),
        (True, False, "ab", "a cannot lend"),
        (True, True, "a", ""),
        (True, True, "ab", ""),
        (True, True, "abc", "a cannot lend"),
    ],
)
def test_an_elastic_job_ends_only_where_no_worker_can_lend(monkeypatch, elastic, comes, failing, expected):
    """c comes later, where those that do are used."""
    monkeypatch.setattr(tasks, "_LOOK_FOR_MORE_S", 0.0)
    ticket = lending.Ticket(("127.0.0.1",), 1, "key", 1.0)
    look = (lambda: ["a", "b", "c"]) if comes else None
    assert tasks._Lenders(Client(failing), ticket, ["a", "b"], look, 3, elastic).trouble() == expected
