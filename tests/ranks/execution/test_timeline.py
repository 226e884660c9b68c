"""The timeline: what Horovod's shows, of every rank, in a file that is complete at every moment."""

import itertools
import json
import operator
import random
import socket
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.engine.engine import Engine
from ringreduce.execution.executor import Executor
from ringreduce.execution.host import HostResources
from ringreduce.execution.signature import Signature
from ringreduce.execution.timeline import BYTES_A_MINUTE, Event, Timeline, TimelineFile
from ringreduce.monitor.recording import Recording
from ringreduce.negotiation.neutral import neutral_submission
from ringreduce.negotiation.protocol import TimelineEvents, TimelineStart, TimelineStop
from ringreduce.settings import Settings, log
from ringreduce.testing import run_ranks
from ringreduce.transport.threads import ThreadNetwork
from ringreduce.transport.world import World
from tests.support import trace
from tests.support.on_threads import each_rank_of
from tests.support.patience import wait_until

OPERATION = (0, 1, "allreduce.w", 1)
SMALL = Settings(fusion_slot_bytes=1024, shared_slot_bytes=1024, fusion_buffer_bytes=8192)


class FakeMailbox:
    """Of rank 1 of two: what it sends to rank 0 is in `sent`."""

    rank, size = 1, 2

    def __init__(self):
        self.handlers, self.sent = {}, []

    def send(self, message, rank):
        assert rank == 0
        self.sent.append(message)


def steps(count):
    for _ in range(count):
        handles = [rr.allreduce_async(np.ones(10 * (k + 1)), name=f"g{k}", op=rr.Sum) for k in range(3)]
        rr.allgather(np.ones((rr.rank(), 2)), name="metric")
        assert [rr.synchronize(handle)[0] for handle in handles] == [rr.size()] * 3


def phases(events, rank, tensor):
    mine = [e for e in events if e["pid"] == rank and e["tensor"] == tensor and e["ph"] == "X"]
    return [e["name"] for e in sorted(mine, key=lambda e: e["ts"])]


