"""When the tasks of a Dask cluster cannot lend, without Dask; jobs: end_to_end/test_dask.py."""

import sys
import types

import pytest

from ringreduce.dask import map as map_
from ringreduce.dask import tasks
from ringreduce.errors import InputError
from ringrun import lending
from tests.support.loops import in_a_loop


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


def test_no_more_workers_lend_than_there_may_be_ranks_and_one_that_comes_again_does(monkeypatch):
    monkeypatch.setattr(tasks, "_LOOK_FOR_MORE_S", 0.0)
    there = ["a", "b", "c", "d"]
    lenders = tasks._Lenders(Client(""), lending.Ticket((), 1, "", 1.0), ["a"], lambda: there, 3, True)
    lenders.trouble()
    first = dict(lenders.futures)
    assert list(first) == ["a", "b", "c"]
    there.remove("a")
    lenders.trouble()
    assert list(lenders.futures) == ["b", "c", "d"], "in the place of one that has gone"
    there[:] = ["a", "b", "c"]
    lenders.trouble()
    assert lenders.futures["a"] is not first["a"]
    assert lenders.futures["b"] is first["b"], "it lends all the time"


class Cluster:
    """A client of one with workers 0 and "b", on hosts y and x; or one that is closed."""

    def __init__(self, is_closed=False):
        workers = {"tcp://1": {"name": 0, "host": "y"}, "tcp://2": {"name": "b", "host": "x"}}
        self.info = {} if is_closed else {"workers": workers}

    def scheduler_info(self, n_workers):
        return self.info


@in_a_loop(
    ("wanted", "expected"),
    [
        (None, ["tcp://2", "tcp://1"]),
        (0, ["tcp://1"]),
        ("b", ["tcp://2"]),
        ([0, "tcp://2"], ["tcp://2", "tcp://1"]),
    ],
)
def test_workers_are_wanted_by_name_or_address(wanted, expected):
    assert tasks.workers_of(Cluster(), wanted, "here") == expected


@in_a_loop(
    ("client", "wanted", "message"),
    [
        (
            Cluster(),
            [0, "typo", 7],
            r"workers=\[0, 'typo', 7\]: the cluster has none called \[7, 'typo'\]; it has \[0, 'b'\]",
        ),
        (Cluster(), 1, r"workers=1: the cluster has none called \[1\]; it has"),
        (Cluster(), [], r"the cluster has no workers \[\]"),
        (Cluster(is_closed=True), None, "this Dask client is closed; pass one that is connected to a cluster"),
    ],
)
def test_workers_that_are_not_there_are_refused(client, wanted, message):
    with pytest.raises(InputError, match=f"^here: {message}"):
        tasks.workers_of(client, wanted, "here")


def test_workers_that_may_come_later_are_only_warned_of():
    with pytest.warns(UserWarning, match=r"none called \['c'\]; it has \[0, 'b'\]; those that come later are used"):
        assert tasks.workers_of(Cluster(), [0, "c"], "here", others_may_come=True) == ["tcp://1"]


@pytest.mark.parametrize("ask", [lambda: map_(len), lambda: tasks.run(len)])
def test_without_a_client_it_says_what_to_pass(monkeypatch, ask):
    def get_client():
        raise ValueError("No global client found and no address provided")

    monkeypatch.setitem(sys.modules, "distributed", types.SimpleNamespace(get_client=get_client))
    with pytest.raises(InputError, match=r"(map|run)\(\): there is no Dask client here; pass client=Client\(…\)$"):
        ask()
