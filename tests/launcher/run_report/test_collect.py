"""What the run report is made of: kept in bounded memory, however long the job."""

import json

import pytest

from ringrun.connection.wire import RankError
from ringrun.report.outcome import RankEnd
from ringrun.run_report import collect
from ringrun.run_report.causes import _seconds_at_lines
from ringrun.run_report.collect import Collector, seconds_of
from ringrun.run_report.document import document
from tests.support.loops import in_a_loop


@pytest.fixture
def clock(monkeypatch):
    """A job's age in seconds, to be set."""
    ages = [0.0]
    monkeypatch.setattr(Collector, "age_s", property(lambda _: ages[0]))
    return ages


def totals(rank, second, steps=3):
    """What rank says after so many seconds with `steps` steps in each."""
    n = steps * second
    return {"at_s": second, "step": n, "histogram": {str(-40 - rank): n}, "rss": 1000 * rank + second % 7, "shm": 5}


def say(collector, rank, **message):
    collector.measured(rank, json.dumps(message))


def test_a_week_fits_in_a_few_bins_and_no_step_is_lost(clock):
    collector = Collector(["train"])
    collector.begin(2)
    seconds = range(1, 4000)
    for rank in range(2):
        say(collector, rank, about={"rank": rank})
    for clock[0] in seconds:
        for rank in range(2):
            say(collector, rank, totals=totals(rank, clock[0]))
    bins = collector.bins
    assert collect.MOST_BINS / 2 <= len(bins.by_number) <= collect.MOST_BINS
    assert bins.width_s == 8
    steps = [each.steps for each in bins.by_number.values()]
    assert set().union(*steps) == {-40}, "rank 0's, as all step alike"
    assert sum(each[-40] for each in steps) == 3 * 3999
    assert {each[-40] for each in steps[1:-1]} == {3 * 8}
    assert {each.rss for each in list(bins.by_number.values())[1:-1]} == {1006}, "the most of all ranks and moments"
    assert collector.ranks[1].recent("step") == pytest.approx(3 * 90, abs=3 * 31), "of one to two minutes"
    assert seconds_of(-40) == pytest.approx(1.05**-40, rel=0.03)


def test_of_steps_the_last_are_kept_and_those_of_another_world_are_dropped():
    collector = Collector()
    collector.begin(100)
    for number in range(99):
        say(collector, 7, step={"number": number})
    assert [each["number"] for each in collector.ranks[7].steps] == list(range(89, 99))
    say(collector, 7, about={"rank": 3})
    assert not collector.ranks[7].steps


def test_seconds_in_which_no_step_ends_have_none(clock):
    collector = Collector()
    collector.begin(1)
    say(collector, 0, about={"rank": 0})
    for clock[0], done in ((1, 5), (2, 5), (3, 5), (4, 6)):
        say(collector, 0, totals=totals(0, 1, steps=done))
    assert [dict(each.steps) for each in collector.bins.by_number.values()] == [{-40: 5}, {}, {}, {-40: 1}]


@pytest.mark.parametrize("restarts", [True, False])
def test_steps_of_another_attempt_or_world_count_too(clock, restarts):
    collector = Collector()
    collector.begin(1)
    for _ in range(2):
        if restarts:
            collector.begin(1)
        say(collector, 0, about={"rank": 0})
        say(collector, 0, totals=totals(0, 4))
    assert collector.bins.by_number[0].steps == {-40: 24}


@in_a_loop("text", ["", "[", "7", "{}", '{"totals": 7}', '{"totals": {"step": 1}}', '{"a": 1, "b": 2}'])
def test_what_makes_no_sense_is_dropped(text):
    collector = Collector()
    collector.begin(1)
    collector.measured(0, text)
    assert not collector.bins.by_number


def test_of_what_happens_the_newest_is_kept(clock):
    collector = Collector()
    collector.begin(3)
    for clock[0] in range(1000):
        collector.note("stalls", f"stall {clock[0]}")
    collector.ended(RankEnd(1, "h", 12, 3, 0.0))
    collector.ended(RankEnd(0, "h", 11, 0, 0.0))
    collector.ended(RankEnd(2, "h", 13, 1, 0.0, error=RankError("ValueError", "bad batch", "…")))
    assert [each.text for each in collector.events["stalls"]] == [f"stall {at}" for at in range(800, 1000)]
    assert [(each.rank, each.text) for each in collector.events["failures"]] == [
        (1, "exit code 3"),
        (2, "exit code 1: ValueError: bad batch"),
    ]


def test_samples_and_traffic_of_a_long_first_step_are_taken_off_nothing():
    """They begin anew after the first step, which ends after 70 s here; a step takes 100 ms."""
    collector = Collector()
    collector.begin(2)
    for rank in range(2):
        say(collector, rank, about={"rank": rank, "host": f"h{rank}", "host_number": rank})
    for second in (0, 60, 72, 120, 130, 200):
        steps = 10 * max(0, second - 70)
        for rank in range(2):
            seconds = 30 * (second - 70 if steps else second + 1)  # of which there are 30 samples in each
            sums = {"samples": seconds, "lines": {f"t.py:{rank + 1}": seconds // 2, "t.py:7": seconds // 2}}
            sums |= {"core_wait_s": 2e-4 * seconds, "sent": {str(1 - rank): 1000 * (steps or 9999)}, "send_s": {}}
            sums |= dict.fromkeys(("blocked_s", "moving_s", "hidden_s"), 0.0) | {"step_s": steps / 10}
            say(collector, rank, totals=totals(rank, second) | sums | {"step": steps})
        found = document(collector) if steps else {"ranks": [], "links": []}
        for rank, row in enumerate(found["ranks"]):
            assert sum(_seconds_at_lines(collector.ranks[rank]).values()) == pytest.approx(0.1), second
            assert row["core_wait_ms"] == pytest.approx(0.6), second
        assert [each["bytes_per_step"] for each in found["links"]] == [1000] * len(found["ranks"]), second


def test_a_new_attempt_and_a_new_world_begin_with_nothing(clock):
    collector = Collector()
    collector.begin(2)
    for rank in range(2):
        say(collector, rank, about={"rank": rank, "host": "h"})
    for clock[0] in (0, 100):
        say(collector, 0, totals=totals(0, 1 + clock[0]))
    say(collector, 0, about={"rank": 0})
    assert collector.latest() == []
    say(collector, 0, totals=totals(0, 4))
    assert collector.ranks[0].recent("step") == 12, "not less than there was in the world before"
    collector.begin(1)
    assert (collector.size, collector.ranks) == (1, {})
