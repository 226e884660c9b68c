"""Handles: threads that wait, a result or an error, once."""

import threading
from types import SimpleNamespace

import pytest

from ringreduce.errors import CollectiveError, StalledError
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Ended, Submission


def submission(then=None):
    def block(handle, timeout_s):
        handle.block(timeout_s)

    return Submission(
        Signature("allreduce", "w"), 0, (), (), lambda each: each.payload, 7, "t.py:1", False, None, block, then=then
    )


def test_all_threads_that_wait_get_the_result():
    handle, results = submission(), []
    threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    handle.complete()
    for thread in threads:
        thread.join(10)
    assert results == [7, 7, 7]
    assert handle.wait() == 7


def test_a_mapped_handle_is_the_same_one_with_another_result():
    handle = submission()
    assert handle.mapped(lambda found: found + 1).mapped(str) is handle
    handle.complete()
    assert (handle.wait(), handle()) == ("8", "8")
    assert Ended([7]).mapped(sum).wait() == 7


def test_what_ends_while_a_thread_is_about_to_wait_is_not_missed(monkeypatch):
    """Between a thread's look whether it has ended and its wait: the end sees no gate, so the thread looks again."""
    handle = submission()

    def lock():
        handle.complete()
        return threading.Lock()

    monkeypatch.setattr("ringreduce.execution.submission.threading", SimpleNamespace(Lock=lock))
    hung = []
    timer = threading.Timer(5, lambda: (hung.append("hung"), handle._gate.release()))
    timer.start()
    handle.wait()
    timer.cancel()
    assert not hung


def test_what_ends_while_a_thread_makes_its_gate_finds_none_or_a_closed_one(monkeypatch):
    handle = submission()

    class Gate:
        def __init__(self):
            self.lock = threading.Lock()

        def acquire(self, timeout=-1):
            handle.complete()  # just before the first
            return self.lock.acquire(timeout=timeout)

        def release(self):
            self.lock.release()

    monkeypatch.setattr("ringreduce.execution.submission.threading", SimpleNamespace(Lock=Gate))
    assert handle.wait() == 7


def test_a_wait_with_a_timeout_names_the_operation():
    handle = submission()
    handle.rank = "rank 2 of 3"
    with pytest.raises(
        StalledError, match=r"rank 2 of 3, allreduce 'w' \(t.py:1\): Timed out after 0.01 s; other ranks"
    ):
        handle.wait(0.01)
    handle.complete()
    assert handle.wait(0.01) == 7


def test_what_has_failed_ends_once():
    ended = []
    handle, running = submission(ended.append), {}
    handle.begin(running)
    error = CollectiveError("no")
    handle.fail(error)
    running["allreduce.w"] = successor = submission()
    handle.complete()
    assert ended == [error]
    assert running == {"allreduce.w": successor}, "the name was submitted again"
    with pytest.raises(CollectiveError, match="no"):
        handle.wait()


@pytest.mark.parametrize("its_own", [None, CollectiveError("lost")])
def test_a_callback_that_raises_fails_its_handle_and_the_others_still_run(its_own):
    told_first, told = [], []
    handle = submission(told_first.append)

    def raises(_):
        raise LookupError("cannot be written")

    handle.add_then(raises)
    handle.add_then(told.append)
    handle.begin({})
    waits = threading.Thread(target=handle.block)
    waits.start()
    handle.complete() if its_own is None else handle.fail(its_own)  # neither raises: this is the engine's thread
    waits.join(10)
    assert not waits.is_alive()
    assert told_first == [its_own]
    assert [type(each) for each in told] == [LookupError if its_own is None else CollectiveError]
    with pytest.raises((LookupError, CollectiveError), match=r"cannot be written|lost") as caught:
        handle.wait()
    assert type(caught.value) is type(told[0])


def test_a_recorder_of_steps_that_fails_is_one_of_them():
    handle = submission()

    def ended(_):
        raise MemoryError("of steps")

    handle.recorder = SimpleNamespace(ended=ended, waited=lambda *_: None)
    handle.complete()
    with pytest.raises(MemoryError, match="of steps"):
        handle.wait()


def test_what_must_end_the_engine_ends_the_handle_first():
    handle, told = submission(), []

    def interrupted(_):
        raise KeyboardInterrupt

    handle.add_then(interrupted)
    handle.add_then(told.append)
    with pytest.raises(KeyboardInterrupt):
        handle.complete()
    assert handle.ended
    assert [type(each) for each in told] == [KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        handle.wait()


class Odd(Exception):
    """Which cannot be copied: it is not made of its args."""

    def __init__(self, number, where):
        super().__init__(f"{number} in {where}")


def test_an_error_that_cannot_be_copied_is_raised_itself():
    handle = submission()

    def raises(_):
        raise Odd(3, "w")

    handle.add_then(raises)
    handle.complete()
    for _ in range(2):
        with pytest.raises(Odd, match="3 in w"):
            handle.wait()
