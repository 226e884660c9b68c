"""The benches of several hosts, which are network namespaces of this one; root makes them."""

import itertools
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run
from tests.support.benches import BENCH, NO_NETWORK, PYTHON, between_hosts, files, kept_by, outcome
from tests.support.patience import patient


def test_hosts(tmp_path):
    finished = run([PYTHON, BENCH / "hosts.py", "--quick", *files(tmp_path)])
    if NO_NETWORK:
        assert finished.returncode == 0, finished.stdout
        assert finished.stdout == f"bench/hosts.py: skipped: {NO_NETWORK}\n"
        return
    kept = outcome(finished, tmp_path, "hosts ranks rate size who time share model simulated sent of least #wrong")
    rows = {row["who"].strip(): row for row in kept["rows"]}
    assert {"ring", "hierarchical", "allreduce_", "MPI_Allreduce", "torch gloo", "raw TCP"} < set(rows)
    assert rows["raw TCP"]["share"] == 1
    assert all(
        rows[name][by] > 0 for name in ("ring", "halving", "hierarchical") for by in ("model_us", "simulated_us")
    )
    host = rows["hierarchical"]["rank_hosts"]
    assert host[0] == host[1] != host[2] == host[3]
    for row in rows.values():
        assert row["of_least"] > 0.99, "nobody sends less than 2 (H - 1) / H of the buffer"
    assert rows["raw TCP"]["of_least"] < 1.2


@pytest.mark.extended
@between_hosts
@pytest.mark.parametrize(
    ("arguments", "who"),
    [
        (
            ["hosts.py", "--quick", "--short", "--sizes", 4096],
            {"MPI_Allreduce", "by hand", "doubling", "direct", "ordered()", "allreduce_"},
        ),
        (["gradients.py", "--quick", "--hosts", 2], {"ringreduce, NumPy", "DDP gloo", "DDP ring"}),
    ],
    ids=["short messages", "gradients"],
)
def test_between_hosts(tmp_path, arguments, who):
    bench, *rest = arguments
    kept = outcome(run([PYTHON, BENCH / bench, *rest, *files(tmp_path)]), tmp_path)
    rows = {row["who"].strip(): row for row in kept["rows"]}
    assert who < set(rows)
    assert bench == "hosts.py" or kept["header"]["hosts"] == 2
    assert bench != "hosts.py" or rows["by hand"]["wrong"] == 0


@pytest.mark.extended
@between_hosts
def test_slow_links(tmp_path):
    finished = run([PYTHON, BENCH / "slow_links.py", "--quick", "--runs", 1, "--json", tmp_path / "rows.json"])
    rows = kept_by(finished, tmp_path)["rows"]
    assert all(row["wrong"] == 0 for row in rows)
    found = {row["place"]: re.sub("-[0-9a-f]{6}", "", row["links"]) for row in rows if row["order"] == "found"}
    # a busy machine may name other hosts, too
    assert "host ring2's link carries 0.01" in found["host 2"]
    order = found["hosts 0 and 1"].rpartition("order of hosts: ")[2].split(", ")
    assert sorted(order) == [f"ring{k}" for k in range(4)]
    assert abs(order.index("ring0") - order.index("ring1")) == 2, "they are not neighbours around the ring"


@pytest.mark.extended
@between_hosts
def test_slow_wire(tmp_path):
    ways = ["int8", "int4", "PowerSGD-4", "LocalSGD", "DiLoCo int4", "DDP PowerSGD-4", "DDP post-local"]
    finished = run([PYTHON, BENCH / "slow_wire.py", "--quick", "--who", *ways, *files(tmp_path)], timeout_s=400)
    rows = {row["who"].strip(): row for row in kept_by(finished, tmp_path)["rows"]}
    assert list(rows) == ["fp32", *ways]
    shares = {who: row["of_fp32"] for who, row in rows.items()}
    assert shares["int8"] < 0.26
    assert shares["int4"] < 0.135
    assert shares["DiLoCo int4"] < 0.0075
    assert shares["LocalSGD"] == pytest.approx(1 / 8, rel=0.1)
    assert shares["PowerSGD-4"] == pytest.approx(shares["DDP PowerSGD-4"], rel=0.2)
    losses = {who: [loss for _, loss in row["losses"][0]] for who, row in rows.items()}
    assert all(later < earlier for each in losses.values() for earlier, later in itertools.pairwise(each))
    assert losses["int4"] != losses["fp32"], "another way, in name only"


@pytest.mark.extended
@between_hosts
def test_parameter_server(tmp_path):
    finished = run([PYTHON, BENCH / "parameter_server.py", "--quick", "--workers", 3, *files(tmp_path)])
    found = {row["who"].strip(): row for row in kept_by(finished, tmp_path)["rows"]}
    assert set(found) == {"ring", "1 server"}
    assert all(row["wrong"] == 0 for row in found.values())
    for row in found.values():
        assert row["busiest"] == pytest.approx(row["by_hand"], rel=0.4), "headers of frames, and of requests"
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.skipif(os.geteuid() != 0, reason="as root only: a user learns that root is missing")
def test_hosts_without_its_commands_is_skipped_and_says_why(tmp_path):
    finished = run([PYTHON, BENCH / "hosts.py"], PATH=str(tmp_path), returncode=0)
    assert finished.stdout == "bench/hosts.py: skipped: the command ip (iproute2) is not on PATH\n"


WAITS_INSIDE = f"""
import subprocess, sys
sys.path.insert(0, {str(BENCH)!r})
from network import Network
with Network(2) as network:
    network.shape(100)
    print(network.tag, flush=True)
    {{}}
    subprocess.run(["ip", "netns", "exec", network.names[1], "sleep", "1000"])
"""


@between_hosts
@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "an error"])
def test_hosts_leave_nothing_behind(end):
    error = 'raise ValueError("meant")' if end == "an error" else ""
    script = subprocess.Popen(
        [PYTHON, "-c", WAITS_INSIDE.format(error)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    tag = script.stdout.readline().decode().strip()
    assert tag
    if not error:
        assert tag in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        script.send_signal(getattr(signal, end))
    script.communicate(timeout=patient(30))
    assert script.returncode != 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    left += subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    assert tag not in left
    assert not list(Path("/etc").glob(f"netns/*{tag}"))
