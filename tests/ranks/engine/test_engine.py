"""Engines in an order of events that is rare on real ranks: played by hand, or by ranks as threads."""

import contextlib
import logging
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.engine import engine as engine_module
from ringreduce.engine.engine import Engine
from ringreduce.execution.host import HostResources
from ringreduce.execution.signature import Signature
from ringreduce.negotiation.protocol import Announcement, Response, Scheduled, ShutdownAck, decode, encode
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.base import Work
from ringreduce.transport.subset import CHANNELS, TAGS
from ringreduce.transport.threads import ThreadNetwork
from ringreduce.transport.world import World
from tests.support.patience import wait_until

DYNAMIC = Settings(dynamic_process_sets=True, stall_check_s=0)  # engines that wait for ever tell no later test of it


def current():
    return runtime.current("a test").engine


def engine_of(rank, network, hosts, settings=DYNAMIC):
    """The engine of a rank, without the rank, and its transport."""
    world, transport = World(rank, len(hosts), hosts), network.transport(rank)
    return Engine(world, transport, settings, HostResources(world, transport, settings)), transport


def respond(coordinator, response, rank):
    """Send a response, and its place in the schedule."""
    coordinator.send_control(encode(response), rank)
    coordinator.send_control(encode(Scheduled(response.process_set, [[]])), rank)


@pytest.mark.timeout(30)
def test_a_set_that_is_closed_before_this_rank_hears_of_it_hangs_no_exit():
    """Ranks 0 to 2, of which 1 and 2 get a set. Rank 2 hears of its end, from rank 1, before it hears of it, from 0."""
    network = ThreadNetwork(3)
    engine, _ = engine_of(2, network, (0, 0, 0))
    others = [network.transport(0), network.transport(1)]
    add = Signature("add_process_set", "unnamed.1", details=(("ranks", (1, 2)),), numbered=True)
    handle = engine.submit("add_process_set", None, details=add.details, waits=True)
    told = []
    wait_until(lambda: told.extend(others[0].recv_control()) or told)
    gone = "rank 1 has left the job: its script ended"
    respond(others[1], Response(1, 1, closed=gone, leaver=1), 2)
    time.sleep(0.1)
    respond(others[0], Response(0, 1, new=(add,)), 2)
    handle.wait()
    respond(others[0], Response(0, 2, closed=gone, leaver=1), 2)
    threading.Timer(0.1, lambda: others[0].send_control(encode(ShutdownAck()), 2)).start()
    late = threading.Timer(10, lambda: engine._fail_all(rr.CollectiveError("it hangs")))
    late.start()
    assert engine.leave("the test ended") is True
    late.cancel()


@pytest.mark.timeout(30)
def test_a_rank_that_leaves_tells_the_sets_that_it_is_yet_to_hear_of():
    network = ThreadNetwork(2)
    engine, _ = engine_of(1, network, (0, 0))
    other = network.transport(0)
    add = Signature("add_process_set", "unnamed.1", details=(("ranks", (0, 1)),), numbered=True)
    engine.submit("add_process_set", None, details=add.details)
    threading.Thread(target=engine.leave, args=("its script ended",), daemon=True).start()
    told = []
    wait_until(
        lambda: (
            told.extend(decode(each.content) for each in other.recv_control())
            or any(getattr(each, "leave", "") for each in told)
        )
    )
    respond(other, Response(0, 1, new=(add,)), 1)
    told.clear()
    wait_until(lambda: told.extend(decode(each.content) for each in other.recv_control()) or told)
    assert told == [Announcement(1, 0, leave="its script ended")]


@pytest.mark.timeout(60)
def test_a_late_rank_does_not_write_to_a_tensor_that_was_given_up():
    settings = Settings(stall_check_s=0.2, stall_abort_s=0.5)
    given_up, sent = threading.Event(), threading.Event()

    def program():
        engine = current()
        if rr.rank() == 1:
            send = engine.transport.send

            def late(*args):
                given_up.wait(10)
                request = send(*args)
                sent.set()
                return request

            engine.transport.send = late
        array = np.full(5, float(rr.rank()))
        try:
            rr.broadcast_(array, root_rank=1, name="model")
        except rr.CollectiveError as exc:
            said = r"has not moved for .*; data that has begun to arrive may still change its array$"
            assert rr.rank() == 1 or re.search(said, str(exc)), exc  # noqa: PT017
            given_up.set()
        if rr.rank() == 0:
            assert sent.wait(10)
            time.sleep(0.1)
            assert (array == 0).all(), "this is what a checkpoint has now"

    run_ranks(2, program, settings=settings, hosts=[0, 1], buffered=True)


