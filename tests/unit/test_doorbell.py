import os
import threading
import time

import pytest

from ringreduce.transport.doorbell import CARD, Doorbell, interface_addresses, unpack_addresses


@pytest.fixture(params=["few files", "many files"])
def bell(request):
    """A doorbell, and one in a process that has more files open than select(2) can take."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100 if request.param == "many files" else 0)]
    bell = Doorbell(one_host=True)
    yield bell
    bell.close()
    for descriptor in held:
        os.close(descriptor)


def test_a_rest_ends_when_its_time_is_over(bell):
    start = time.monotonic()
    bell.rest(0.02)
    assert time.monotonic() - start >= 0.02


def test_a_rest_without_end_is_ended_by_wake(bell):
    threading.Timer(0.05, bell.wake).start()
    bell.rest(None)
    bell.wake()
    bell.wake()
    bell.rest(None)  # woken before it began
    start = time.monotonic()
    bell.rest(0.02)
    assert time.monotonic() - start >= 0.02, "two wakes end one rest"


def test_another_rank_rings(bell):
    other = Doorbell(one_host=True)
    threading.Timer(0.05, other.ring, (bell.card(), True)).start()
    bell.rest(None)
    other.ring(bell.card(), same_host=False)
    bell.rest(None)
    other.close()
    other_than_this = CARD.pack(9, bytes(24))
    bell.ring(other_than_this, same_host=False)  # nobody there: no error


def test_the_card_of_several_hosts_tells_the_interfaces():
    bell = Doorbell(one_host=False)
    port, packed = CARD.unpack(bell.card())
    assert port > 0
    assert unpack_addresses(packed) == interface_addresses()[:6]
    bell.close()
