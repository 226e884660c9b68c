"""What `ringrun --torch-backend ring` does when torch is imported, and which backends are then meant."""

import importlib
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from ringreduce import runtime as runtime_of_ranks
from ringreduce.engine.submitting import Submitting
from ringreduce.frameworks import torch_backend
from ringreduce.monitor import launcher_link
from tests.support.loops import in_a_loop

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of this name


@in_a_loop(
    ("named", "meant"),
    [
        ("gloo", "ring"),
        ("mpi", "ring"),
        ("undefined", "cpu:ring"),
        ("nccl", "nccl"),
        ("ring", "ring"),
        ("cpu:gloo,cuda:nccl", "cpu:ring,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:ring"),
        ("cpu:mpi,cuda:gloo", "cpu:ring,cuda:gloo"),
        ("cuda:gloo", "cuda:gloo"),
        ("cpu:ring,cuda:nccl", "cpu:ring,cuda:nccl"),
    ],
)
def test_what_a_program_names_and_what_is_meant(named, meant):
    assert torch_backend.renamed(named) == meant


def test_importing_torch_imports_next_to_nothing_of_ringreduce():
    program = "import sys, torch; print('ring' in torch.distributed.Backend.backend_list, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    is_known, *imported = done.stdout.split()
    assert is_known == "True"
    own = {f"ringreduce.frameworks.{name}" for name in ("horovod", "registry", "torch_backend")}
    found = {name for name in imported if name.partition(".")[0] in ("ringreduce", "ringrun", "mpi4py")}
    assert found == {"ringreduce", "ringreduce.frameworks", *own}


@pytest.mark.parametrize(
    "helper", [None, 3, lambda size, rank, store, backend: None], ids=["none", "no function", "other"]
)
def test_a_torch_without_the_private_function_is_named(monkeypatch, helper):
    monkeypatch.setattr(distributed_c10d, torch_backend.HELPER, helper)
    with pytest.raises(RuntimeError, match=r"--torch-backend ring: torch 2\S+ does not create its process groups .*"):
        torch_backend.rename("ring")


def test_another_value_is_refused():
    with pytest.raises(
        ValueError, match="RINGREDUCE_TORCH_BACKEND='gloo': expected ring; otherwise unset the variable"
    ):
        torch_backend.rename("gloo")


def test_a_rank_without_a_group_says_so_after_a_minute_and_its_first_group_is_told(monkeypatch, tmp_path):
    said, is_said = [], threading.Event()
    hook = SimpleNamespace(say_if_alone=lambda **how: (said.append(how), is_said.set()), torch_started_mpi=False)
    monkeypatch.setitem(sys.modules, "_ringrun_hook", hook)
    monkeypatch.setattr(torch_backend, "_ALONE_AFTER_S", 0.01)
    monkeypatch.setattr(launcher_link, "report", lambda *path, **message: said.append((*path, message)))
    monkeypatch.setattr(distributed_c10d, torch_backend.HELPER, lambda *group: group)
    monkeypatch.setattr(torch_backend, "_watch_optimizers", lambda _: None)
    torch_backend._watch_groups("rank1.json")
    assert is_said.wait(10)
    assert (said, hook.torch_groups) == ([{"ends": False}], 0)
    make = getattr(distributed_c10d, torch_backend.HELPER)
    assert [make(size, 1, [], "gloo") for size in (1, 2, 2)] == [(size, 1, [], "gloo") for size in (1, 2, 2)]
    assert (said[1:], hook.torch_groups) == ([("rank1.json", {"grouped": (1, 2)})], 3)


def test_rpc_meets_others_without_a_group_and_that_is_told(monkeypatch):
    told, met = [], [("store", 0, 1), ("store", 3, 4)]
    monkeypatch.setattr(rendezvous, "_rendezvous_handlers", {"made": lambda *_, **__: iter(met)})
    torch_backend._watch_rendezvous(lambda *who: told.append(who))
    assert list(rendezvous._rendezvous_handlers["made"]("made://", timeout=3)) == met
    assert told == [(0, 1), (3, 4)]


@pytest.mark.parametrize(
    ("steps", "moved", "sweeps", "alone"),
    [
        (1, 0, 0, False),
        (2, 0, 0, True),
        (2, 31, 0, True),
        (2, 32, 0, False),
        (9, 99, 0, True),
        (9, 100, 0, False),
        (9, 9, 1, False),
    ],
)
def test_a_rank_trains_alone_that_moves_less_than_its_model_or_some_elements_a_step(
    monkeypatch, steps, moved, sweeps, alone
):
    submitting = Submitting.__new__(Submitting)  # of an engine that is not there
    submitting.owed = 0
    runtime = SimpleNamespace(engine=SimpleNamespace(submitting=submitting))
    training, model = torch_backend._Training(), torch.nn.Linear(24, 4)
    optimizer = torch.optim.SGD(model.parameters())
    training.stepped(optimizer)
    assert not training.is_alone()  # before init()
    monkeypatch.setattr(runtime_of_ranks.process, "runtime", runtime)
    if sweeps:
        monkeypatch.setitem(sys.modules, "ringreduce.sweeps", None)
    else:
        monkeypatch.delitem(sys.modules, "ringreduce.sweeps", raising=False)
    for step in range(steps):
        training.stepped(optimizer)
        submitting.owed -= moved if step == 0 else 0
    assert training.is_alone() == alone
