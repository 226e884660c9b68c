"""train_digits.py on real ranks: it learns, and any number of ranks trains the same model."""

import functools
import importlib.util
import json
import re
import sys

import numpy as np
import pytest

import ringreduce as rr
from tests.support.tiers import parted
from tests.support.world import on_a_pool

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="train_digits.py needs scikit-learn"),
]

SIZES = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def train(ringrun, examples, tmp_path_factory):
    """train(size): what a run with default settings printed, and what it recorded; run once for each size."""
    directory = tmp_path_factory.mktemp("digits")

    @functools.cache
    def run(size):
        record = directory / f"{size}.json"
        ended = ringrun(size, examples / "train_digits.py", "--record", record)
        return ended.stdout, json.loads(record.read_text())

    return run


@pytest.mark.adapters
@pytest.mark.parametrize("size", parted(SIZES, lambda size: size == 3))
def test_any_number_of_ranks_trains_the_same_good_model(train, lines, size):
    (_, alone), (stdout, together) = train(1), train(size)
    accuracy = re.fullmatch(r"test accuracy: (\d\.\d{3})", lines(stdout)[-1])
    assert accuracy, stdout
    assert 0.97 <= float(accuracy[1]) <= 1
    assert len(alone["losses"]) == 25 * 11
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=1e-9)
    assert len(together["digests"]) == size
    assert len(set(together["digests"])) == 1


def test_batch_that_ranks_cannot_share_equally_is_refused(ringrun, examples):
    ended = ringrun(2, examples / "train_digits.py", "--batch", "65", returncode=1)
    assert "--batch 65 cannot be shared equally by 2 ranks; pass a multiple of 2" in ended.stderr


@pytest.mark.adapters
@on_a_pool
@pytest.mark.parametrize("left_out", ["DistributedOptimizer", "broadcast_parameters"])
def test_script_itself_notices_when_parameters_differ(world, examples, left_out):
    def program():
        sys.path.insert(0, str(examples))
        import train_digits

        expected = r"the ranks' parameters differ: fingerprints \['\w+', '\w+'\], by rank; expected equal ones"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rr, left_out, lambda passed, **_: passed)
            with pytest.raises(SystemExit, match=expected):
                train_digits.main(["--epochs", "1"])

    world(2).run(program)
