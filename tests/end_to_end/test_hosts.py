"""The engine across hosts, which are network namespaces on this machine: they need root and iproute2."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="hosts are network namespaces, which need root and the command ip (iproute2)",
)
AGENT = '#!/bin/bash\nhost=$1; shift\nexec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"\n'


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """Two hosts on a bridge, and mpirun on the first."""

    def __init__(self, folder):
        self.tag = uuid.uuid4().hex[:6]
        self.names = [f"h{k}-{self.tag}" for k in (1, 2)]
        self.agent = folder / "agent"
        self.agent.write_text(AGENT)
        self.agent.chmod(0o755)

    def start(self):
        ip("link", "add", f"b{self.tag}", "type", "bridge")
        ip("link", "set", f"b{self.tag}", "up")
        for number, name in enumerate(self.names, start=1):
            ip("netns", "add", name)
            ip("link", "add", f"v{number}{self.tag}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{number}{self.tag}", "master", f"b{self.tag}", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            names = Path("/etc/netns") / name
            names.mkdir(parents=True)
            lines = [f"10.77.0.{each} {other}\n" for each, other in enumerate(self.names, start=1)]
            (names / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def stop(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"b{self.tag}"], capture_output=True)

    def run(self, script, **variables):
        """The script on three ranks: two on the first host, one on the second."""
        python = Path(sys.executable)
        options = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": "eth0", "mpi_yield_when_idle": "1"}
        command = ["mpirun", "--allow-run-as-root", "-np", "3", "-H", f"{self.names[0]}:2,{self.names[1]}:1"]
        command += ["--prtemca", "plm_ssh_agent", str(self.agent), "--prtemca", "prte_if_include", "eth0"]
        command += [word for name, value in options.items() for word in ("--mca", name, value)]
        command += [word for name in (*variables, "PATH") for word in ("-x", name)]
        command += [str(python), str(script)]
        inside = f"hostname {self.names[0]}; exec {' '.join(command)}"
        enter = ["ip", "netns", "exec", self.names[0], "unshare", "--uts", "bash", "-c", inside]
        return run(enter, timeout_s=90, PATH=f"{python.parent}:{os.environ['PATH']}", **variables)


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


SCRIPT = """
import sys, time
import numpy as np
import ringreduce as rr

def load_data():
    time.sleep(3)

rr.init()
assert rr.cross_size() == (2 if rr.local_rank() == 0 else 1)
for step in range(3):
    assert rr.allreduce(np.full(100_000, rr.rank() + step), name="w", op=rr.Sum)[-1] == 3 + 3 * step
if rr.rank() == {late}:
    load_data()
rr.allreduce(np.ones(10), name="late")
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_on_another_host_is_woken_and_shows_its_stack(hosts, tmp_path, late):
    script, timeline = tmp_path / "train.py", tmp_path / "timeline.json"
    script.write_text(SCRIPT.format(late=late))
    finished = hosts.run(script, RINGREDUCE_STALL_CHECK_S="0.5", HOROVOD_TIMELINE=str(timeline))
    assert finished.returncode == 0, finished.stdout
    assert re.search(
        rf"stalled: allreduce 'late' .*; missing: rank {late}\. All ranks must submit it\n"
        rf"rank {late} last submitted allreduce 'w' \(train.py:12\) \d s ago; it is here:\n"
        r"(.*\n)+.*line 7, in load_data",
        finished.stdout,
    ), finished.stdout
    events = json.loads(timeline.read_text())
    ends = {e["pid"]: e["ts"] + e["dur"] for e in events if e["name"] == "ALLREDUCE"}
    assert sorted(ends) == [0, 1, 2]
    assert max(ends.values()) - min(ends.values()) < 1e6, "clocks are aligned"
