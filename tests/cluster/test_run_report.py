"""The run report on several hosts: a slow host and a slow link are named."""

import json

from tests.end_to_end.conftest import PROGRAMS

STRAGGLES = PROGRAMS / "straggles.py"


def report(hosts, python, tmp_path, *arguments):
    hosts.ringrun(python, *arguments[:2], "--report", tmp_path / "run", python, STRAGGLES, *arguments[2:], returncode=0)
    return json.loads((tmp_path / "run" / "report.json").read_text())


def test_a_slow_host_is_first(hosts, python, tmp_path):
    found = report(hosts, python, tmp_path, "-H", "h0:2,h1:2", "host", "h1")
    assert (found["stragglers"][0]["who"], found["stragglers"][0]["kind"]) == ("host h1", "slow host")
    assert found["job"]["hosts"] == {"h0": 2, "h1": 2}


def test_a_slow_link_is_first(own_hosts, python, tmp_path):
    own_hosts.shape(2, 50)
    found = report(own_hosts, python, tmp_path, "-H", "h0,h1,h2,h3", "none")
    first = found["stragglers"][0]
    assert (first["kind"], "h2" in first["who"]) == ("slow link", True)
