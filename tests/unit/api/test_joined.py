"""Ranks in processes of an engine, without MPI; jobs: end_to_end/test_in_engines.py."""

import os
import sys
import types

import pytest

from ringreduce.api import joined
from ringreduce.errors import JobFailedError, StartupError


def test_sys_exit_on_a_rank_is_an_ordinary_exception_there(monkeypatch):
    """Dask's worker would hang, and Spark's and Ray's end."""
    left = []
    monkeypatch.setattr(joined.joining, "membership", lambda: types.SimpleNamespace(variables={"MARK": "a"}))
    monkeypatch.setattr(joined, "init", lambda: None)
    monkeypatch.setattr(joined, "leave", lambda why, _: left.append(why))
    said = r"a rank's function has called sys\.exit\(3\); its process is the engine's: return instead, or raise"
    with pytest.raises(JobFailedError, match=f"^{said}"), joined.rank_of("", 1, 2, "Dask"):
        sys.exit(3)
    assert left[0].startswith("JobFailedError: a rank's function has called sys.exit(3)"), "the others are told"
    assert "MARK" not in os.environ, "what the process starts later is no child of a rank"


def one(world, rank, size=2, lost=""):
    return joined.Membership(world, rank, size, lost)


def test_the_processes_of_one_world_are_its_ranks_again():
    assert joined.ranks_again([None, None], "get others") is None
    assert joined.ranks_again([one("a", 1), one("a", 0)], "get others") == [1, 0]


@pytest.mark.parametrize(
    ("memberships", "why"),
    [
        ([one("a", 0), None], "1 of these 2 processes have been ranks before, in 1 world of other processes; MPI"),
        ([one("a", 0), one("b", 1)], "2 of these 2 processes have been ranks before, in 2 worlds of other processes; "),
        ([one("a", 0, 3), one("a", 1, 3)], "2 of these 2 processes have been ranks before, in 1 world of other"),
        ([one("a", 0, lost="rank 1"), one("a", 1)], r"other processes, which has lost others \(rank 1\); MPI can be"),
    ],
)
def test_processes_that_were_ranks_with_others_are_none_again(memberships, why):
    with pytest.raises(StartupError, match=f"{why}.*: get others$"):
        joined.ranks_again(memberships, "get others")
