"""An agent in this process, and what it says when its rank ends; what whole jobs show is in the neighbours."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ringrun.agent.agent import Agent
from ringrun.connection import wire
from ringrun.environment import Place, Settings
from tests.patience import patient


class SlowLink:
    """A connection that takes output only once the death of the rank is known."""

    is_local = True

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []
        self._died = threading.Event()

    def send(self, message: wire.Message) -> None:
        if isinstance(message, wire.Output):
            assert self._died.wait(patient(5)), "the death is not reported"
        self.sent.append(message)
        if isinstance(message, wire.Died):
            self._died.set()
        if isinstance(message, wire.Ended):
            raise SystemExit  # else the agent waits for what children of its rank may write


def test_a_death_is_reported_before_what_the_rank_wrote_is_read(tmp_path: Path) -> None:
    link = SlowLink()
    agent = Agent(link, Place(0, 1, 0, 1), Settings("openmpi", str(tmp_path)), daemon=0)
    last_words = [sys.executable, "-c", "import os; os.write(1, b'last words'); os._exit(7)"]
    child = subprocess.Popen(last_words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with child, pytest.raises(SystemExit):
        agent._forward(child)
    agent._rank_socket._socket.close()
    died, said, ended = link.sent
    assert isinstance(died, wire.Died)
    assert died.code == 7
    assert said == wire.Output("stdout", b"last words")
    assert isinstance(ended, wire.Ended)
    assert ended.code == 7
