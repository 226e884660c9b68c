"""Ranks in processes of an engine, without MPI; jobs: end_to_end/test_in_engines.py."""

import sys
import types

import pytest

from ringreduce.api import joined
from ringreduce.errors import JobFailedError


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
