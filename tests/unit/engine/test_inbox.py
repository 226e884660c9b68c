"""How long tensors are gathered before the ranks tell each other."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from ringreduce.engine import inbox
from ringreduce.engine.inbox import ONE_HOST_BATCH_SLOTS, OVERSUBSCRIBED_CYCLES, Inbox, WaitsFor
from ringreduce.errors import NotInitializedError
from ringreduce.settings import Settings
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.world import World

SETTINGS = Settings(cycle_time_ms=10.0)
BATCH_BYTES = ONE_HOST_BATCH_SLOTS * SETTINGS.fusion_slot_bytes


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(inbox.time, "monotonic", lambda: now.s)
    return now


def put(box, nbytes, now_s, device="cpu"):
    tensor = SimpleNamespace(nbytes=nbytes, device=device)
    box.put(SimpleNamespace(inputs=[tensor], waits=False, ended=False, submitted_s=now_s, signature="d", line="l"))


def test_a_full_batch_is_announced_at_once(clock):
    box = Inbox(None, SETTINGS, one_host=True)
    put(box, BATCH_BYTES - 1, clock.s)
    assert box.batches_more()
    put(box, 1, clock.s)
    assert not box.batches_more()


@pytest.mark.parametrize(("oversubscribed", "cycles"), [(False, 1), (True, OVERSUBSCRIBED_CYCLES)])
def test_tensors_are_batched_for_a_cycle_and_for_longer_where_ranks_take_all_cores(clock, oversubscribed, cycles):
    box = Inbox(None, SETTINGS, one_host=True, oversubscribed=oversubscribed)
    put(box, 1, clock.s)
    clock.s += 0.0099 * cycles
    put(box, 1, clock.s)  # the oldest one counts
    assert box.batches_more()
    clock.s += 0.0002 * cycles
    assert not box.batches_more()
    assert len(box.take()) == 2
    put(box, 1, clock.s)
    assert box.batches_more()


def test_where_ranks_take_all_cores_any_number_of_bytes_is_batched_until_somebody_waits(clock):
    box = Inbox(None, SETTINGS, one_host=True, oversubscribed=True)
    put(box, 10 * BATCH_BYTES, clock.s)
    assert box.batches_more()
    box._asleep = False
    box.on_poll()
    assert not box.batches_more()


@pytest.mark.parametrize(("one_host", "device"), [(False, "cpu"), (True, "cuda:0")])
def test_a_wire_and_a_gpu_work_beside_the_cores(clock, one_host, device):
    box = Inbox(None, SETTINGS, one_host, oversubscribed=True)
    put(box, BATCH_BYTES, clock.s, device)
    assert not box.batches_more()
    assert len(box.take()) == 1
    put(box, 1, clock.s, device)
    clock.s += 0.0101
    assert not box.batches_more()


def test_a_forked_child_waits_for_no_handle_of_its_parent_s_and_polls_nothing():
    box = Inbox(None, SETTINGS, one_host=True)
    box.drive = lambda handle: pytest.fail("this process is no rank: what it polls is the parent's")
    box.not_here = "this process was forked from rank 3"
    box.lock.acquire()  # by a thread of the parent's, which the child does not have
    for ask in box.wait, lambda _: box.on_poll():
        with pytest.raises(NotInitializedError, match=r"ends there only; this process was forked from rank 3"):
            ask(SimpleNamespace(ended=False))


def test_an_idle_engine_looks_for_control_messages_now_and_then(clock):
    rests = []
    box = Inbox(SimpleNamespace(sleep=rests.append), SETTINGS, one_host=True)
    for idle_s in (0.0, 3600.0):
        box.idle_wait(clock.s - idle_s, WaitsFor.NOTHING)
    assert rests == [0.04, 0.04]


def test_while_a_thread_of_the_rank_polls_the_engine_sleeps_whatever_waits(clock):
    rests = []
    box = Inbox(SimpleNamespace(sleep=rests.append), SETTINGS, one_host=True)
    with box.driving:
        box.call_soon(lambda: None)
        box.idle_wait(clock.s, WaitsFor.MESSAGES)
    assert rests == [0.04]
    box.idle_wait(clock.s, WaitsFor.MESSAGES)
    assert rests == [0.04], "the callback is not kept waiting"


def test_a_thread_that_waits_polls_also_while_the_engine_is_awake(monkeypatch):
    monkeypatch.setattr(inbox, "may_be_interrupted", lambda: False)
    box, driven = Inbox(None, SETTINGS, one_host=True), []
    box.drive = lambda handle: not driven.append(handle)
    handle = SimpleNamespace(block=lambda _: None, recorder=None, ended=False)
    assert not box._asleep
    box.wait(handle)
    assert driven == [handle]
    assert not box.holds_any(), "the engine has nothing to do"


def test_a_sleep_ends_in_time_or_when_a_thread_of_the_rank_wakes_it():
    transport = MessageTransport(World(0, 1, (0,)))
    start_s = time.monotonic()
    transport.sleep(0.02)
    assert time.monotonic() - start_s >= 0.02
    threading.Timer(0.05, transport.wake).start()
    transport.sleep(60)
    transport.wake()
    transport.wake()
    transport.sleep(60)  # woken before it began
    assert time.monotonic() - start_s < 60
    start_s = time.monotonic()
    transport.sleep(0.02)
    assert time.monotonic() - start_s >= 0.02, "two wakes end one rest"


def test_what_comes_while_the_engine_sleeps_wakes_it_and_else_it_looks_by_itself(clock):
    woken = []
    transport = SimpleNamespace(sleep=lambda _: box.call_soon(lambda: None), wake=lambda: woken.append("woken"))
    box = Inbox(transport, SETTINGS, one_host=True)
    box.idle_wait(clock.s - 10, WaitsFor.NOTHING)
    assert woken == ["woken"]
    box.call_soon(lambda: None)
    assert woken == ["woken"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGCHLD, signal.SIGWINCH])
def test_a_script_with_a_signal_handler_of_its_own_is_noticed_in_its_main_thread(monkeypatch, number):
    assert not inbox.has_signal_handlers()
    monkeypatch.setattr(inbox, "getsignal", {number: print}.get)
    assert inbox.has_signal_handlers()
    found = []
    thread = threading.Thread(target=lambda: found.append(inbox.has_signal_handlers()))
    thread.start()
    thread.join()
    assert found == [False]
