"""The engine across hosts, which are network namespaces on this machine (bench/network.py)."""

import json
import re
import sys

import pytest

from tests.end_to_end.conftest import PROGRAMS, run
from tests.support.benches import between_hosts, network


@between_hosts
@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_on_another_host_is_woken_and_shows_its_stack(tmp_path, late):
    """Two ranks on each; `ringrun` on hosts is in tests/cluster."""
    timeline = tmp_path / "timeline.json"
    variables = {"RINGREDUCE_STALL_CHECK_S": "0.5", "HOROVOD_TIMELINE": str(timeline)}
    with network.Network(2) as hosts:
        finished = run(hosts.mpirun([sys.executable, str(PROGRAMS / "late.py"), str(late)], 2, variables), timeout_s=90)
    assert finished.returncode == 0, finished.stdout
    assert re.search(
        rf"stalled: allreduce 'late' .*; missing: rank {late}\. All ranks must submit it\n"
        rf"rank {late} last submitted allreduce 'w' \(late.py:18\) \d s ago; it is here:\n"
        r"(.*\n)+.*line 12, in load_data",
        finished.stdout,
    ), finished.stdout
    events = json.loads(timeline.read_text())
    ends = {e["pid"]: e["ts"] + e["dur"] for e in events if e["name"] == "ALLREDUCE"}
    assert sorted(ends) == [0, 1, 2, 3]
    assert max(ends.values()) - min(ends.values()) < 1e6, "clocks are aligned"
