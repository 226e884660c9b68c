"""The launcher's lists of ranks, as a rank hears them."""

import json
import socket
import sys
import threading
import time

from ringreduce.monitor.launcher_link import (
    StatusServer,
    report,
)
from ringreduce.runtime.recovery.membership import EXPELLED_EXIT_CODE, Members
from tests.support.jobs import run


def said(number, ranks, dead=()):
    return {"membership": {"number": number, "ranks": ranks, "dead": {str(rank): how for rank, how in dead}}}


def test_the_newest_list_counts():
    members, news = Members(1), []
    members.on_news = news.append
    assert not members.newer_than(0)
    members.hear(said(2, [0, 1, 3], [(2, "was killed by SIGKILL")]))
    members.hear(said(1, [0, 1, 2, 3]))
    members.hear(said(2, [0, 1, 3]))
    assert [(each.number, each.ranks, each.dead) for each in news] == [(2, (0, 1, 3), {2: "was killed by SIGKILL"})]
    assert members.newest == news[0]
    assert members.newer_than(1)
    assert not members.newer_than(2)


def test_who_waits_for_a_list_is_woken():
    members = Members(3)
    assert not members.wait(lambda each: 3 in each.ranks, 0.01)
    timer = threading.Timer(0.05, lambda: members.hear(said(1, [0, 3])))
    timer.start()
    assert members.wait(lambda each: 3 in each.ranks, 10)
    timer.join()


def test_a_rank_that_a_list_calls_dead_ends():
    program = (
        "from ringreduce.runtime.recovery.membership import Members\n"
        "Members(1).hear({'membership': {'number': 1, 'ranks': [0], 'dead': {'1': 'has stalled'}}})\n"
        "print('goes on')\n"
    )
    ended = run([sys.executable, "-c", program])
    assert (ended.returncode, ended.stdout) == (EXPELLED_EXIT_CODE, "")
    assert ended.stderr == "rank 1 was given up (has stalled); it ends\n"


def test_lists_come_by_datagram_and_answers_go_on(tmp_path):
    error_file = str(tmp_path / "rank0.json")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.settimeout(5)
        agent.bind(f"{error_file}.agent")
        members = Members(0)
        server = StatusServer(error_file, lambda: "x", members.hear)
        assert json.loads(agent.recv(100_000))["started"] == "ringreduce"
        many = [(rank, "was killed by SIGKILL") for rank in range(1, 1000)]
        agent.sendto(json.dumps(said(7, [0], many)).encode(), f"{error_file}.ask")
        assert members.wait(lambda each: each.number == 7, 5)
        assert len(members.newest.dead) == 999
        assert time.monotonic() - 5 < members.newest.heard_s <= time.monotonic()
        agent.sendto(b"doing", f"{error_file}.ask")
        assert json.loads(agent.recv(10000))["doing"] == "x"
        report(error_file, suspects=[2, 3], why="they wait")
        report(error_file, meeting=7)
        report(error_file, reformed=7)
        report(error_file, left="its script ended")
        expected = [{"suspects": [2, 3], "why": "they wait"}, {"meeting": 7}, {"reformed": 7}]
        expected.append({"left": "its script ended"})
        assert [json.loads(agent.recv(10000)) for _ in expected] == expected
        server.close()
