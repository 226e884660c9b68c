"""Memory that MPI may still read or write, played by requests that end when the test says so."""

import pytest

from ringreduce.transport.in_flight import InFlight
from ringreduce.transport.message import MessageWork

SEND, ARRIVING, COMING = range(3)


class Request:
    """As mpi4py's. A send or what has begun to arrive cannot be cancelled, and ends when the other rank goes on."""

    def __init__(self, state):
        self.state, self.is_done, self.is_dead = state, False, False

    def Test(self):
        if self.is_dead:
            raise OSError("the other rank is dead")
        return self.is_done

    def Cancel(self):
        assert self.state != SEND, "MPI has no such thing"
        self.is_done = self.state == COMING


@pytest.fixture
def kept():
    return set()


def post(world, state, tag=3, peer=1):
    request = Request(state)
    return request, MessageWork(request, peer, "memory", world, tag, state != SEND)


def memories(kept):
    return sum(message._memory is not None for world in kept for message in world._left)


def test_what_is_done_is_kept_no_longer(kept):
    world = InFlight(kept)
    request, work = post(world, SEND)
    assert not work.done()
    request.is_done = True
    assert work.done()
    world.abandon()
    assert not kept
    assert not world._messages


def test_a_receive_is_cancelled_and_the_rest_is_left_behind_until_it_is_done(kept):
    world, next_world = InFlight(kept), InFlight(kept)
    found = [post(world, state) for state in (SEND, ARRIVING, COMING)]
    world.abandon()
    assert memories(kept) == 2
    del world
    found[0][0].is_done = True
    next_world.sweep()
    assert memories(kept) == 1
    found[1][0].is_dead = True
    next_world.sweep()
    assert not kept


@pytest.mark.parametrize(("tag", "peer"), [(8, 1), (7, 2)], ids=["tags", "peers"])
def test_other_tags_and_peers_go_on(kept, tag, peer):
    world = InFlight(kept)
    (one, _), (other, work) = post(world, COMING, tag=7), post(world, COMING, tag, peer)
    world.abandon(range(8), [1])
    assert one.is_done
    assert not other.is_done
    other.is_done = True
    assert work.done()


def test_what_still_arrives_is_told_by_its_rank(kept):
    world = InFlight(kept)
    request, _ = post(world, ARRIVING, peer=2)
    post(world, SEND, peer=4)
    world.abandon()
    assert world.receives_from([2, 3])
    assert not world.receives_from([3, 4])
    request.is_done = True
    assert not world.receives_from([2])
