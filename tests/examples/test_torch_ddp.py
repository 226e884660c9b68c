"""torch_ddp.py: over the backend "ring" it learns, and as over gloo."""

import importlib.util
import re
from unittest import mock

import pytest

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="torch_ddp.py needs scikit-learn"),
]


@pytest.mark.parametrize("size", [2, 3])
def test_it_learns_as_over_gloo(ringrun, examples, size):
    found = {}
    for backend in ("ring", "gloo"):
        # gloo's worker drops its last tensor while Python ends, which may abort the process (pytorch#190489)
        code = mock.ANY if backend == "gloo" else 0
        ended = ringrun(size, examples / "torch_ddp.py", "--backend", backend, returncode=code)
        (found[backend],) = re.findall(rf"{backend}, {size} ranks, on cpu, test accuracy: (\d\.\d+)", ended.stdout)
    assert float(found["ring"]) > 0.9
    assert float(found["ring"]) == pytest.approx(float(found["gloo"]), abs=0.01)
