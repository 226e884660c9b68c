"""Folding, without processes and clocks: nothing is lost, nothing reordered, nothing waits too long."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.output.fold import Folded, Folder

WAIT_S = 0.25
SIZE = 4

# one event: this rank prints this line (of few, so that ranks agree by chance), so long after the one before;
# or it ends, with None
texts = st.one_of(st.sampled_from([b"a", b"b", b"c", b""]), st.none())
events = st.lists(
    st.tuples(
        st.integers(0, SIZE - 1), st.sampled_from(["stdout", "stderr"]), texts, st.sampled_from([0.0, 0.01, 0.1, 0.3])
    ),
    max_size=60,
)


def lines_of(rank, shown):
    return [(folded.stream, folded.line) for folded in shown if rank in folded.ranks]


@given(events, st.booleans(), st.sampled_from([1000, 1 << 20]))
def test_each_rank_gets_its_lines_in_order_and_in_time(events, timely, max_held_bytes):
    folder = Folder(range(SIZE), WAIT_S, max_held_bytes)
    printed = {rank: [] for rank in range(SIZE)}
    printed_at_s = {rank: [] for rank in range(SIZE)}
    shown = []
    now_s = 0.0
    for rank, stream, line, pause_s in events:
        now_s += pause_s
        if timely:  # as the thread that shows lines in time does
            shown += folder.expire(now_s)
        if line is None:
            folder.end(rank)
            continue
        printed[rank].append((stream, line))
        printed_at_s[rank].append(now_s)
        shown += folder.add(rank, stream, line, now_s)
        if timely:
            assert folder.due_s > now_s
            for other in range(SIZE):  # what is not shown yet has come less than the wait ago
                late = printed_at_s[other][len(lines_of(other, shown)) :]
                assert all(at_s + WAIT_S > now_s for at_s in late)
    shown += folder.flush()
    for rank in range(SIZE):
        assert lines_of(rank, shown) == printed[rank]
    assert sum(len(folded.ranks) for folded in shown) == sum(map(len, printed.values()))
    assert all(list(folded.ranks) == sorted(set(folded.ranks)) for folded in shown)
    assert folder.flush() == []
    assert folder.due_s == math.inf


@given(st.lists(st.binary(max_size=2), max_size=20), st.data())
def test_ranks_that_print_the_same_fold_completely(lines, data):
    turns = data.draw(st.permutations([rank for rank in range(3) for _ in lines]))
    folder = Folder(range(3))
    left = {rank: iter(lines) for rank in range(3)}
    shown = [folded for rank in turns for folded in folder.add(rank, "stdout", next(left[rank]), 0.0)]
    assert [(folded.ranks, folded.line) for folded in shown] == [((0, 1, 2), line) for line in lines]


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=6), st.data())
def test_lines_of_one_rank_do_not_hinder_the_folding_of_those_of_all(extras, data):
    """Ranks print common lines (all different), and some of them lines of their own in between."""
    scripts = {rank: [] for rank in range(4)}
    for number, ranks in enumerate(extras):
        for count, rank in enumerate(ranks):
            scripts[rank].append(b"own %d of %d, %d" % (number, rank, count))
        for script in scripts.values():
            script.append(b"common %d" % number)
    turns = data.draw(st.permutations([rank for rank, script in scripts.items() for _ in script]))
    folder = Folder(scripts)
    left = {rank: iter(script) for rank, script in scripts.items()}
    shown = [folded for rank in turns for folded in folder.add(rank, "stdout", next(left[rank]), 0.0)]
    common = [folded.ranks for folded in shown if folded.line.startswith(b"common")]
    assert common == [(0, 1, 2, 3)] * len(extras)


def test_the_example_of_the_module():
    folder = Folder(range(2))
    shown = []
    for rank, script in enumerate(
        [[b"epoch 1", b"loss 0.3", b"epoch 2"], [b"epoch 1", b"loss 0.4", b"saved", b"epoch 2"]]
    ):
        for line in script:
            shown += folder.add(rank, "stdout", line, float(rank))
    assert [(folded.ranks, folded.line) for folded in shown] == [
        ((0, 1), b"epoch 1"),
        ((0,), b"loss 0.3"),
        ((1,), b"loss 0.4"),
        ((1,), b"saved"),
        ((0, 1), b"epoch 2"),
    ]
    assert shown[0].at_s == 0.0  # when the first of them printed it


def test_some_ranks_may_fold_without_the_others():
    folder = Folder(range(4), WAIT_S)
    for rank in (3, 1, 0):
        assert folder.add(rank, "stdout", b"x", 1.0) == []
    assert folder.due_s == 1.0 + WAIT_S
    assert folder.expire(1.2) == []
    assert folder.expire(1.25) == [Folded((0, 1, 3), "stdout", b"x", 1.0)]


def test_nobody_waits_for_a_rank_that_has_ended():
    folder = Folder(range(3))
    folder.end(2)
    assert folder.add(0, "stdout", b"x", 0.0) == []
    assert [folded.ranks for folded in folder.add(1, "stdout", b"x", 0.0)] == [(0, 1)]
    assert folder.add(2, "stdout", b"its child still writes", 0.0) == []
    assert [folded.ranks for folded in folder.flush()] == [(2,)]


def test_a_flood_is_bounded_and_costs_by_the_line():
    folder = Folder(range(16), max_held_bytes=1 << 20)
    shown = []

    def add(first):
        for count in range(first, first + 25_000):
            shown.extend(folder.add(count % 2, "stdout", b"%d" % count, 0.0))

    assert calls_of(lambda: add(25_000)) < 1.5 * calls_of(lambda: add(0)), "however many lines are held"
    assert len(shown) > 40_000
    assert len(shown) + len(folder.flush()) == 50_000


def calls_of(work):
    """How many calls, and steps of generators, `work` takes."""
    seen = 0

    def note(_frame, event, _argument):
        nonlocal seen
        seen += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("line_of", [lambda rank: b"the same", lambda rank: b"own %d" % rank], ids=["same", "own"])
def test_the_work_for_a_line_of_each_rank_grows_with_the_ranks_and_no_faster(line_of):
    def print_and_show(size):
        folder = Folder(range(size))
        shown = [folded for rank in range(size) for folded in folder.add(rank, "stdout", line_of(rank), rank * 1e-6)]
        shown += folder.expire(1.0)
        assert sum(len(folded.ranks) for folded in shown) == size

    assert calls_of(lambda: print_and_show(512)) < 3 * calls_of(lambda: print_and_show(256))
