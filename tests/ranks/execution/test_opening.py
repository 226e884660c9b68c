"""Channels that their members open alone: what torch.distributed's groups are made of."""

import math
import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.view import as_buffer
from ringreduce.engine.channels import IN_ORDER
from ringreduce.runtime.own_channel import OwnChannel
from ringreduce.testing import run_ranks
from tests.ranks.execution import test_into_outputs as into_outputs
from tests.support.on_threads import each_rank_of
from tests.support.patience import wait_until
from tests.support.world import on_every_world


def open_channel(members, name="group"):
    return into_outputs.open_channel(members, name, IN_ORDER)


def begin_sum(number, values, then=None):
    return into_outputs.begin(number, "allreduce", [values], [values], into_outputs.SUM, then=then)


def total(number, count=3):
    values = np.arange(count) + 10.0 ** rr.rank()
    begin_sum(number, values).wait()
    return values.tolist()


def several_groups():
    """Disjoint ones, overlapping ones and several of the same ranks, by their members alone."""
    groups = [[0, 1], [2], [1, 2], [0, 1, 2], [0, 1, 2], [2, 0]]
    mine = [(members, open_channel(members)) for members in groups if rr.rank() in members and max(members) < rr.size()]
    found = {}
    for number in range(3):
        for members, channel in reversed(mine):
            found[f"{members} {number}"] = total(channel, 3 + 100_000 * (number == 2))[:3]
    channels = runtime.current("a test").engine.channels.by_number
    uses_memory = [channels[each].executor.context.algorithms.region is not None for _, each in mine]
    for _, channel in mine:
        runtime.current("a test").engine.channels.shut(channel)
    again = open_channel(range(rr.size()))
    return found, uses_memory, total(again), len(runtime.current("a test").engine.channels.by_number)


def check_groups(results, one_host):
    everyones = sum(10.0**rank for rank in range(len(results)))
    for found, uses_memory, again, channels in results:
        for key, values in found.items():
            members = [int(each) for each in key[1:].partition("]")[0].split(",")]
            expected = np.arange(3.0) * len(members) + sum(10.0**each for each in members)
            assert values == expected.tolist(), key
        assert again == (np.arange(3.0) * len(results) + everyones).tolist()
        assert channels == 1
        assert not one_host or any(uses_memory)


@on_every_world
def test_members_alone_make_groups_of_any_ranks(world, size):
    check_groups(world(size).run(several_groups), one_host=True)


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1]], ids=["three hosts", "two hosts"])
def test_on_several_hosts(hosts):
    check_groups(run_ranks(3, several_groups, hosts=hosts), one_host=False)


@each_rank_of(3)
def test_different_groups_are_an_error_on_all_members():
    with pytest.raises(rr.MismatchError, match=r"opens 'g\d' of ranks \[0, 1, 2\], but rank \d opens 'g\d' of") as at:
        open_channel([0, 1, 2], f"g{rr.rank()}")
    assert "all members must create the same groups in the same order" in str(at.value)
    assert total(open_channel([0, 1, 2], "again")) == [111.0, 114.0, 117.0]


@each_rank_of(2)
def test_a_group_that_is_shut_fails_what_is_pending_and_accepts_nothing():
    number = open_channel([0, 1])
    if rr.rank() == 0:
        handle = begin_sum(number, np.ones(100_000))
        runtime.current("a test").engine.channels.shut(number)
        with pytest.raises(rr.CollectiveError, match=r"allreduce 'group' \(.*\): its process group was destroyed"):
            handle.wait()
        with pytest.raises(rr.InputError, match=r"allreduce: there is no process set -\d+"):
            begin_sum(number, np.ones(1))
    rr.barrier()


def test_a_group_that_is_not_made_in_time_is_given_up_and_its_messages_meet_no_other():
    given_up = threading.Event()

    def program():
        if rr.rank() == 0:
            with pytest.raises(rr.StalledError, match=r"open 'late' \(test_opening.py:\d+\): Timed out after 0.05 s"):
                OwnChannel([0, 1], "late", 0.05, "")
            with pytest.raises(
                rr.CollectiveError,
                match=r"'again' of ranks \[0, 1\]: another group with rank 1 is still being created, or",
            ):
                OwnChannel([0, 1], "again", 10.0, "")
            wait_until(lambda: not runtime.current("a test").engine.channels.by_number)
            given_up.set()
        assert given_up.wait(10)
        return rr.rank() != 1 and total(open_channel([0, 2]))

    assert run_ranks(3, program, hosts=[0, 1, 2]) == [[101.0, 103.0, 105.0], False, [101.0, 103.0, 105.0]]


