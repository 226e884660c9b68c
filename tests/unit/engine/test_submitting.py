"""What the engine takes from the user's threads; errors that a program sees: tests/ranks/api/test_errors.py."""

import contextlib
from types import SimpleNamespace

import pytest

from ringreduce.engine.submitting import Submitting
from ringreduce.errors import InputError
from ringreduce.execution.signature import Signature


@pytest.mark.parametrize("where", ["pending", "running", "express", ""])
def test_a_name_is_in_use_until_its_operation_is_over(where):
    put = []
    submitting = SimpleNamespace(
        _world=SimpleNamespace(rank=3), _inbox=SimpleNamespace(put=put.append), count=0, owed=0
    )
    submitting._ending = SimpleNamespace(error=None, leaving="")
    submission = SimpleNamespace(key="allreduce.w", signature=Signature("allreduce", "w"))
    state = SimpleNamespace(joined=False, closed="", pending={}, running={}, express=None)
    if where:
        setattr(state, where, submission.key if where == "express" else {submission.key: submission})
    why = r"^allreduce 'w': a tensor of this name is already pending on rank 3; synchronize it first"
    with pytest.raises(InputError, match=why) if where else contextlib.nullcontext():
        Submitting._hand_over(submitting, state, submission)
    assert put == ([] if where else [submission])
