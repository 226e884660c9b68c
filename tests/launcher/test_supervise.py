"""When a job's time is over: decisions of the supervisor alone, without processes."""

import queue
import threading
from types import SimpleNamespace

import pytest

from ringrun import supervise
from ringrun.channel import Arrived, RankEnded
from ringrun.outcome import RankEnd
from ringrun.supervise import Supervisor


class Fake:
    """A channel, an mpirun and an output that only remember what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.tail: list[str] = []
        self.code = 0
        self.signals: list[int] = []

    def message(self, lines: list[str]) -> None:
        self.said += lines

    def send(self, rank: int, message: object) -> None:
        pass

    def broadcast(self, message: SimpleNamespace) -> None:
        self.signals.append(message.number)

    def end_agents(self) -> None:
        pass

    def end(self, steps: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("timeout_s", "code", "signals"), [(None, 0, []), (30.0, 0, []), (0.1, 124, [15])])
def test_only_a_job_that_takes_longer_is_ended(
    timeout_s: float | None, code: int, signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_LONGEST_WAIT_S", 0.01)  # it wakes often, as in a job of days
    fake = Fake()
    events: supervise.Events = queue.SimpleQueue()
    events.put(Arrived(0))
    end = RankEnd(rank=0, host="here", pid=1, code=0, at_s=0.0)
    timer = threading.Timer(1.0, events.put, [RankEnded(end)])
    timer.start()
    assert Supervisor(1, fake, fake, fake, events, timeout_s).run() == code
    assert fake.signals == signals
    assert ["took longer" in line for line in fake.said[-1:]] == [True] * (code == 124)
    timer.join()
