"""What the ranks of a job run: training in float64 by elastic.run, with deaths where and when they are wanted.

    python -m tests.elastic.training STEPS FOLDER 'RANK WHERE WHEN HOW'…

RANK is that of the start. WHERE: `step` (before its collective), `submitted` (after), `meeting` (in re-forming),
`sync`, `start` (WHEN seconds after init), `leaving`; WHEN: the step; of the others how often before. HOW: see `die`.

Deaths are of the job's first attempt. Each rank that survives leaves FOLDER/RANK.json: its parameters, and who took
part in each step that counts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ringreduce as rr
from ringreduce.startup import survivors

COUNT = 1000  # parameters
RATE = 0.1


def gradient(parameters: np.ndarray, rank: int, step: int) -> np.ndarray:
    """Of a rank of the job's start: its data differ by rank, step and index."""
    target = np.sin(np.arange(COUNT) * (rank + 1) + step)
    return (parameters - target) * (1 + rank)


def replay(history: list[list[int]]) -> np.ndarray:
    """The parameters after the steps in which these ranks took part, by one process."""
    parameters = np.zeros(COUNT)
    for step, ranks in enumerate(history):
        parameters = parameters - RATE * sum(gradient(parameters, rank, step) for rank in ranks) / len(ranks)
    return parameters


def die(how: str) -> None:
    """End this process, or let it hang."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how.startswith("_exit"):
        os._exit(int(how.removeprefix("_exit")))
    elif how.startswith("exit"):
        sys.exit(int(how.removeprefix("exit")))
    elif how == "raise":
        raise ValueError("on purpose")
    elif how == "abort":
        os.abort()
    else:
        assert how == "sleep"
        time.sleep(1000)


class Deaths:
    """Of this rank."""

    def __init__(self, rank: int, deaths: list[str]) -> None:
        self._wanted = {}
        for each in deaths:
            which, where, when, how = each.split()
            if int(which) == rank:
                self._wanted[where] = (float(when), how)
        self._times: dict[str, int] = {}

    def at(self, where: str, when: float | None = None) -> None:
        """Die if it is wanted here.  when: the step; None: how often it was here before."""
        if when is None:
            when = self._times.get(where, 0)
            self._times[where] = when + 1
        if where in self._wanted and self._wanted[where][0] == when:
            die(self._wanted[where][1])

    def begin(self) -> None:
        """Begin to wait, in a thread, for a death that comes after a time."""
        if "start" in self._wanted:
            after_s, how = self._wanted["start"]
            threading.Timer(after_s, die, [how]).start()


def main() -> None:
    """See above."""
    steps, folder, rank = int(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
    deaths = Deaths(rank, [] if int(os.environ["RINGREDUCE_RESTART_COUNT"]) else sys.argv[3:])
    everyones = survivors.everyones

    def meeting(*args):
        deaths.at("meeting")
        return everyones(*args)

    survivors.everyones = meeting
    pid = os.getpid()
    (folder / f"{rank}.pid").write_text(str(pid))
    rr.init()
    deaths.begin()

    class State(rr.elastic.ObjectState):
        def sync(self):
            deaths.at("sync", rr.reform.latest().number if rr.reform.latest() else 0)
            super().sync()

    state = State(parameters=np.zeros(COUNT), history=[], step=0)

    began = []

    @rr.elastic.run
    def train(state):
        began.append(state.step)
        while state.step < steps:
            deaths.at("step", state.step)
            mine = np.zeros(int(os.environ["WORLD_SIZE"]))
            mine[rank] = 1
            handle = rr.allreduce_async(gradient(state.parameters, rank, state.step), op=rr.Sum, name="gradient")
            deaths.at("submitted", state.step)
            who = np.flatnonzero(rr.allreduce(mine, op=rr.Sum, name="who"))
            state.parameters = state.parameters - RATE * handle.wait() / len(who)
            state.history.append(who.tolist())
            state.step += 1
            state.commit()

    train(state)
    result = {"parameters": state.parameters.tolist(), "history": state.history, "size": rr.size(), "pid": os.getpid()}
    result["began"] = began[0]
    (folder / f"{rank}.json").write_text(json.dumps(result))
    deaths.at("leaving")


if __name__ == "__main__":
    main()
