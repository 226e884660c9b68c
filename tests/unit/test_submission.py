"""Handles: threads that wait, a result or an error, once."""

import threading
from types import SimpleNamespace

import pytest

from ringreduce.errors import CollectiveError, StalledError
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission


def submission(then=None):
    def block(handle, timeout_s):
        handle.block(timeout_s)

    return Submission(
        Signature("allreduce", "w"), 0, (), (), lambda each: each.payload, 7, "t.py:1", False, "", block, then=then
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
    with pytest.raises(StalledError, match=r"allreduce 'w': Timed out after 0.01 s; other ranks may not have called"):
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
