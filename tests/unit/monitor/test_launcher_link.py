"""What ringrun may ask of a rank, and what it is told unasked."""

import json
import mmap
import os
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.monitor.launcher_link import StatusServer, report
from ringreduce.testing import run_ranks
from tests.support.patience import patient, wait_until


@pytest.fixture
def agent(tmp_path):
    """The agent's end: a datagram socket beside the error file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.settimeout(5)
        own.bind(str(tmp_path / "rank3.json.agent"))
        yield own


@pytest.fixture
def error_file(tmp_path):
    return str(tmp_path / "rank3.json")


def ask(agent, error_file):
    agent.sendto(b"doing", f"{error_file}.ask")
    while "started" in (said := json.loads(agent.recv(100_000))):
        continue
    return said


def test_its_start_is_told_with_what_it_has_mapped_in_shared_memory(agent, error_file):
    with tempfile.NamedTemporaryFile(prefix="ringreduce_test_", dir="/dev/shm") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            server = StatusServer(error_file, lambda: "x")
            said = json.loads(agent.recv(100_000))
        assert said["started"] == "ringreduce"
        assert [line for line in said["shared"] if line.endswith(f" {file.name}")]
    server.close()


def test_a_rank_answers_what_it_waits_for(agent, error_file):
    doing = ["allreduce 'é' (train.py:41)"]
    with closing(StatusServer(error_file, lambda: doing[0])):
        assert ask(agent, error_file) == {"doing": doing[0], "package": os.path.dirname(rr.__file__)}
        doing[0] = ""
        assert ask(agent, error_file)["doing"] == ""


def test_it_goes_on_when_who_asked_has_gone(agent, error_file, tmp_path):
    with closing(StatusServer(error_file, lambda: "x")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.sendto(b"doing", f"{error_file}.ask")  # no address to answer to
            other.bind(str(tmp_path / "gone"))
            other.sendto(b"doing", f"{error_file}.ask")
        assert ask(agent, error_file)["doing"] == "x"


def test_what_is_said_once_waits_until_a_busy_agent_has_read(agent, error_file):
    """An agent that gets no core must not lose that a rank has left in order, or the last totals of its steps."""
    seconds = 0
    while report(error_file, wait_s=0, measured={"seconds": seconds}):
        seconds += 1
    with ThreadPoolExecutor(1) as other:
        said = other.submit(report, error_file, wait_s=60, left="its script ended")
        heard = [json.loads(agent.recv(100_000)) for _ in range(seconds + 1)]
        assert said.result(60)
    assert heard == [*({"measured": {"seconds": each}} for each in range(seconds)), {"left": "its script ended"}]


def test_a_rank_that_waits_for_its_agent_to_read_computes_nothing(agent, error_file):
    while report(error_file, wait_s=0, notice="x"):
        continue
    computed_s = time.thread_time()
    assert not report(error_file, wait_s=1.0, left="its script ended")
    assert time.thread_time() - computed_s < 0.1


def test_after_the_end_nothing_is_left_and_a_new_world_can_begin(agent, error_file):
    before = {*threading.enumerate()}
    for _ in range(2):
        StatusServer(error_file, lambda: "x").close()
        assert not os.path.exists(f"{error_file}.ask")
    deadline = time.monotonic() + 5
    while not {*threading.enumerate()} <= before:
        assert time.monotonic() < deadline, "the thread has not ended"
        time.sleep(0.01)
    open(f"{error_file}.ask", "w").close()  # of a world that was not shut down
    with closing(StatusServer(error_file, lambda: "y")):
        assert ask(agent, error_file)["doing"] == "y"


def test_without_a_launcher_or_where_it_cannot_listen_there_is_no_thread(tmp_path):
    before = {*threading.enumerate()}
    for path in ("", str(tmp_path / "missing" / "rank0.json"), str(tmp_path / ("long" * 50))):
        with closing(StatusServer(path, lambda: "x")):
            assert {*threading.enumerate()} <= before


def test_it_costs_nothing_while_nobody_asks(error_file):
    with closing(StatusServer(error_file, lambda: "x")):
        begin = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - begin < 0.05


def test_a_stall_is_told(agent, error_file):
    assert report(error_file, stalled="allreduce 'w': waiting")
    assert json.loads(agent.recv(100_000)) == {"stalled": "allreduce 'w': waiting"}


def test_whoever_is_not_told_learns_it(error_file):
    assert not report("", stalled="x")
    assert not report(error_file, stalled="x")


def test_an_agent_that_does_not_read_holds_no_rank_up(agent, error_file):
    def fill():
        while report(error_file, stalled="x"):
            pass

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    filling.join(patient(10))
    assert not filling.is_alive()
    assert json.loads(agent.recv(100_000)) == {"stalled": "x"}
    assert report(error_file, stalled="y"), "there is room again"


def test_a_request_that_cannot_be_answered_is_not_the_last(agent, error_file, caplog):
    with closing(StatusServer(error_file, lambda: "x")):
        agent.sendto(b'{"record_s": "soon"}', f"{error_file}.ask")
        assert ask(agent, error_file)["doing"] == "x"
    assert "a request of the launcher was not answered: ValueError: could not convert" in caplog.text


def test_a_rank_records_its_steps_as_long_as_it_is_asked_to(agent, error_file):
    asked = []
    with closing(StatusServer(error_file, lambda: "x")) as server:
        server.record = asked.append
        agent.sendto(b'{"record_s": 10.0}', f"{error_file}.ask")
        assert ask(agent, error_file)["doing"] == "x", "it answers still"
    assert asked == [10.0]


@pytest.mark.parametrize("by_script", [False, True], ids=["nobody asks", "the script calls stats()"])
def test_recording_ends_when_nobody_asks_any_more(by_script):
    def program():
        engine = runtime.current("test").engine
        if by_script:
            rr.stats()
        engine.report(1e-9)
        assert engine.recorder.recording
        wait_until(lambda: all(each.name != "ringreduce reports" for each in threading.enumerate()))
        assert engine.recorder.recording == by_script
        rr.mark_step()  # of no recording, or the first one of the script's
        engine.report(60.0)
        rr.mark_step()  # the first step has not been seen whole, if recording has begun in it
        rr.mark_step()
        assert engine.recorder.totals()["step"] == 1 + by_script

    run_ranks(1, program)