@pytest.mark.parametrize("hosts", [None, [0, 0, 1], [0, 1, 2]], ids=["one host", "two hosts", "three hosts"])
def test_memory_and_tags_of_removed_sets_and_their_channels_are_used_again(hosts):
    messages = []

    def program():
        found = []
        for number in range(16):
            members = ([0, 1], [1, 2])[number % 2]
            given = rr.add_process_set(members)
            channel = rr.ordered(given)
            if rr.rank() in members:
                sums = [sum(members) + 2.0 + 2 * number] * 4
                mine = np.full(4, 1.0 + rr.rank() + number)
                for _ in range(3):
                    assert rr.allreduce(mine, op=rr.Sum, name="a", process_set=given).tolist() == sums
                    assert channel.allreduce(mine, op=rr.Sum).tolist() == sums
                own = current()
                on = own.states[given.process_set_id], own.channels.by_number[channel.process_set_id]
                found += [each.executor.context.algorithms.region is not None for each in on]
            rr.remove_process_set(given)
            assert not current().channels.by_number
        return found

    sizes = {"fusion_buffer_bytes": 2 << 20, "fusion_slot_bytes": 256 << 10, "shared_slot_bytes": 64 << 10}
    settings = Settings(dynamic_process_sets=True, **sizes)
    assert settings.shared_regions == 4
    results = run_ranks(3, program, settings=settings, hosts=hosts, messages=messages)
    assert hosts == [0, 1, 2] or all(all(each) for each in results)
    assert max((each.tag for each in messages), default=0) < 4 * TAGS * CHANNELS


def test_more_sets_than_mpi_has_tags_for():
    world = World(0, 4, (0, 1, 2, 3))
    transport = ThreadNetwork(4).transport(0)
    transport.most_tags = 6 * TAGS * CHANNELS + 5  # half of them are for channels that their members open alone
    host = HostResources(world, transport, Settings())
    reserved = [host.reserve(members) for members in ([0, 1, 2, 3], [0, 1], [2, 3], [1, 2])]
    assert [each.tags for each in reserved] == [0, 1, 1, 2]
    with pytest.raises(
        rr.InputError, match=r"\[0, 2\]: MPI has tags for 3 process sets that share a rank, .* remove_proc"
    ):
        host.reserve([0, 2])
    host.release(reserved[-1], [1, 2])
    assert host.reserve([0, 2]).tags == 2


@pytest.mark.timeout(60)
def test_a_set_that_is_removed_while_it_is_busy_goes_when_it_has_ended():
    go_on = threading.Event()

    def program():
        given = rr.add_process_set([0, 1])
        engine = current()
        number = given.process_set_id
        if rr.rank() == 0:
            send = engine.transport.send
            engine.transport.send = lambda *args: send(*args) if go_on.is_set() else Late(lambda: send(*args))
        if rr.rank() < 2:
            handle = rr.broadcast_async(np.full(3, rr.rank() + 5.0), root_rank=0, name="b", process_set=given)
            wait_until(lambda: engine.states[number].running)
        rr.barrier()
        threading.Timer(0.3, go_on.set).start()
        assert rr.remove_process_set(given)
        if rr.rank() < 2:
            assert rr.synchronize(handle)[0] == 5
        rr.barrier()
        assert list(engine.states) == [0]

    class Late(Work):
        """A send that begins when it may."""

        peer = 1

        def __init__(self, begin):
            self.begin, self.request = begin, None

        def done(self):
            if self.request is None and go_on.is_set():
                self.request = self.begin()
            return self.request is not None and self.request.done()

        def wait(self):
            wait_until(self.done)

    run_ranks(3, program, settings=DYNAMIC, hosts=[0, 1, 2])


