"""Operations in program order: all of them, differences between ranks, other operations beside them, lost ranks."""

import dataclasses
import re
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of
from tests.support.patience import wait_until
from tests.support.world import on_every_world

HOSTS = pytest.mark.parametrize("hosts", [None, [0, 1, 2], [0, 0, 1]], ids=["one host", "three hosts", "two hosts"])


def rows(rank, count=3):
    return np.arange(count * 2.0).reshape(count, 2) + 100 * rank


def all_operations():
    channel, rank, size = rr.ordered(), rr.rank(), rr.size()
    sent = channel.send_async(rows(rank), (rank + 1) % size, tag=7)
    wide = np.full(300_000, rank + 1, np.float32)
    channel.allreduce_(wide, op=rr.Sum)
    gathered, reduced = channel.gather(rows(rank, rank + 1), 1), channel.reduce(rows(rank), 0, op=rr.Max)
    asynchronous = [channel.allreduce_async(rows(rank) * k, op=rr.Sum) for k in range(5)]
    asynchronous += [
        channel.allgather_async(rows(rank)),
        channel.barrier_async(),
        channel.scatter_async(rows(rank, size), 1),
    ]
    found = {
        "allreduce": channel.allreduce(rows(rank), op=rr.Sum),
        "allreduce_": wide[[0, -1]],
        "broadcast": channel.broadcast(rows(rank), 1),
        "reducescatter": channel.reducescatter(rows(rank, size), op=rr.Sum),
        "alltoall": channel.alltoall(rows(rank, size)),
        "gather": gathered,
        "reduce": reduced,
        "recv": channel.recv(np.zeros((3, 2)), (rank - 1) % size, tag=7),
        "asynchronous": [rr.synchronize(each) for each in asynchronous],
        "object": channel.allgather_object({"rank": rank}),
        "grouped": rr.grouped_allreduce([rows(rank), np.float32(rank)], op=rr.Sum, process_set=channel),
    }
    rr.synchronize(sent)
    channel.barrier()
    return found


def check_all(results):
    size = len(results)
    ranks = range(size)
    total = sum(rows(rank) for rank in ranks)
    for rank, found in enumerate(results):
        before = (rank - 1) % size
        expected = {
            "allreduce": total,
            "allreduce_": [size * (size + 1) / 2] * 2,
            "broadcast": rows(1),
            "reducescatter": sum(rows(each, size) for each in ranks)[rank : rank + 1],
            "alltoall": np.stack([rows(each, size)[rank] for each in ranks]),
            "recv": rows(before),
        }
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=f"{name} on rank {rank}")
        np.testing.assert_array_equal(found["grouped"][0], total)
        assert found["grouped"][1] == sum(ranks)
        assert found["object"] == [{"rank": each} for each in ranks]
        *sums, gathered, barrier, _ = found["asynchronous"]
        for k, each in enumerate(sums):
            np.testing.assert_array_equal(each, total * k)
        np.testing.assert_array_equal(gathered, np.concatenate([rows(each) for each in ranks]))
        assert barrier is None
        assert (found["gather"] is None) == (rank != 1)
        assert (found["reduce"] is None) == (rank != 0)
    scattered = [found["asynchronous"][-1] for found in results]
    np.testing.assert_array_equal(np.concatenate(scattered), rows(1, size))
    np.testing.assert_array_equal(results[1]["gather"], np.concatenate([rows(each, each + 1) for each in ranks]))
    np.testing.assert_array_equal(results[0]["reduce"], rows(size - 1))


@HOSTS
def test_all_operations(hosts):
    check_all(run_ranks(3, all_operations, hosts=hosts))


def gives_up(call):
    with pytest.raises(rr.MismatchError) as raised:
        call()
    return str(raised.value)


def operations_that_differ():
    channel, rank = rr.ordered(), rr.rank()
    messages = [
        gives_up(lambda: channel.allreduce(np.zeros(3 + (rank == rr.size() - 1)))),
        gives_up(lambda: channel.allreduce(np.zeros(3, np.float32 if rank else np.float64))),
        gives_up(lambda: channel.allreduce(np.zeros(100_000 if rank else 3))),
        gives_up(lambda: channel.allreduce(np.zeros(3), op=rr.Sum if rank else rr.Max)),
        gives_up(lambda: channel.broadcast(np.zeros(3), min(rank, 1))),
        gives_up(lambda: channel.barrier() if rank else channel.allreduce(np.zeros(3))),
    ]
    return messages, channel.allreduce(np.full(2, rank + 1.0), op=rr.Sum).tolist()


