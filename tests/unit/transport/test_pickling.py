"""What becomes of a script's own classes and functions when they are sent, in its own process and in others."""

import pickle
import sys
import types

import pytest

from ringreduce.transport import pickling

SCRIPT = """
import dataclasses, enum

seen = []

class Phase(enum.Enum):
    WARMUP = 1

@dataclasses.dataclass
class Config:
    rate: float = 0.5

    class Inner:
        pass

class Meter:
    def add(self, value):
        seen.append(value)

class Place:
    rank = {rank}

def note(value):
    seen.append(value)

def made(values):
    return lambda value: values.append(value)
"""


@pytest.fixture
def script(monkeypatch):
    """Begins a process that runs the script as a rank: what this process has written, it has not."""

    def begin(rank):
        module = types.ModuleType("__main__")
        exec(SCRIPT.format(rank=rank), vars(module))
        monkeypatch.setitem(sys.modules, "__main__", module)
        pickling._keys.clear()
        pickling._own.clear()
        return module

    return begin


def test_a_process_finds_its_own_classes_and_functions_as_they_were(script):
    own, values = script(0), []
    local = own.made(values)
    meter, note, found = pickle.loads(pickling.dumps((own.Meter(), own.note, local)))
    assert (type(meter), note, found) == (own.Meter, own.note, local)
    meter.add(1)
    own.Meter().add(2)
    assert own.seen == [1, 2], "its methods see the script's variables, not copies"


def test_a_class_of_the_script_is_each_rank_s_own(script):
    there = script(0)
    sent = pickling.dumps((there.Phase.WARMUP, there.Config(0.25), there.Config.Inner(), [there.Meter()]))
    here = script(1)
    phase, config, inner, (meter,) = pickle.loads(sent)
    assert phase is here.Phase.WARMUP
    assert config == here.Config(0.25)
    assert (type(inner), type(meter)) == (here.Config.Inner, here.Meter)
    meter.add(3)
    assert (here.seen, there.seen) == ([3], [])


def test_a_class_that_differs_or_is_not_there_comes_as_it_was(script):
    sent = pickling.dumps(script(0).Place())
    here = script(1)
    assert (type(pickle.loads(sent)) is here.Place, pickle.loads(sent).rank, here.Place.rank) == (False, 0, 1)
    del here.Place
    assert pickle.loads(sent).rank == 0
