"""The timeline: what Horovod's shows, of every rank, in a file that is complete at every moment."""

import json

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.engine.description import Description
from ringreduce.engine.gpu import Gpu
from ringreduce.engine.joined import stand_in
from ringreduce.engine.timeline import Event, Timeline, TimelineFile
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

SMALL = Settings(fusion_slot_bytes=1024, shared_slot_bytes=1024, fusion_buffer_bytes=8192)


def steps(count):
    for _ in range(count):
        handles = [rr.allreduce_async(np.ones(10 * (k + 1)), name=f"g{k}", op=rr.Sum) for k in range(3)]
        rr.allgather(np.ones((rr.rank(), 2)), name="metric")
        assert [rr.synchronize(handle)[0] for handle in handles] == [rr.size()] * 3


def events_of(path):
    records = json.loads(path.read_text())
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
                json.loads(path.read_text())
            if path is paths[0]:
                rr.stop_timeline()  # the second is ended by the third, the third by the end of the job
            rr.barrier()

    run_ranks(2, program)
    for path in paths:
        events = events_of(path)
        for rank in range(2):
            assert phases(events, rank, "allreduce.g0").count("ALLREDUCE") == 1
    assert not any(e["name"] == "CYCLE_START" for e in events)


def test_stop_without_start_and_a_path_that_cannot_be_written(tmp_path):
    def program():
        rr.stop_timeline()
        with pytest.raises(rr.InputError, match=r"start_timeline: .*/none/t.json cannot be written: No such file"):
            rr.start_timeline(str(tmp_path / "none" / "t.json"))
        return rr.allreduce(1.0, op=rr.Sum)

    assert run_ranks(1, program) == [1]


def test_other_clocks_are_brought_to_rank_0s(tmp_path):
    file = TimelineFile(str(tmp_path / "t.json"), offsets_us=[0.0, 5e6])
    start = file._start_us
    file.add(0, [Event("ALLREDUCE", "allreduce.w", start + 100, 50)])
    file.add(1, [Event("ALLREDUCE", "allreduce.w", start + 5e6 + 100, 50)])
    file.close()
    assert {e["ts"] for e in events_of(tmp_path / "t.json")} == {100.0}


def test_a_phase_that_an_earlier_recording_left_open_is_not_told_by_a_later_one():
    timeline = Timeline()
    request = stand_in(Description("allreduce", "w", details=(("op", "Sum"),)), 0, Gpu(0))
    timeline.start(mark_cycles=False)
    timeline.agreed(request)
    timeline.turn([request], "ALLREDUCE")
    timeline.stop()
    assert [event.name for event in timeline.take()] == ["NEGOTIATE_ALLREDUCE", "QUEUE"]
    timeline.start(mark_cycles=False)
    timeline.turn([request], "ALLREDUCE")
    timeline.turn([request], None)
    assert [event.name for event in timeline.take()] == ["ALLREDUCE"]
