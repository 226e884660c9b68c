"""What the ranks of a job run: training in float64 by elastic.run, with deaths where and when they are wanted.

    python -m tests.support.elastic.program STEPS FOLDER 'RANK WHERE WHEN HOW'…

RANK is that of the start. WHERE: `step` (before its collectives), `submitted` (after the first of them), `between`
(when half of the state is changed, which the others must undo), `meeting` (in re-forming), `sync`, `start` (WHEN
seconds after init), `leaving`, and in the engine `control` (before a control message), `message` (before data),
`window` (before a flag in shared memory); WHEN: the step, or how often it was there before. HOW: see plain.die.
Variables: TRAINING_COUNT, how many parameters; TRAINING_PER_HOST, how many ranks share what passes for a host;
TRAINING_WAY: `sharded`, with momentum by a ShardedOptimizer, or `local` (local_steps.py); TRAINING_WIRE: half of the
sums are encoded.

Deaths are of the job's first attempt. Each rank that survives leaves FOLDER/RANK.json: its parameters, and who took
part in each step that counts. One that dies as wanted leaves FOLDER/RANK.died, and all FOLDER/RANK.pid, one line for
each process.
"""

import functools
import gc
import json
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np

import ringreduce as rr
from ringreduce import runtime
from ringreduce.runtime import lifecycle
from ringreduce.runtime.recovery import rendezvous
from ringreduce.transport import mpi
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.window import Flags
from ringreduce.transport.world import World
from tests.support.elastic import local_steps
from tests.support.elastic.plain import die

COUNT = int(os.environ.get("TRAINING_COUNT", "1000"))  # parameters
HALF = COUNT // 2
RATE = 0.1
WAY = os.environ.get("TRAINING_WAY", "")
MOMENTUM = 0.5 if WAY == "sharded" else 0.0
WIRE = {"int4": rr.Compression.int4.everywhere}.get(os.environ.get("TRAINING_WIRE", ""), rr.Compression.none)


def gradient(parameters: np.ndarray, rank: int, step: int) -> np.ndarray:
    """Of a rank of the job's start: its data differ by rank, step and index."""
    target = np.sin(np.arange(len(parameters)) * (rank + 1) + step)
    return (parameters - target) * (1 + rank)


def replay(history: list[list[int]], count: int = COUNT, momentum: float = 0.0) -> np.ndarray:
    """The parameters after the steps in which these ranks took part, by one process."""
    if isinstance(history[0][-1], bool):
        return local_steps.replay(history, count)
    parameters, velocity = np.zeros(count), np.zeros(count)
    for step, ranks in enumerate(history):
        velocity = momentum * velocity + sum(gradient(parameters, rank, step) for rank in ranks) / len(ranks)
        parameters = parameters - RATE * velocity
    return parameters


class Momentum:
    """Descent by the mean over the ranks of the step."""

    def __init__(self, parameters: np.ndarray) -> None:
        self.parameters, self.velocity, self.ranks = parameters, np.zeros_like(parameters), 1

    def step(self, total: np.ndarray) -> None:
        """Change the parameters in place."""
        self.velocity[...] = MOMENTUM * self.velocity + total / self.ranks
        self.parameters -= RATE * self.velocity


class Deaths:
    """Of this rank."""

    def __init__(self, rank: int, deaths: list[str], told: Path) -> None:
        """told: a file that is there when this rank has died as wanted."""
        self._told = told
        self._wanted: dict[str, tuple[float, str]] = {}
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
            self._die(self._wanted[where][1])

    def begin(self) -> None:
        """Begin to wait, in a thread, for a death that comes after a time."""
        if "start" in self._wanted:
            after_s, how = self._wanted["start"]
            timer = threading.Timer(after_s, self._die, [how])
            timer.daemon = True
            timer.start()

    def before(self, owner: object, name: str, where: str) -> None:
        """Have a function pass by `at`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def passing(*args):
            self.at(where)
            return function(*args)

        setattr(owner, name, passing)

    def _die(self, how: str) -> None:
        self._told.touch()
        die(how)


def form(comm: object, generation: int) -> World:
    """A world whose ranks are on as many hosts as wanted."""
    own = mpi.start_mpi().COMM_WORLD.Dup()
    host = own.rank // int(os.environ["TRAINING_PER_HOST"])
    return World(own.rank, own.size, tuple(own.allgather(host)), own, own.Dup(), own.Split(host), generation)


def new_state(deaths: Deaths) -> rr.elastic.ObjectState:
    """Where all begin, by WAY."""

    class State(rr.elastic.ObjectState):
        def sync(self):
            deaths.at("sync", runtime.current("a test").world.number)
            super().sync()

    if WAY == "local":
        return local_steps.new_state(State, COUNT)
    parameters = np.zeros(COUNT)
    sharded = {"optimizer": rr.ShardedOptimizer(Momentum, parameters, op=rr.Sum)} if WAY == "sharded" else {}
    return State(parameters=parameters, history=[], step=0, **sharded)


def main() -> None:
    """See above."""
    steps, folder, rank = int(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
    wanted = [] if int(os.environ["RINGREDUCE_RESTART_COUNT"]) else sys.argv[3:]
    deaths = Deaths(rank, wanted, folder / f"{rank}.died")
    deaths.before(rendezvous, "allgather_object", "meeting")
    with (folder / f"{rank}.pid").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if "TRAINING_PER_HOST" in os.environ:
        lifecycle.form_world = form
    rr.init()
    deaths.begin()
    deaths.before(MessageTransport, "send_control", "control")
    deaths.before(MessageTransport, "send", "message")
    deaths.before(Flags, "publish", "window")

    state = new_state(deaths)

    def who_is_there():
        mine = np.zeros(int(os.environ["WORLD_SIZE"]))
        mine[rank] = 1
        return np.flatnonzero(rr.allreduce(mine, op=rr.Sum, name="who"))

    began, engines = [], []

    @rr.elastic.run
    def train(state):
        began.append(state.step)
        engines.append(weakref.ref(runtime.current("a test").engine))
        if WAY == "local":
            state.parameters = local_steps.train(state, steps, rank, deaths, who_is_there)
            return
        while state.step < steps:
            deaths.at("step", state.step)
            whole = gradient(state.parameters, rank, state.step)
            first = rr.allreduce_async(whole[:HALF], op=rr.Sum, name="first half")
            deaths.at("submitted", state.step)
            who = who_is_there()
            if MOMENTUM:
                state.optimizer.optimizer.ranks = len(who)
                state.optimizer.step(whole)
                deaths.at("between", state.step)
            else:
                state.parameters[:HALF] -= RATE * first.wait() / len(who)
                deaths.at("between", state.step)
                second = rr.allreduce(whole[HALF:], op=rr.Sum, name="second half", compression=WIRE)
                state.parameters[HALF:] -= RATE * second / len(who)
            state.history.append(who.tolist())
            state.step += 1
            state.commit()

    train(state)
    result = {"parameters": state.parameters.tolist(), "history": state.history, "size": rr.size(), "pid": os.getpid()}
    result["momentum"] = MOMENTUM
    gc.collect()
    result |= {"began": began[0], "engines": sum(each() is not None for each in engines)}
    made = folder / f"{rank}.json.new"  # renamed: a rank that was late may be ended while it writes
    made.write_text(json.dumps(result))
    made.rename(folder / f"{rank}.json")
    deaths.at("leaving")


if __name__ == "__main__":
    main()
