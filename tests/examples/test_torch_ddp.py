"""torch_ddp.py: over the backend "ring" it learns, and as over gloo."""

import importlib.util
import re
import signal
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
        ended = ringrun(size, examples / "torch_ddp.py", "--backend", backend, returncode=mock.ANY)
        # gloo's worker drops its last tensor while Python ends, which may abort the process (pytorch#190489)
        aborted = backend == "gloo" and "terminate called without an active exception" in ended.stderr
        assert ended.returncode == (128 + signal.SIGABRT if aborted else 0), f"{ended.stdout}\n{ended.stderr}"
        (found[backend],) = re.findall(rf"{backend}, {size} ranks, on cpu, test accuracy: (\d\.\d+)", ended.stdout)
    assert float(found["ring"]) > 0.9
    assert float(found["ring"]) == pytest.approx(float(found["gloo"]), abs=0.01)
