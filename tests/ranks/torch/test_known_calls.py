"""Short known calls on torch's CPU tensors, in the caller's thread: see engine/express.py."""

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.engine.express import DONE
from ringreduce.kernels import native
from ringreduce.testing import run_ranks
from tests.support.express import WARM, watched

pytestmark = [
    pytest.mark.usefixtures("more_patience"),
    pytest.mark.skipif(native.module is None, reason=f"the compiled module: {native.MISSING}"),
]


def test_they_go_that_way_beside_numpys_arrays():
    """With results of torch's on rank 0, where autograd sees what has changed."""

    def program():
        mine = rr.rank()
        made = torch.from_numpy if mine == 0 else lambda array: array
        room = made(np.empty((8, 2), np.float32))

        def ranked(count):
            return np.arange(count, dtype=np.float32).reshape(-1, 2) * (1 + mine)

        calls = {
            "a": lambda: rr.allreduce_(made(ranked(6)), name="a", op=rr.Sum),
            "b": lambda: rr.allreduce(made(ranked(6)), name="b", op=rr.Max),
            "c": lambda: rr.broadcast_(made(ranked(6)), 1, "c"),
            "d": lambda: rr.broadcast(made(ranked(6)), 0, "d"),
            "e": lambda: rr.allgather(made(ranked(4)), "e"),
            "f": lambda: rr.allgather(made(ranked(8)), "f", out=room),
            "g": lambda: rr.reducescatter(made(ranked(8)), "g", op=rr.Sum),
        }
        for _ in range(WARM):
            for call in calls.values():
                call()
        counts = [0] * 4
        for name in calls:
            watched(name, counts)
        versions = room._version if mine == 0 else 0
        found = {name: [call() for _ in range(10)] for name, call in calls.items()}
        assert counts[DONE] > 0
        if mine == 0:
            assert {type(each) for several in found.values() for each in several} == {torch.Tensor}
            assert room._version >= versions + 10
            assert all(each is room for each in found["f"])
            changed = torch.ones(3)
            before = changed._version
            rr.allreduce_(changed, name="h")
            assert changed._version == before + 1
        else:
            rr.allreduce_(np.ones(3, np.float32), name="h")
        return [[np.asarray(each) for each in several] for several in found.values()]

    ones = np.arange(8, dtype=np.float32).reshape(-1, 2)
    whole = [np.concatenate([part, 2 * part]) for part in (ones[:2], ones)]
    expected = [3 * ones[:3], 2 * ones[:3], 2 * ones[:3], ones[:3], *whole]
    for rank, found in enumerate(run_ranks(2, program)):
        for several, sums in zip(found, [*expected, 3 * ones[2 * rank :][:2]], strict=True):
            for each in several:
                np.testing.assert_array_equal(each, sums)


@pytest.mark.parametrize("made", [np.array, torch.tensor], ids=["NumPy", "torch"])
def test_rows_of_others_that_do_not_fit_into_out_are_told(made):
    """Also to a rank whose own call is as it was: it finds out when the others have come."""

    def program():
        room = made(np.zeros((4, 2), np.float32))
        for number in range(2 * WARM):
            assert rr.allgather(made(np.full((2, 2), number + rr.rank(), np.float32)), "e", out=room) is room
        with pytest.raises(rr.InputError, match=r"^allgather: out has shape \(4, 2\); expected \(5, 2\)$"):
            rr.allgather(made(np.ones((2 + rr.rank(), 2), np.float32)), "e", out=room)
        rows = rr.allgather(made(np.ones((2 + rr.rank(), 2), np.float32)), "e")
        return rows.shape == (5, 2) and bool((rows == 1).all())

    assert run_ranks(2, program) == [True, True]
