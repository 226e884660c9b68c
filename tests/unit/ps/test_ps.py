"""The parameter server without ranks: which server holds what, and who waits for whom."""

import math
import random
import threading
import time

import numpy as np
import pytest

from ringreduce.errors import InputError, PeerLostError
from ringreduce.ps import messages
from ringreduce.ps.consistency import Consistency, Sync
from ringreduce.ps.layout import Key, joined, shards_of
from tests.support.loops import in_a_loop
from tests.support.patience import wait_until

F4 = np.dtype(np.float32)


def keys_of(arrays):
    return [Key(name, array.shape, array.dtype) for name, array in arrays.items()]


@in_a_loop("servers", [1, 2, 3, 5])
def test_servers_hold_about_equally_many_bytes(servers):
    draw = random.Random(servers)
    keys = [Key(f"k{at}", (draw.randint(1, 40), 64), F4) for at in range(40)] + [Key("large", (1000, 64), F4)]
    arrays = {key.name: np.zeros(key.shape, key.dtype) for key in keys}
    held = [sum(shard.of(arrays[shard.key]).nbytes for shard in shards) for shards in shards_of(keys, servers)]
    assert sum(held) == sum(key.nbytes for key in keys)
    assert max(held) - min(held) <= 40 * 64 * 4  # the largest that is not cut


@in_a_loop("servers", [1, 2, 3, 7])
def test_shards_make_the_arrays_again(servers):
    arrays = {"w": np.arange(50.0).reshape(10, 5), "scalar": np.float64(3.5), "b": np.arange(7), "none": np.empty(0)}
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    layout = shards_of(keys_of(arrays), servers)
    values = {shard.name: shard.of(arrays[shard.key]) for held in layout for shard in held}
    for name, array in joined(values, layout, keys_of(arrays)).items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype


def at_once(workers, function):
    """Run function(worker) in a thread for each; returns what these raised."""
    raised = []

    def run(worker):
        try:
            function(worker)
        except BaseException as exc:
            raised.append(exc)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
    return raised


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_worker_pulls_further_ahead_than_the_bound(staleness):
    consistency = Consistency([3, 5, 6, 8], staleness, lambda gradients: None)
    seen = []

    def work(worker):
        draw = random.Random(10 * staleness + worker)
        for _ in range(25):
            with consistency.changed:
                consistency.wait_to_pull(worker)
                seen.append(consistency.pushes[worker] - min(consistency.pushes.values()))
            time.sleep(draw.random() ** 8 / 10)  # mostly short, at times long
            consistency.push(worker, {})
        consistency.leave(worker)

    assert at_once([3, 5, 6, 8], work) == []
    assert max(seen) == consistency.most_stale <= staleness
    assert consistency.pushes == {}


def test_the_bound_is_used_and_a_worker_at_it_waits():
    consistency = Consistency([0, 1], 2, lambda gradients: None)
    for _ in range(2):
        consistency.push(0, {})
    with consistency.changed:
        consistency.wait_to_pull(0)
    consistency.push(0, {})
    with consistency.changed:
        consistency.fail(TimeoutError("nobody pushed"))
        with pytest.raises(TimeoutError):
            consistency.wait_to_pull(0)
    assert consistency.most_stale == 2


def test_in_step_all_gradients_are_averaged_once_and_a_worker_that_leaves_is_not_waited_for():
    applied = []
    consistency = Sync([2, 4, 7], lambda gradients: applied.append(gradients["w"]))

    def work(worker):
        for step in range(worker):  # worker 2 leaves first
            time.sleep(random.Random(100 * worker + step).random() / 50)
            consistency.push(worker, {"w": np.array(worker + 10.0 * step)})
        consistency.leave(worker)

    assert at_once([2, 4, 7], work) == []
    expected = [np.mean([worker for worker in (2, 4, 7) if step < worker]) + 10 * step for step in range(7)]
    np.testing.assert_allclose(applied, expected)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_after_a_loss_a_worker_that_has_left_comes_again_with_all_that_it_has_pushed(kind):
    applied = []
    workers, apply = [2, 4, 7], lambda gradients: applied.append(gradients["w"])
    consistency = Sync(workers, apply) if kind == "sync" else Consistency(workers, math.inf, apply)
    for step in range(2):
        assert (
            at_once(workers, lambda worker, step=step: consistency.push(worker, {"w": worker + np.array(step)})) == []
        )
    consistency.leave(2)
    assert consistency.applied() == {2: 2, 4: 2, 7: 2}
    consistency.fail(PeerLostError("rank 7 has left", [7]))
    consistency.resume([2, 4])
    assert consistency.applied() == consistency.pushes == {2: 2, 4: 2}
    consistency.leave(2)
    consistency.push(4, {"w": np.array(30)})
    assert consistency.applied() == {2: 2, 4: 3}
    assert applied[-1] == 30


def test_who_waits_for_a_worker_in_step_goes_on_when_that_leaves():
    applied = []
    sync = Sync([0, 1], applied.append)
    pushing = threading.Thread(target=sync.push, args=(0, {"w": np.ones(2)}), daemon=True)
    pushing.start()
    wait_until(lambda: sync._pushed)
    sync.leave(1)
    pushing.join(30)
    assert not pushing.is_alive()
    assert [each["w"].tolist() for each in applied] == [[1, 1]]


def test_an_error_in_one_thread_ends_the_waits_of_the_others():
    def rule(gradients):
        raise ZeroDivisionError("of the rule")

    consistency = Sync([0, 1], rule)

    def work(worker):
        try:
            consistency.push(worker, {"w": np.ones(1)})
        except BaseException as exc:
            consistency.fail(exc)
            raise

    assert [type(each) for each in at_once([0, 1], work)] == [ZeroDivisionError] * 2


def test_the_first_error_is_raised_and_not_what_followed_from_it():
    consistency = Consistency([0, 1], 0, lambda gradients: None)
    consistency.push(0, {})
    for error in (ZeroDivisionError("the cause"), TimeoutError("nobody came")):
        consistency.fail(error)
    with consistency.changed, pytest.raises(ZeroDivisionError, match="the cause"):
        consistency.wait_to_pull(0)


class Odd(Exception):
    """As an exception is whose class takes other arguments than its `args`."""

    def __init__(self, rank, index):
        super().__init__(f"{rank} {index}")


def test_a_compressors_context_that_cannot_be_unpickled_is_told_with_its_rank():
    class Compressor:
        def compress(self, array):
            return array, Odd(3, 7)

    class Channel:
        def __init__(self, packed):
            self.left = list(packed)

        def recv(self, array, rank, tag):
            array[...] = self.left.pop(0)
            return array

    channel = Channel(messages.pack(messages.PULL, {"w": np.arange(5.0)}, Compressor()))
    with pytest.raises(InputError, match=r"^ps: what rank 3 sent cannot be unpickled here: TypeError: .*'index'; the"):
        messages.receive(channel, 3, Compressor())
