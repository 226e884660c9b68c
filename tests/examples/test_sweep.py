"""sweep.py on real ranks: two teams find values that learn."""

import re

import pytest

pytest.importorskip("optuna")
pytestmark = pytest.mark.extended


def test_it_finds_values_that_learn(ringrun, examples, tmp_path):
    ended = ringrun(4, examples / "sweep.py", "--trials", "10", "--storage", tmp_path / "sweep.journal")
    assert float(re.search(r"best accuracy (\d\.\d+), of 10 trials", ended.stdout).group(1)) > 0.85
