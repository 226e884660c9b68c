"""torch_resnet.py: it learns on any number of ranks, and takes random images too."""

import importlib.util
import re

import pytest

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch_resnet.py needs torch"),
]


@pytest.mark.parametrize("size", [1, 3])
def test_it_learns(ringrun, examples, size):
    ended = ringrun(size, examples / "torch_resnet.py")
    assert float(re.search(r"test accuracy: (\d\.\d{3})\n", ended.stdout)[1]) >= 0.93
    losses = [float(each) for each in re.findall(r"loss (\d+\.\d{4}), [\d,]+ images/s", ended.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]


def test_random_images(ringrun, examples):
    flags = ["--synthetic", "--pixels", "32", "--batch", "2", "--epochs", "1"]
    ended = ringrun(2, examples / "torch_resnet.py", *flags)
    assert re.fullmatch(r"\[0\] epoch 1 of 1, on cpu: loss \d+\.\d{4}, [\d,]+ images/s\n", ended.stdout)
