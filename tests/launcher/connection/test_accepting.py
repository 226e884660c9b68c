"""The listener takes the connections of other sockets, too, until it is closed, whatever fails meanwhile."""

import errno
import queue
import socket
import threading

import pytest

from ringrun.connection import listener as listener_module
from ringrun.connection.listener import Listener
from ringrun.job.control_socket import STACKS, ControlSocket, RunningJob, ask
from tests.support.patience import wait_until


class Failing(socket.socket):
    """Its accept() fails so often with these errors before it takes a connection."""

    errors: list[int]

    def accept(self):
        if self.errors:
            raise OSError(self.errors.pop(), "")
        return super().accept()


@pytest.fixture
def listener(tmp_path, monkeypatch):
    monkeypatch.setattr(listener_module, "_PAUSE_S", 0.001)
    before = {*threading.enumerate()}  # some may be of an earlier test, and end meanwhile
    made = Listener(str(tmp_path), [], 1)
    yield made
    made.close()
    wait_until(lambda: {*threading.enumerate()} <= before)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
def test_connections_are_taken_after_each_failure(number, listener, tmp_path):
    taken, path = queue.SimpleQueue(), str(tmp_path / "other")
    listening = Failing(socket.AF_UNIX)
    listening.errors = [number] * 3
    listening.bind(path)
    listener.listen(listening, taken.put)
    listener.start(lambda link: None)
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            taken.get(timeout=10).close()
            listening.errors = [number]


def test_a_question_for_which_no_thread_can_be_started_is_closed_and_the_next_one_is_answered(
    listener, tmp_path, monkeypatch
):
    events = queue.SimpleQueue()
    ControlSocket(str(tmp_path), 1, ["true"], events).start(listener)
    job = RunningJob(1, 0.0, 1, ("true",), str(tmp_path / "control"))
    listener.start(lambda link: None)
    start = threading.Thread.start

    def refuse(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        ask(job, STACKS)
    threading.Thread(target=lambda: events.get(timeout=10).deliver(["hello"])).start()
    assert ask(job, STACKS) == "hello\n"


def test_a_job_without_a_listener_answers_by_one_of_its_own(tmp_path):
    events = queue.SimpleQueue()
    ControlSocket(str(tmp_path), 1, ["true"], events).start()
    threading.Thread(target=lambda: events.get(timeout=10).deliver(["hello"])).start()
    assert ask(RunningJob(1, 0.0, 1, ("true",), str(tmp_path / "control")), STACKS) == "hello\n"
