"""Tuning while ranks work: right results with every knob, the same knobs everywhere, and the file of a later run."""

import dataclasses
import json
import re

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.engine import tuner
from ringreduce.engine.engine import GLOBAL
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

SETTINGS = Settings(
    autotune=True, fusion_buffer_bytes=64 << 10, shared_slot_bytes=4 << 10, fusion_slot_bytes=8 << 10, cycle_time_ms=0.0
)
COUNTS = [3, 20000, 1, 700, 4096, 0, 2049]
MOST_STEPS = 400


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    """One step is a sample, however short."""
    monkeypatch.setattr(tuner, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(tuner, "LEAST_STEP_BYTES", 1)


@pytest.fixture
def used(monkeypatch):
    """By rank: the knobs of every all-reduce, in the order in which they were queued."""
    found = {}
    original = runtime.Engine._queue

    def queue(self, lane, descriptions, divisor):
        if lane.number == GLOBAL:
            names = tuple(each.key for each in descriptions)
            found.setdefault(self.world.rank, []).append((names, lane.knobs))
        original(self, lane, descriptions, divisor)

    monkeypatch.setattr(runtime.Engine, "_queue", queue)
    return found


def tensors(rank, step):
    """Whole numbers, so that sums are exact in any order: other ones on each rank, in each tensor, at each index."""
    return [(np.arange(count) % 61 + 7 * k + 3 * rank + step) % 127.0 for k, count in enumerate(COUNTS)]


def train(steps):
    """Steps of training, each checked; ranks submit in different orders. Returns the knobs of each step."""
    size, rank, random = rr.size(), rr.rank(), np.random.default_rng(rr.rank())
    seen = []
    for step in range(steps):
        mine = [each.astype(np.float32) for each in tensors(rank, step)]
        handles = {k: rr.allreduce_async_(mine[k], name=f"g{k}", op=rr.Sum) for k in random.permutation(len(mine))}
        for handle in handles.values():
            rr.synchronize(handle)
        expected = [sum(each) for each in zip(*(tensors(other, step) for other in range(size)), strict=True)]
        for got, wanted in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        seen.append(rr.info().knobs)
        ended = [each.origin == "tuned" for each in rr.allgather_object(seen[-1])]
        if all(ended):
            break
    return seen


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("hosts", "more"),
    [
        (None, {}),
        (None, {"algorithm": "ring"}),
        (None, {"deterministic": True}),
        ([0, 1, 1], {}),
        ([0, 1, 1], {"costs": "wire_gbs=10"}),  # what goes by memory, and what by messages
        ([0, 1, 2], {}),
    ],
    ids=["one host", "ring", "deterministic", "two hosts", "fast wire", "a host for each"],
)
def test_results_are_right_while_knobs_change_and_all_ranks_use_the_same(tmp_path, capsys, used, size, hosts, more):
    path = tmp_path / "tuned.json"
    settings = dataclasses.replace(SETTINGS, autotune_file=str(path), **more)
    results = run_ranks(size, lambda: train(MOST_STEPS), settings=settings, hosts=hosts and hosts[:size])
    found = json.loads(path.read_text())
    assert 3 <= len(found["tried"]) <= 22
    for seen in results:
        assert {each.origin for each in seen} == {"default", "trial", "tuned"}
        assert seen[-1]._asdict() == {**found["knobs"], "origin": "tuned"}
    tried = {json.dumps(each["knobs"]) for each in found["tried"]}
    assert len({knobs[:-1] for knobs in results[0]}) > len(tried) // 2  # they were really in use
    for rank in range(1, size):
        assert used[rank] == used[0]
    assert re.search(r"ringreduce: autotune: .*, after \d+ steps; written to .*tuned.json\n", capsys.readouterr().err)
    if more.get("algorithm") or more.get("deterministic"):
        assert {each["knobs"]["algorithm"] for each in found["tried"]} == {"auto"}


def test_a_tuned_file_is_loaded_by_all_ranks_of_a_later_run(tmp_path, capsys):
    path = tmp_path / "tuned.json"
    run_ranks(2, lambda: train(MOST_STEPS), settings=dataclasses.replace(SETTINGS, autotune_file=str(path)))
    content = json.loads(path.read_text())
    content["knobs"]["shared_slot_bytes"] = 1024  # what the search would hardly find by itself
    path.write_text(json.dumps(content))
    capsys.readouterr()
    later = dataclasses.replace(SETTINGS, autotune=False, autotune_file=str(path))
    for seen in run_ranks(2, lambda: train(3), settings=later):
        assert [(each.shared_slot_bytes, each.origin) for each in seen] == [(1024, "loaded")] * 3
    assert capsys.readouterr().err == ""


def test_a_file_for_another_layout_is_ignored_with_one_line(tmp_path, capsys):
    path = tmp_path / "tuned.json"
    run_ranks(2, lambda: train(MOST_STEPS), settings=dataclasses.replace(SETTINGS, autotune_file=str(path)))
    capsys.readouterr()
    later = dataclasses.replace(SETTINGS, autotune=False, autotune_file=str(path))
    for seen in run_ranks(3, lambda: train(3), settings=later):
        assert {each.origin for each in seen} == {"default"}
    assert capsys.readouterr().err == (
        f"ringreduce: RINGREDUCE_AUTOTUNE_FILE={path} is ignored: it was made for ranks_per_host [2], and here it is "
        "[3]\n"
    )


def test_a_slot_that_is_used_in_part_moves_as_many_slots_as_that_makes():
    """Knobs do what they say: the region's turns count the slots."""

    def turns():
        region = runtime.current("test").engine.lanes[GLOBAL].routes.region
        before = region.turn
        rr.allreduce(np.ones(64 << 10, np.uint8), name="x", op=rr.Sum)
        return region.turn - before

    def program():
        engine = runtime.current("test").engine
        found = []
        for slot_bytes in (4096, 1024, 64):
            rr.barrier()
            engine.lanes[GLOBAL].knobs = engine.lanes[GLOBAL].knobs._replace(shared_slot_bytes=slot_bytes)
            rr.barrier()
            found.append(turns())
        return found

    settings = dataclasses.replace(SETTINGS, autotune=False)
    assert run_ranks(2, program, settings=settings) == [[16, 64, 1024]] * 2


def test_one_rank_alone_tunes_nothing(capsys):
    assert {each.origin for each in run_ranks(1, lambda: train(20), settings=SETTINGS)[0]} == {"default"}
    assert capsys.readouterr().err == ""


def test_other_process_sets_keep_the_defaults():
    def program():
        train(MOST_STEPS)
        lanes = runtime.current("test").engine.lanes.values()
        return [lane.knobs.origin for lane in lanes]

    results = run_ranks(3, program, settings=SETTINGS, process_sets=[[0, 1]])
    assert results == [["tuned", "default"], ["tuned", "default"], ["tuned"]]