def check_differences(results):
    size = len(results)
    assert [after for _, after in results] == [[size * (size + 1) / 2] * 2] * size
    at = rf"of {size}, {{}} 'ordered' \(test_ordered.py:\d+\): "
    expected = [
        rf"rank {size - 1} {at.format('allreduce')}float64\[4\], but rank 0 has float64\[3\] .*equal shapes",
        rf"rank 1 {at.format('allreduce')}float32\[3\], but rank 0 has float64\[3\] .*equal dtypes",
        rf"rank 1 {at.format('allreduce')}float64\[100000\], but rank 0 has float64\[3\]",
        rf"rank 1 {at.format('allreduce')}op=Sum, but rank 0 has op=Max",
        rf"rank 1 {at.format('broadcast')}root_rank=1, but rank 0 has root_rank=0",
        rf"rank 1 {at.format('barrier')}barrier 'ordered', but rank 0 has allreduce 'ordered'.*call the same operation",
    ]
    for messages, _ in results:
        for message, pattern in zip(messages, expected, strict=True):
            assert re.match(pattern, message), message


@HOSTS
def test_a_difference_is_an_error_on_all_ranks_and_the_channel_goes_on(hosts):
    check_differences(run_ranks(3, operations_that_differ, hosts=hosts))


@each_rank_of(2)
def test_opposite_orders_of_a_named_operation_and_an_ordered_one():
    """The ordered one is under way on a rank that waits for the named one, and the other way round."""
    channel, rank = rr.ordered(), rr.rank()
    named, ordered = np.ones(3) * (rank + 1), np.ones(3) * (rank + 3)
    if rank:
        handle = channel.allreduce_async_(ordered, op=rr.Sum)
        rr.allreduce_(named, name="w", op=rr.Sum)
    else:
        handle = rr.allreduce_async_(named, name="w", op=rr.Sum)
        channel.allreduce_(ordered, op=rr.Sum)
    rr.synchronize(handle)
    assert (named[0], ordered[0]) == (3.0, 7.0)


@HOSTS
def test_messages_of_many_tags_arrive_by_tag_and_in_order(hosts):
    def program():
        channel, rank = rr.ordered(), rr.rank()
        right, left = (rank + 1) % 3, (rank - 1) % 3
        sends = [channel.send_async(np.full(40_000, 10.0 * rank + k), right, tag) for k, tag in enumerate([1, 2, 1, 5])]
        channel.barrier()  # waits for no message
        tags = [5, 1, 2, 1]
        receives = [channel.recv_async(np.empty(40_000), left, tag) for tag in tags]
        received = [rr.synchronize(each)[-1] - 10 * left for each in receives]
        for each in sends:
            each.wait()
        return received

    assert run_ranks(3, program, hosts=hosts) == [[3.0, 0.0, 1.0, 2.0]] * 3


@HOSTS
def test_a_message_that_came_before_its_receive_does_not_wait_for_an_earlier_receive(hosts):
    """Rank 0 waits for tag 5, which rank 1 sends only once both messages with tag 7 have been received."""

    def program():
        channel, rank, received = rr.ordered(), rr.rank(), []
        if rank == 0:
            first = channel.recv_async(np.empty(40_000), 1, tag=5)
        if rank == 1:
            sends = [channel.send_async(np.full(40_000, value), 0, tag=7) for value in (70.0, 71.0)]
        channel.barrier()
        if rank == 0:
            time.sleep(0.05)  # what rank 1 has sent is here, and kept
            received = [channel.recv(np.empty(40_000), 1, tag=7)[0] for _ in range(2)]
            channel.send(np.ones(2), 1, tag=1)
            received.append(rr.synchronize(first)[0])
        if rank == 1:
            channel.recv(np.zeros(2), 0, tag=1)
            channel.send(np.full(40_000, 5.0), 0, tag=5)
            for each in sends:
                each.wait()
        channel.barrier()
        return received

    assert run_ranks(3, program, hosts=hosts) == [[70.0, 71.0, 5.0], [], []]


