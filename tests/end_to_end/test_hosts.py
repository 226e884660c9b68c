"""The engine across hosts, which are network namespaces on this machine (bench/network.py)."""

import json
import re
import sys

import pytest

from tests.end_to_end.conftest import run
from tests.end_to_end.test_bench import between_hosts, network

SCRIPT = """
import sys, time
import numpy as np
import ringreduce as rr

def load_data():
    time.sleep(3)

rr.init()
assert (rr.local_size(), rr.cross_size()) == (2, 2)
for step in range(3):
    assert rr.allreduce(np.full(100_000, rr.rank() + step), name="w", op=rr.Sum)[-1] == 6 + 4 * step
if rr.rank() == {late}:
    load_data()
rr.allreduce(np.ones(10), name="late")
"""


@between_hosts
@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_on_another_host_is_woken_and_shows_its_stack(script, tmp_path, late):
    """Two ranks on each; `ringrun` on hosts is in tests/cluster."""
    program, timeline = script(SCRIPT.format(late=late)), tmp_path / "timeline.json"
    variables = {"RINGREDUCE_STALL_CHECK_S": "0.5", "HOROVOD_TIMELINE": str(timeline)}
    with network.Network(2) as hosts:
        finished = run(hosts.mpirun([sys.executable, str(program)], 2, variables), timeout_s=90)
    assert finished.returncode == 0, finished.stdout
    assert re.search(
        rf"stalled: allreduce 'late' .*; missing: rank {late}\. All ranks must submit it\n"
        rf"rank {late} last submitted allreduce 'w' \(train.py:12\) \d s ago; it is here:\n"
        r"(.*\n)+.*line 7, in load_data",
        finished.stdout,
    ), finished.stdout
    events = json.loads(timeline.read_text())
    ends = {e["pid"]: e["ts"] + e["dur"] for e in events if e["name"] == "ALLREDUCE"}
    assert sorted(ends) == [0, 1, 2, 3]
    assert max(ends.values()) - min(ends.values()) < 1e6, "clocks are aligned"
