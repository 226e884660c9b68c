"""The frames of all threads. The deadlock itself, found once in a job of 12 ranks, needs luck to be seen again."""

import gc
import sys
import threading

from ringreduce.execution import frames
from ringreduce.execution.frames import current_frames


def test_garbage_is_not_collected_and_only_one_thread_looks(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append((gc.isenabled(), frames._lock.locked())) or {})
    assert current_frames() == {}
    assert seen == [(False, True)]
    assert gc.isenabled()
    gc.disable()
    current_frames()
    assert not gc.isenabled(), "as the program has it"
    gc.enable()


def test_each_thread_has_its_frame():
    assert current_frames()[threading.get_ident()].f_code is current_frames.__code__