@each_rank_of(2)
def test_a_thread_that_waits_long_holds_up_no_other():
    """Rank 0's thread waits for what rank 1 sends only after it has heard from rank 0's main thread."""
    channel = rr.ordered()
    if rr.rank() == 1:
        channel.barrier()
        channel.send(channel.recv(np.zeros(2), 0, tag=9), 0, tag=1)
        return
    handle = channel.recv_async(np.zeros(2), 1, tag=1)
    waiting = threading.Thread(target=handle.wait, daemon=True)
    waiting.start()
    time.sleep(0.1)
    channel.barrier()
    channel.send(np.ones(2), 1, tag=9)
    waiting.join(20)
    assert handle.done()


@each_rank_of(2)
def test_a_message_of_another_shape_is_an_error_and_the_next_one_arrives():
    channel = rr.ordered()
    if rr.rank() == 0:
        channel.send(np.ones(3), 1)
        channel.send(np.full(4, 2.0), 1)
        return
    message = r"rank 1, recv with tag 0 .*: float64\[4\], but rank 0 sent float64\[3\] \(test_ordered.py:\d+\)"
    with pytest.raises(rr.MismatchError, match=message):
        channel.recv(np.zeros(4), 0)
    assert channel.recv(np.zeros(4), 0).tolist() == [2.0] * 4


@each_rank_of(2)
def test_the_average_of_python_ints_is_a_float_in_a_reduce_too():
    channel, rank = rr.ordered(), rr.rank()
    found = [channel.allreduce(rank + 1), channel.reduce(rank + 1, 0), channel.reduce(rank + 1, 0, op=rr.Sum)]
    assert found == ([1.5, 1.5, 3] if rank == 0 else [1.5, None, None])


@pytest.mark.parametrize("tag", ["a", None, 1.5, [1], 2**63, -(2**63) - 1], ids=repr)
@each_rank_of(2)
def test_a_tag_is_a_whole_number_of_64_bits_and_the_channel_goes_on(tag):
    channel, other = rr.ordered(), 1 - rr.rank()
    for kind in ("send", "recv"):
        message = rf"^{kind}: tag={re.escape(repr(tag))}; expected a whole number of 64 bits$"
        with pytest.raises(rr.InputError, match=message):
            getattr(channel, kind)(np.ones(2), other, tag=tag)
    for fits in (2**63 - 1, -(2**63), np.int8(3)):
        handle = channel.send_async(np.full(2, float(other)), other, tag=fits)
        assert channel.recv(np.zeros(2), other, tag=fits).tolist() == [rr.rank()] * 2
        handle.wait()


@each_rank_of(2)
def test_what_one_rank_refuses_keeps_its_place_whether_it_has_a_name_or_not():
    channel, rank = rr.ordered(), rr.rank()
    for name in ("x", None):
        error, what = ((rr.MismatchError, "rank 1 of 2, .* was refused: "), (rr.InputError, "^allreduce"))[rank]
        with pytest.raises(error, match=f"{what}.*a str is not an array"):
            rr.allreduce(np.ones(2) if rank == 0 else "no array", name=name, process_set=channel)
    assert channel.allreduce(np.ones(2) + rank, op=rr.Sum).tolist() == [3.0] * 2


@each_rank_of(2)
def test_a_channel_of_a_world_that_has_ended_says_so():
    channel = rr.ordered()
    channel.world = dataclasses.replace(channel.world, number=channel.world.number + 1)
    why = r"ordered\(ranks=\[0, 1\]\) ended with the world of 2 ranks .* Call ordered\(\) again in the function"
    with pytest.raises(rr.InputError, match=rf"^allreduce: {why}"):
        rr.allreduce(np.ones(2), process_set=channel)


@each_rank_of(2)
def test_rows_that_a_root_cannot_scatter_equally_are_refused_on_all_ranks():
    channel, why = rr.ordered(), "scatter: 5 rows cannot be split equally among 2 ranks"
    error, what = ((rr.InputError, "^"), (rr.MismatchError, "rank 0 of 2, .* was refused: "))[rr.rank()]
    with pytest.raises(error, match=what + why):
        channel.scatter(rows(rr.rank(), 5), 0)
    assert channel.scatter(rows(rr.rank(), 4), 0).tolist() == rows(0, 4)[2 * rr.rank() :][:2].tolist()


