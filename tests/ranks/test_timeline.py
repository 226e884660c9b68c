"""The timeline: what Horovod's shows, of every rank, in a file that is complete at every moment."""

import json
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import log, runtime
from ringreduce.engine.engine import Engine
from ringreduce.execution.executor import Executor
from ringreduce.execution.host import Host
from ringreduce.execution.signature import Signature
from ringreduce.monitor.timeline import Event, Timeline, TimelineFile
from ringreduce.negotiation.neutral import neutral_submission
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.threads import ThreadNetwork
from ringreduce.world import World
from tests.ranks.on_threads import each_rank_of
from tests.support.patience import wait_until

SMALL = Settings(fusion_slot_bytes=1024, shared_slot_bytes=1024, fusion_buffer_bytes=8192)


def steps(count):
    for _ in range(count):
        handles = [rr.allreduce_async(np.ones(10 * (k + 1)), name=f"g{k}", op=rr.Sum) for k in range(3)]
        rr.allgather(np.ones((rr.rank(), 2)), name="metric")
        assert [rr.synchronize(handle)[0] for handle in handles] == [rr.size()] * 3


def events_of(path):
    with open(path, "rb", buffering=0) as file:
        records = json.loads(file.read(1 << 24))  # at once: between two reads the file may grow
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert any(r["name"] == "start_time_since_epoch_in_micros" for r in records)
    found = [r for r in records if r["ph"] != "M"]
    for record in found:
        record["tensor"] = names[record["pid"], record["tid"]]
    return found


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
    events = events_of(path)
    one_step = ["NEGOTIATE_ALLREDUCE", "QUEUE", "MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    for rank in range(3):
        seen = phases(events, rank, "allreduce.g1")
        alone = ["NEGOTIATE_ALLREDUCE", "QUEUE", "ALLREDUCE"]  # a tensor that travels alone is not copied
        assert seen[:5] in (one_step, alone + seen[3:5]), seen
        assert seen.count("ALLREDUCE") == 2, "nothing after stop_timeline()"
        assert phases(events, rank, "allgather.metric").count("ALLGATHER") == 2
        assert any(e["name"] == "CYCLE_START" for e in events if e["pid"] == rank)
    ready = [e["name"] for e in events if e["tensor"] == "allreduce.g2" and e["ph"] == "i"]
    assert sorted(ready) == ["0", "0", "1", "1", "2", "2"], "an instant for each rank that is ready"
    assert all(e["ph"] == "i" or e["dur"] >= 0 for e in events)


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
        events = events_of(path)
        for rank in range(2):
            assert phases(events, rank, "allreduce.g0").count("ALLREDUCE") == 1
    assert not any(e["name"] == "CYCLE_START" for e in events)


@pytest.mark.usefixtures("threads_that_take_turns_quickly")
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
        events = events_of(path)
        for rank in range(3):
            assert [phases(events, rank, f"allreduce.g{k}").count("ALLREDUCE") for k in range(3)] == [1, 1, 1]
            assert phases(events, rank, "allgather.metric").count("ALLGATHER") == 1


@each_rank_of(1)
def test_stop_without_start_and_a_path_that_cannot_be_written(tmp_path):
    rr.stop_timeline()
    with pytest.raises(rr.InputError, match=r"start_timeline: .*/none/t.json cannot be written: No such file"):
        rr.start_timeline(str(tmp_path / "none" / "t.json"))
    assert rr.allreduce(1.0, op=rr.Sum) == 1


def test_other_clocks_are_brought_to_rank_0s(tmp_path):
    file = TimelineFile(str(tmp_path / "t.json"), offsets_us=[0.0, 5e6])
    start = file._start_us
    file.add(0, [Event("ALLREDUCE", "allreduce.w", start + 100, 50)])
    file.add(1, [Event("ALLREDUCE", "allreduce.w", start + 5e6 + 100, 50)])
    file.close()
    assert {e["ts"] for e in events_of(tmp_path / "t.json")} == {100.0}


def test_a_phase_that_an_earlier_recording_left_open_is_not_told_by_a_later_one():
    timeline = Timeline()
    request = neutral_submission(Signature("allreduce", "w", details=(("op", "Sum"),)), 0, None)
    timeline.start(mark_cycles=False)
    timeline.negotiated(request)
    timeline.switch_phase([request], "ALLREDUCE")
    timeline.stop()
    assert [event.name for event in timeline.take()] == ["NEGOTIATE_ALLREDUCE", "QUEUE"]
    timeline.start(mark_cycles=False)
    timeline.switch_phase([request], "ALLREDUCE")
    timeline.switch_phase([request], None)
    assert [event.name for event in timeline.take()] == ["ALLREDUCE"]


def test_events_are_in_the_file_while_the_job_runs(tmp_path):
    path = tmp_path / "t.json"

    def program():
        rr.start_timeline(str(path))
        rr.barrier()
        rr.allreduce(np.ones(3), name="w")
        if rr.rank() == 0:
            wait_until(lambda: {e["pid"] for e in events_of(path) if e["tensor"] == "allreduce.w"} == {0, 1, 2})
        rr.barrier()

    run_ranks(3, program)


def test_tensors_without_a_name_share_rows(tmp_path):
    path = tmp_path / "t.json"

    def program():
        rr.start_timeline(str(path))
        for handle in [rr.allreduce_async(np.ones(3), op=rr.Sum) for _ in range(100)]:
            assert rr.synchronize(handle)[0] == 2
        rr.stop_timeline()

    run_ranks(2, program)
    events = events_of(path)
    assert len({e["tensor"] for e in events}) == 16
    assert sum(e["name"] == "NEGOTIATE_ALLREDUCE" for e in events if e["pid"] == 0) == 100


FULL = """
import resource, sys
import numpy as np
import ringreduce as rr
from tests.ranks.on_threads import each_rank_of
rr.init()
resource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000))
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
    told = f"ringreduce: the timeline ends here, since {path} cannot be written: File too large; the job goes on\n"
    assert run.stderr.count("timeline") == run.stderr.count(told) == 1, run.stderr
    assert len(events_of(path)) > 20, "what was written before is whole"


def fails(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("words", ["its last words arrive", "its last words fail, too"])
def test_nobody_waits_for_an_engine_that_has_failed(tmp_path, words, fresh_log, capsys):
    """Rank 0's of two; the other one never comes."""
    log.configure("warning", timestamps=False)
    world, transport, settings = World(0, 2, (0, 0)), ThreadNetwork(2).transport(0), Settings()
    engine = Engine(world, transport, settings, Host(world, transport, settings))
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
        engine._stalls._check = engine._recording._flush = fails
        return [rr.allreduce(np.ones(2), name="w", op=rr.Sum)[0] for _ in range(3)]

    assert run_ranks(2, program) == [[2.0] * 3] * 2
    told, full = capsys.readouterr().err.splitlines(), "OSError: [Errno 28] No space left on device"
    assert set(told) >= {
        f"ringreduce: the timeline of rank {rank} failed, and ends; the job goes on: {full}" for rank in range(2)
    }
    assert len(told) == len(set(told)) <= 4
