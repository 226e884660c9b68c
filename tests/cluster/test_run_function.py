"""ringreduce.run() over hosts: the function and the results travel over the network."""

from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts

pytestmark = pytest.mark.timeout(180)
SCRIPT = """
import socket
import ringreduce as rr

def function(x):
    rr.init()
    return socket.gethostname(), float(rr.allreduce(x * (rr.rank() + 1), op=rr.Sum))

results = rr.run(function, (1.0,), np=3, hosts="h0:1,h1:1,h2:1")
print(*(result[:2] for result in results))
"""


def test_ranks_on_other_hosts_get_the_function_and_return_their_results(hosts: Hosts, python: Path, tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = hosts.run(0, [python, tmp_path / "script.py"], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "('h0', 6.0) ('h1', 6.0) ('h2', 6.0)\n"
    hosts.assert_nothing_is_left()