@each_rank_of(2)
def test_a_message_to_this_rank_itself_is_refused_and_the_channel_goes_on():
    channel, rank = rr.ordered(), rr.rank()
    for kind in ("send", "recv"):
        with pytest.raises(rr.InputError, match=rf"^{kind}: rank {rank} is this rank; copy the array instead$"):
            getattr(channel, f"{kind}_async")(np.ones(2), rank)
    with pytest.raises(rr.InputError, match=rf"^send: rank {rank} is this rank"):
        channel.send_object("mine", rank)
    assert channel.allreduce(np.ones(2), op=rr.Sum).tolist() == [2.0] * 2


@each_rank_of(2)
def test_a_rank_that_has_left_is_named_and_closes_the_channel():
    channel = rr.ordered()
    if rr.rank() == 1:
        return
    for _ in range(2):
        with pytest.raises(rr.PeerLostError, match="rank 1 has left the job: its function returned"):
            channel.allreduce(np.ones(3))


def test_a_rank_that_does_not_come_is_reported_and_given_up(capsys):
    settings = Settings(stall_check_s=0.2, stall_abort_s=0.6)
    late = threading.Event()

    def program():
        channel = rr.ordered()
        if rr.rank() == 1:
            assert late.wait(20)
            return
        handle = channel.allreduce_async(np.ones(3))
        with pytest.raises(rr.StalledError, match=r"allreduce 'ordered' \(test_ordered.py:\d+\) .* for rank 1"):
            handle.wait()
        late.set()

    run_ranks(2, program, settings=settings)
    assert "stalled: allreduce 'ordered' (test_ordered.py:" in capsys.readouterr().err


@each_rank_of(2)
def test_what_nobody_waits_for_moves_too():
    handle = rr.ordered().allreduce_async_(np.ones(100_000), op=rr.Sum)
    wait_until(handle.done)
    assert handle.wait()[0] == 2.0


@each_rank_of(3)
def test_short_sums_between_long_ones_and_other_operations_on_ranks_that_are_late_in_turns():
    """A short sum is packed before the hashes are compared: memory that others still read must not change."""
    channel, rank, size = rr.ordered(), rr.rank(), rr.size()
    lengths = np.random.default_rng(0).choice([1, 3, 200, 5_000, 400_000], 120, p=[0.4, 0.2, 0.2, 0.15, 0.05])
    for number, length in enumerate(lengths.tolist()):
        if number % size == rank:
            time.sleep(2e-4)
        mine = np.arange(length) + 1000.0 * rank + number
        found = channel.allreduce_(mine.copy(), op=rr.Sum)
        np.testing.assert_array_equal(found, size * (np.arange(length) + number) + 500.0 * size * (size - 1))
        if number % 7 == 0:
            root = number % size
            assert (channel.broadcast(mine, root) == np.arange(length) + 1000.0 * root + number).all()
        if number % 11 == 0:
            with pytest.raises(rr.MismatchError):
                channel.allreduce_(mine if rank else np.arange(2.0))
        if number % 13 == 0:
            assert channel.allreduce(mine[:1]) == pytest.approx(number + 500.0 * (size - 1))


@each_rank_of(3, settings=Settings(dynamic_process_sets=True))
def test_a_channel_of_some_ranks():
    channel = rr.ordered(rr.add_process_set([0, 2]))
    if rr.rank() == 1:
        with pytest.raises(rr.InputError, match="allreduce: rank 1 is not in process set -1, which has ranks 0,2"):
            channel.allreduce(np.ones(3))
        return
    with pytest.raises(rr.InputError, match="reduce: op=Adasum; expected Average, Sum"):
        channel.reduce(np.ones(3), 0, op=rr.Adasum)
    with pytest.raises(rr.InputError, match=r"send: rank 1 is not in ordered\(ranks=\[0, 2\]\)"):
        channel.send(np.ones(3), 1)
    assert channel.allreduce(np.full(3, rr.rank() + 1.0), op=rr.Sum)[0] == 4.0
    assert channel.broadcast(rr.rank(), 2) == 2


@each_rank_of(2)
def test_nothing_is_negotiated():
    channel, mailbox = rr.ordered(), runtime.current("a test").engine.mailbox
    rr.barrier()
    before = mailbox.messages
    for _ in range(10):
        channel.allreduce_(np.ones(3))
        channel.allgather(np.ones((2, 2)))
    assert mailbox.messages - before == 0


@on_every_world
def test_on_every_world(world, size):
    check_all(world(size).run(all_operations))
    check_differences(world(size).run(operations_that_differ))