@pytest.mark.parametrize("peer", [1, 2], ids=["refused", "timed out"])
def test_a_group_that_is_not_made_leaves_one_that_is_being_made_alone(peer):
    ended = threading.Event()

    def program():
        if rr.rank() == 0:
            engine = runtime.current("a test").engine
            number, opened = engine.channels.open([0, 1], "first", IN_ORDER)
            with pytest.raises(rr.CollectiveError, match=r"Create groups one at a time|Timed out after"):
                OwnChannel([0, peer], "second", 0.05 if peer == 2 else 10.0, "")
            wait_until(lambda: list(engine.channels.by_number) == [number])
            ended.set()
            opened.wait(10)
            return total(number)
        assert ended.wait(10)
        return rr.rank() == 2 or total(open_channel([0, 1], "first"))

    assert run_ranks(3, program, hosts=[0, 1, 2]) == [[11.0, 13.0, 15.0]] * 2 + [True]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@each_rank_of(2)
def test_after_a_failure_of_the_engine_a_group_is_refused_with_its_error(when):
    lost = rr.PeerLostError("rank 1 has left the job", [1])
    lost.__cause__ = OSError("its socket is closed")
    engine = runtime.current("a test").engine

    def opened():
        with engine._polling.lock:
            if when == "before":
                engine.ending.stop(lost, engine.process_sets.all())
                return engine.channels.open([0, 1], "late", IN_ORDER)
            _, handle = engine.channels.open([0, 1], "late", IN_ORDER)
            engine.ending.stop(lost, engine.process_sets.all())
        return handle.wait(10)

    with pytest.raises(rr.PeerLostError, match="open 'late': rank 1 has left the job") as at:
        opened()
    assert (at.value.lost_ranks, at.value.__cause__) == ((1,), lost.__cause__)


def test_a_late_rank_does_not_write_to_an_array_whose_channel_was_closed():
    given_up, sent = threading.Event(), threading.Event()

    def program():
        number, engine = open_channel([0, 1]), runtime.current("a test").engine
        array = as_buffer(np.full(50, float(rr.rank())), writable=True)
        if rr.rank() == 1:
            send = engine.transport.send

            def late(*args):
                given_up.wait(10)
                return send(*args), sent.set()

            # what comes before is the exchange of hashes
            engine.transport.send = lambda *args: late(*args)[0] if args[0].nbytes == 400 else send(*args)
        root, timeout_s = (("root_rank", 1),), math.inf if rr.rank() else 0.3
        handle = engine.submit(
            "broadcast", None, number, details=root, inputs=[array], outputs=[array], timeout_s=timeout_s
        )
        if rr.rank() == 0:
            with pytest.raises(rr.CollectiveError, match=r"Timed out after 0.\d s, waiting for rank 1"):
                handle.wait()
            given_up.set()
            assert sent.wait(10)
            assert (array.flat == 0).all(), "this is what a checkpoint has now"

    run_ranks(2, program, hosts=[0, 1], buffered=True)


def test_a_wait_with_a_timeout_ends_and_who_waits_is_told_of_the_end():
    told = []

    def program():
        number = open_channel([0, 1])
        values = np.full(3, 1.0 + rr.rank())
        if rr.rank() == 0:
            handle = begin_sum(number, values, lambda error: told.append((error, values.tolist())))
            with pytest.raises(
                rr.StalledError, match=r"rank 0 of 2, allreduce 'group' \(test_opening.py:\d+\): Timed out after 0.01 s"
            ):
                handle.wait(0.01)
            assert not told
            rr.barrier()
        else:
            rr.barrier()
            handle = begin_sum(number, values)
        handle.wait()

    run_ranks(2, program)
    assert told == [(None, [3.0] * 3)]