def test_every_rank_and_tensor_with_all_phases_in_order(tmp_path):
    path = tmp_path / "timeline.json"

    def program():
        rr.start_timeline(str(path), mark_cycles=True)
        rr.barrier()
        steps(2)
        rr.stop_timeline()
        rr.barrier()
        steps(1)

    run_ranks(3, program, settings=SMALL)
    events = trace.read(path)
    moving = ["MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    one_step = ["SUBMIT", "NEGOTIATE_ALLREDUCE", "QUEUE", *moving]
    for rank in range(3):
        seen = phases(events, rank, "allreduce.g1")
        alone = [*one_step[:3], "ALLREDUCE"]  # a tensor that travels alone is not copied
        assert seen[:6] in (one_step, alone + seen[4:6]), seen
        assert seen.count("ALLREDUCE") == 2, "nothing after stop_timeline()"
        assert phases(events, rank, "allgather.metric").count("ALLGATHER") == 2
        assert any(e["name"] == "CYCLE_START" for e in events if e["pid"] == rank)
    ready = [
        (e["name"], e["args"]["rank"], e["pid"]) for e in events if e["tensor"] == "allreduce.g2" and e["ph"] == "i"
    ]
    assert sorted(ready) == [(f"rank {rank} is ready", rank, rank) for rank in (0, 0, 1, 1, 2, 2)]


def test_it_can_be_started_and_stopped_again_and_is_whole_at_every_moment(tmp_path):
    paths = [tmp_path / f"{k}.json" for k in range(3)]

    def program():
        for path in paths:
            rr.start_timeline(str(path))
            rr.barrier()
            steps(1)
            if rr.rank() == 0:
                with path.open("rb", buffering=0) as file:  # one read: the file may grow before the next
                    json.loads(file.read(1 << 20))
            if path is paths[0]:
                rr.stop_timeline()  # the second is ended by the third, the third by the end of the job
            rr.barrier()

    run_ranks(2, program)
    for path in paths:
        events = trace.read(path)
        for rank in range(2):
            assert phases(events, rank, "allreduce.g0").count("ALLREDUCE") == 1
    assert not any(e["name"] == "CYCLE_START" for e in events)


def test_what_rank_0_did_between_start_and_stop_is_there_of_every_rank(tmp_path, monkeypatch):
    """Though rank 0 may have a sum from shared memory before another rank has looked: 1 is late, then 2 looks away."""
    advance = Executor.advance

    def looks_away(self, latency_critical):
        rank, since_s = self.context.transport.rank, time.monotonic() - self.moved_s
        if since_s < {1: 0.002 * (self.stuck_on() is None), 2: 0.02 * (self.stuck_on() is not None)}.get(rank, 0):
            return False
        return advance(self, latency_critical)

    monkeypatch.setattr(Executor, "advance", looks_away)
    paths = [tmp_path / f"{k}.json" for k in range(10)]

    def program():
        for path in paths:
            rr.start_timeline(str(path))
            rr.barrier()
            steps(1)
            rr.stop_timeline()
            rr.barrier()

    run_ranks(3, program)
    for path in paths:
        events = trace.read(path)
        for rank in range(3):
            assert [phases(events, rank, f"allreduce.g{k}").count("ALLREDUCE") for k in range(3)] == [1, 1, 1]
            assert phases(events, rank, "allgather.metric").count("ALLGATHER") == 1


def test_a_rank_sends_its_last_events_once_it_has_run_what_rank_0_has():
    """Rank 0 may have a sum from shared memory before another rank has looked, and request the last events then."""
    mailbox, timeline, ran = FakeMailbox(), Timeline(), []
    nothing = dict.fromkeys(("call_soon", "ending", "ended"))
    recording = Recording(
        mailbox, timeline, followed=dict, has_run=lambda until: until in ran, clock_offsets_us=(0, 0), **nothing
    )
    mailbox.handlers[TimelineStart](0, TimelineStart(mark_cycles=False))
    [started] = mailbox.sent
    assert started.answers
    mailbox.handlers[TimelineStop](0, TimelineStop({0: 3}))
    recording.poll()
    assert timeline.recording
    last = Event("ALLREDUCE", "allreduce.g2", 0)
    timeline.events.append(last)
    assert not any(each.answers for each in mailbox.sent[1:])
    ran.append({0: 3})
    recording.poll()
    assert not timeline.recording
    assert mailbox.sent[-1] == TimelineEvents((last,), answers=True)


@each_rank_of(1)
def test_stop_without_start_and_a_path_that_cannot_be_written(tmp_path):
    rr.stop_timeline()
    with pytest.raises(rr.InputError, match=r"start_timeline: .*/none/t.json cannot be written: No such file"):
        rr.start_timeline(str(tmp_path / "none" / "t.json"))
    assert rr.allreduce(1.0, op=rr.Sum) == 1


@each_rank_of(2)
def test_a_path_that_cannot_be_written_leaves_the_timeline_before_it(tmp_path):
    path = tmp_path / "t.json"
    for _ in range(2):  # the same file again
        rr.start_timeline(str(path))
        steps(1)
        rr.barrier()
    if rr.rank() == 0:
        with pytest.raises(rr.InputError, match=r"none/t.json cannot be written"):
            rr.start_timeline(str(tmp_path / "none" / "t.json"))
    rr.barrier()
    steps(1)
    rr.stop_timeline()
    rr.barrier()
    if rr.rank() == 0:
        for rank in range(2):
            assert phases(trace.read(path), rank, "allreduce.g0").count("ALLREDUCE") == 2


def test_other_clocks_are_brought_to_rank_0s(tmp_path):
    file = TimelineFile(str(tmp_path / "t.json"), offsets_us=[0.0, 5e6])
    start = file._start_us
    file.add(0, [Event("ALLREDUCE", "allreduce.w", start - 50, 60), Event("ALLREDUCE", "allreduce.w", start + 100, 50)])
    file.add(1, [Event("ALLREDUCE", "allreduce.w", start + 5e6 + 100, 50)])
    file.add(1, [Event("NEGOTIATE_ALLREDUCE", "allreduce.v", start + 5e6 + 200, 3, (0, 1, "v", 2))])
    file.close()
    seen = [(e["ts"], e["dur"]) for e in trace.read(tmp_path / "t.json")]
    assert seen == [(0, 10), (100, 50), (100, 50), (200, 3)], (
        "cut where it began before, and there though rank 0 is not"
    )


def test_a_phase_that_an_earlier_recording_left_open_is_not_told_by_a_later_one():
    timeline = Timeline()
    request = neutral_submission(Signature("allreduce", "w", details=(("op", "Sum"),)), 0, None)
    timeline.start(mark_cycles=False)
    timeline.ready([request], 0)
    timeline.negotiated(request, OPERATION)
    timeline.switch_phase([request], "ALLREDUCE")
    timeline.stop()
    assert [event.name for event in timeline.take() if event.duration_us >= 0] == [
        "SUBMIT",
        "NEGOTIATE_ALLREDUCE",
        "QUEUE",
    ]
    timeline.start(mark_cycles=False)
    timeline.switch_phase([request], "ALLREDUCE")
    timeline.switch_phase([request], None)
    assert [event.name for event in timeline.take() if event.duration_us >= 0] == ["ALLREDUCE"]


def test_events_are_in_the_file_while_the_job_runs(tmp_path):
    path = tmp_path / "t.json"

    def program():
        rr.start_timeline(str(path))
        rr.barrier()
        rr.allreduce(np.ones(3), name="w")
        if rr.rank() == 0:
            wait_until(lambda: {e["pid"] for e in trace.read(path) if e["tensor"] == "allreduce.w"} == {0, 1, 2})
        rr.barrier()

    run_ranks(3, program)


@pytest.mark.parametrize(("at_once", "rows"), [(1, 16), (100, 100)])
def test_tensors_without_a_name_share_rows_unless_they_are_in_flight_together(tmp_path, at_once, rows):
    path = tmp_path / "t.json"

    def program():
        rr.start_timeline(str(path))
        for _ in range(100 // at_once):
            for handle in [rr.allreduce_async(np.ones(3), op=rr.Sum) for _ in range(at_once)]:
                assert rr.synchronize(handle)[0] == 2
        rr.stop_timeline()

    run_ranks(2, program)
    events = trace.read(path)
    assert len({e["tensor"] for e in events if e["ph"] == "X" and e["pid"] == 0}) == rows
    assert sum(e["name"] == "NEGOTIATE_ALLREDUCE" for e in events if e["pid"] == 0) == 100


WORDS = {
    "SUBMIT": "submit",
    "NEGOTIATE_BARRIER": "wait for ranks",
    "NEGOTIATE_ALLREDUCE": "wait for ranks",
    "QUEUE": "queue",
    "MEMCPY_IN_FUSION_BUFFER": "copy in",
    "ALLREDUCE": "reduce",
    "MEMCPY_OUT_FUSION_BUFFER": "copy out",
    "SEND": "send",
    "RECV": "send",
}


@pytest.mark.parametrize(("how", "hosts"), [("named", (0, 0, 0)), ("ordered", (0, 0, 0)), ("ordered", (0, 0, 1))])
def test_what_a_reader_sees_of_a_late_rank(tmp_path, how, hosts):
    """Rank 1 of 3: the others' waits name it, and their flows lead through its row; what fails is in flight no more."""
    path = tmp_path / "t.json"

    def others_are_ready():
        ready = {e["pid"] for e in trace.read(path) if e["ph"] == "i" and e["tensor"].startswith("allreduce.")}
        return ready == {0, 2}

    def program():
        rank, channel = rr.rank(), rr.ordered()
        for late in range(-1, 5):  # it takes the lane, the others submit: not all equally often
            time.sleep(0.01 * (rank == late % 3))
            channel.allreduce_(np.ones(3), op=rr.Sum)
        rr.start_timeline(str(path))
        rr.barrier()
        wait_until(lambda: rank != 1 or others_are_ready())
        if how == "named":
            handles = [rr.allreduce_async(np.ones(1000), name=f"w{k}", op=rr.Sum) for k in range(2)]
        else:
            handles = [channel.allreduce_async_(np.ones(1000), op=rr.Sum) for _ in range(2)]
            handles += [channel.send_async(np.ones(5), (rank + 1) % 3) for _ in range(2)]
            handles += [channel.recv_async(np.ones(5), (rank - 1) % 3) for _ in range(2)]
        for handle in handles:
            handle.wait()
        with pytest.raises(rr.MismatchError):
            channel.broadcast(np.ones(5), rank) if how == "ordered" else rr.allreduce(np.ones(5 + rank), name="odd")
        if rank != 2:
            assert rr.allreduce(np.ones(10), name="joined", op=rr.Sum)[0] == 2
        rr.join()
        rr.stop_timeline()

    run_ranks(3, program, settings=SMALL, hosts=hosts)
    events = trace.read(path)
    processes = {e["args"]["name"] for e in json.loads(path.read_text()) if e["name"] == "process_name"}
    assert processes == {f"rank {rank} on {socket.gethostname()}" for rank in range(3)}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"]: e["cat"] for e in spans}.items() <= WORDS.items()
    waits = [e for e in spans if e["cat"] == "wait for ranks" and e["args"]["bytes"] == 8000]
    for wait in waits:
        rank = wait["pid"]
        assert wait["args"].get("waited for") == (None if rank == 1 else "rank 1")
        calls = [e for e in spans if e["name"] == "SUBMIT" and e["tid"] == wait["tid"] and e["ts"] <= wait["ts"]]
        call = max(calls, key=operator.itemgetter("ts"))  # rank 1's first may have ended when it submits the second
        flow = next(e["id"] for e in events if e["ph"] == "s" and (e["tid"], e["ts"]) == (call["tid"], call["ts"]))
        assert [e["pid"] for e in events if e.get("id") == flow] == [rank, *[1] * (rank != 1), rank]
    assert len(waits) == 6
    joined = [e for e in spans if e["tensor"] == "allreduce.joined"]
    assert {e["pid"] for e in joined} == {0, 1, 2}
    assert {e["args"].get("waited for", "rank 0") for e in joined if e["cat"] == "wait for ranks"} <= {
        "rank 0",
        "rank 1",
    }
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C"][-1] == 0
    assert {e["args"].get("algorithm") for e in joined if e["name"] == "ALLREDUCE"} == {
        "hierarchical" if any(hosts) else "shared"
    }


RANKS, PERIOD_US = 64, 250e3
PHASES = ["QUEUE", "MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]


def recorded(rank, number, start_us):
    """What rank `rank` of 64 records of one all-reduce; the last rank is late."""
    row, args, operation = f"allreduce.layer{number % 50}.weight", {"bytes": 4096}, (0, number, "w", RANKS)
    at, ready = start_us + number * PERIOD_US + 7 * rank, start_us + (number + 0.5) * PERIOD_US
    yield Event(f"rank {rank} is ready", row, at, args={"rank": rank})
    yield Event("bytes in flight", "", at, args=args)
    yield Event("SUBMIT", row, at, 50, operation)
    yield Event("NEGOTIATE_ALLREDUCE", row, at + 50, ready - at - 50, operation, args)
    yield from (Event(name, row, ready + 100 * k, 100, operation, args) for k, name in enumerate(PHASES))
    yield Event("bytes in flight", "", ready + 400, args={"bytes": 0})
    yield Event("end", row, ready + 400, operation=operation)


def test_a_minute_of_64_ranks_stays_short_and_has_the_same_operations_of_all(tmp_path, monkeypatch, caplog):
    """All-reduces from ranks whose events come in any order, late by up to 3 of 4 operations."""
    path, draw, behind, most = tmp_path / "t.json", random.Random(32), [0] * RANKS, 2e6
    assert 2 * BYTES_A_MINUTE + 10e6 <= 100e6, "in any 60 s there are at most two minutes' bytes"
    monkeypatch.setattr("ringreduce.execution.timeline.BYTES_A_MINUTE", most)
    file, sizes = TimelineFile(str(path), [0.0] * RANKS), []
    for number in range(int(115e6 / PERIOD_US)):
        for rank in draw.sample(range(RANKS), RANKS):
            if number - behind[rank] > draw.randrange(4):
                events = [each for n in range(behind[rank], number) for each in recorded(rank, n, file._start_us)]
                file.add(rank, events)
                behind[rank] = number
        if number % int(55e6 / PERIOD_US) == 0:
            sizes.append(path.stat().st_size)
    file.close()
    assert max(after - before for before, after in itertools.pairwise(sizes)) < most + 4 * RANKS * 1500
    assert caplog.text.count("grows too fast") == 1
    events = trace.read(path)
    seen = {rank: set() for rank in range(RANKS)}
    for each in events:
        if each["name"] in ("NEGOTIATE_ALLREDUCE", PHASES[-1]):
            seen[each["pid"]].add((int(each["ts"] // PERIOD_US), each["name"]))
    assert all(each == seen[0] for each in seen.values()), "some operation is there of some ranks only"
    assert {int(n * PERIOD_US // 60e6) for n, _ in seen[0]} == {0, 1}
    assert sum(each["ph"] == "f" for each in events) == RANKS * len({n for n, _ in seen[0]}) == RANKS * len(seen[0]) / 2
    assert [each["name"].partition(" ")[0] for each in events if each.get("s") == "g"] == ["left", "all", "left"]


FULL = """
import resource, sys
import numpy as np
import ringreduce as rr
from tests.support.on_threads import each_rank_of
rr.init()
resource.setrlimit(resource.RLIMIT_FSIZE, (1500000, 1500000))
for number in range(3000):
    rr.allreduce(np.ones(3), name=f"tensor {number}")
print("trained")
"""


@pytest.mark.timeout(90)
def test_a_full_disk_ends_the_timeline_and_neither_the_job_nor_its_exit(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    monkeypatch.setenv("RINGREDUCE_TIMELINE", str(path))
    run = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "trained\n"), run.stderr
    told = f"ringreduce: the timeline ends here, since {path} cannot be written: File too large; the job continues\n"
    assert run.stderr.count("timeline") == run.stderr.count(told) == 1, run.stderr
    assert len(trace.read(path)) > 20, "what was written before is whole"


def fails(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("words", ["its last words arrive", "its last words fail, too"])
def test_nobody_waits_for_an_engine_that_has_failed(tmp_path, words, fresh_log, capsys):
    """Rank 0's of two; the other one never comes."""
    log.configure("warning", timestamps=False)
    world, transport, settings = World(0, 2, (0, 0)), ThreadNetwork(2).transport(0), Settings()
    engine = Engine(world, transport, settings, HostResources(world, transport, settings))
    handle = engine.submit("barrier", "b")
    if "fail" in words:
        transport.send_control = fails
    transport.recv_control = fails
    wait_until(lambda: engine.ending.error)  # while nobody waits
    with pytest.raises(
        rr.CollectiveError, match=r"rank 0 of 2 failed inside an operation: OSError: .*No space left"
    ) as at:
        handle.wait()
    assert [each.name for each in traceback.extract_tb(at.value.__cause__.__traceback__)][-1] == "fails"
    engine._thread.join()
    with pytest.raises(rr.CollectiveError, match="OSError") as at:
        engine.submit("barrier", "c")
    assert isinstance(at.value.__cause__, OSError)
    assert capsys.readouterr().err.count("Traceback") == 1
    with pytest.raises(
        rr.CollectiveError, match="start_timeline: rank 0 of 2 failed inside an operation: OSError"
    ) as at:
        engine.timeline.start(str(tmp_path / "t.json"), mark_cycles=False)
    assert at.value.__cause__ is engine.ending.error
    engine.timeline.stop()
    assert engine.leave("the test ended") is False


@pytest.mark.timeout(30)
def test_a_side_job_that_fails_is_told_of_once_and_ends(capsys):
    def program():
        engine = runtime.current("a test").engine
        engine.stalls._check = engine.timeline._flush = fails
        return [rr.allreduce(np.ones(2), name="w", op=rr.Sum)[0] for _ in range(3)]

    assert run_ranks(2, program) == [[2.0] * 3] * 2
    told, full = capsys.readouterr().err.splitlines(), "OSError: [Errno 28] No space left on device"
    assert set(told) >= {
        f"ringreduce: the timeline of rank {rank} failed, and ends; the job continues: {full}" for rank in range(2)
    }
    assert len(told) == len(set(told)) <= 4