@pytest.mark.timeout(60)
def test_what_is_not_scheduled_when_its_set_is_removed_ends_alike_on_all_ranks():
    """Rank 1 leads the set, and is stopped while rank 2 submits to it, and hears of the removal."""
    stopped, heard = threading.Event(), threading.Event()

    def stop(engine):
        wait_until(lambda: engine.states[0].pending and not engine._inbox.holds_any())
        with engine._polling.lock:
            stopped.set()
            heard.wait(10)

    def program():
        given = rr.add_process_set([1, 2])
        engine = current()
        if rr.rank() == 1:
            threading.Thread(target=stop, args=(engine,)).start()
        if rr.rank() == 2:
            stopped.wait(10)
            remove = engine.process_sets._remove_all

            def removed(*arguments):
                threading.Timer(0.1, heard.set).start()
                yield from remove(*arguments)

            engine.states[0].executor.context.operations["remove_process_set"] = removed
        if rr.rank():
            handle = rr.allreduce_async(np.ones(3), op=rr.Sum, name="t", process_set=given)
        assert rr.remove_process_set(given)
        with contextlib.suppress(rr.CollectiveError):
            return rr.synchronize(handle).tolist() if rr.rank() else None
        return "failed"

    _, one, other = run_ranks(3, program, settings=DYNAMIC)
    assert one == other


def test_an_engine_that_ends_abandons_its_messages_while_nobody_polls(monkeypatch):
    (engine, transport), held = engine_of(0, ThreadNetwork(1), (0,)), []
    monkeypatch.setattr(transport.in_flight, "abandon", lambda: held.append(engine._polling.lock.locked()))
    engine.give_up(rr.CollectiveError("the test has ended"))
    engine.join()
    assert held == [True]


@pytest.mark.parametrize("waits", [False, True])
def test_an_engine_that_fails_is_logged_with_a_traceback_unless_somebody_gets_its_error(waits, monkeypatch):
    logged, fails = [], threading.Event()
    log = lambda level, text, exc_info: logged.append((level, text, exc_info is not None))  # noqa: E731
    monkeypatch.setattr(engine_module, "LOGGER", SimpleNamespace(log=log))
    engine = engine_of(0, ThreadNetwork(2), (0, 1), Settings())[0]
    poll = engine.negotiation.poll
    monkeypatch.setattr(engine.negotiation, "poll", lambda: 1 / 0 if fails.is_set() else poll())
    handle = engine.submit("barrier", "b")
    with ThreadPoolExecutor() as pool:
        if waits:
            waiting = pool.submit(handle.wait)
            wait_until(engine._inbox.waited_for)
        fails.set()
        engine.join()
    why = "rank 0 of 2 failed inside an operation: ZeroDivisionError: division by zero"
    assert logged == [(logging.DEBUG if waits else logging.ERROR, why, not waits)]
    with pytest.raises(rr.CollectiveError, match=f"{why}$"):
        waiting.result() if waits else handle.wait()


class WorkerDiedError(Exception):
    """Of a script's own handler."""


@pytest.mark.timeout(30)
def test_what_a_signal_handler_raises_in_a_wait_reaches_the_script_and_no_engine(monkeypatch):
    """As torch's for SIGCHLD, when a data loader's worker dies."""

    def die(*_):
        raise WorkerDiedError

    before = signal.signal(signal.SIGCHLD, die)
    network = ThreadNetwork(2)
    engines = [engine_of(rank, network, (0, 1), Settings())[0] for rank in range(2)]
    poll = engines[0].negotiation.poll

    def polled():
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGCHLD)
        return poll()

    monkeypatch.setattr(engines[0].negotiation, "poll", polled)
    try:
        handle = engines[0].submit("barrier", "b", waits=True)
        late = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGCHLD))
        late.start()
        with pytest.raises(WorkerDiedError):
            handle.wait()
        late.join()
        engines[1].submit("barrier", "b").wait()
        handle.wait()
    finally:
        signal.signal(signal.SIGCHLD, before)
        for each in engines:
            each.give_up(rr.CollectiveError("the test has ended"))
            each.join()
