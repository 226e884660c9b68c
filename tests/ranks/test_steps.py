"""What ranks record of steps, and send: each front end's steps, operations in order, and nothing while it is off."""

import contextlib
import json
import socket
import threading

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce import runtime
from ringreduce.monitor import reporting
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.torch_groups import groups_outlive_models  # noqa: F401

STEPS = 4


def parameter():
    return torch.nn.Parameter(torch.arange(50.0))


def torch_steps(wrap, *parameters):
    optimizer = wrap(torch.optim.SGD(parameters, lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum((1 + rr.rank()) * (each**2).sum() for each in parameters).backward()
        optimizer.step()


def local_around_distributed(optimizer):
    return hvd.LocalSGD(hvd.DistributedOptimizer(optimizer), sync_every=2)


def calls_of(wrap):
    step = wrap(lambda grads: grads)
    for _ in range(STEPS):
        step({"w": np.ones(50)})


class Pairs:
    def apply_gradients(self, pairs):
        return list(pairs)


def pairs():
    optimizer = rr.DistributedOptimizer(Pairs(), backward_passes_per_step=2)
    for _ in range(2 * STEPS):
        optimizer.apply_gradients([(np.ones(50), "w")])


def sharded():
    params = {"w": np.ones(50)}
    optimizer = rr.ShardedOptimizer(lambda pieces: lambda grads: None, params)
    for _ in range(STEPS):
        optimizer.step(params)


def by_hand():
    for _ in range(STEPS):
        rr.allreduce(np.ones(50))
        rr.mark_step(examples=32)


@pytest.mark.parametrize(
    "train",
    {
        "callable": lambda: calls_of(rr.DistributedOptimizer),
        "pairs": pairs,
        "sharded": sharded,
        "local": lambda: calls_of(lambda f: rr.LocalSGD(f, [np.ones(3)], sync_every=3)),
        "torch": lambda: torch_steps(hvd.DistributedOptimizer, parameter()),
        "torch, Adasum": lambda: torch_steps(lambda o: hvd.DistributedOptimizer(o, op=rr.Adasum), parameter()),
        "torch, sharded": lambda: torch_steps(hvd.ShardedOptimizer, parameter()),
        "torch, local": lambda: torch_steps(lambda o: hvd.LocalSGD(o, sync_every=2), parameter()),
        "torch, local around distributed": lambda: torch_steps(local_around_distributed, parameter()),
        "by hand": by_hand,
    }.items(),
    ids=lambda each: each[0],
)
def test_one_step_of_each_optimizer_is_one(train):
    def program():
        assert rr.stats() == {}
        train[1]()
        recorder, stats = runtime.current("test").engine.recorder, rr.stats()
        assert [each.number for each in recorder.steps] == list(range(STEPS))
        assert recorder.totals()["step"] == STEPS - 1
        assert stats["step_s"] == stats["computing_s"] + stats["blocked_s"] > 0
        assert stats["moving_s"] >= stats["hidden_s"] >= 0
        return {name: stats[name] for name in ("step", "operations", "bytes", "no_overlap")}, stats["examples_per_s"]

    first, second = run_ranks(2, program)
    assert first[0] == second[0]
    assert first[0]["step"] == STEPS - 1
    assert (first[1] is not None) == (train[0] == "by hand")


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Settings by which all ranks report to one socket, and what each has sent to it, by rank's thread."""
    path, found = str(tmp_path / "rank.json"), []
    monkeypatch.setattr(reporting, "TOTALS_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(f"{path}.agent")

        def listen():
            with contextlib.suppress(OSError):
                while said := agent.recv(1 << 17):
                    found.append(json.loads(said).get("measured", {}))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        yield Settings(report=True, error_file=path), found
        agent.shutdown(socket.SHUT_RD)
        listener.join(10)


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=["one host", "two hosts"])
def test_an_operation_is_ready_when_the_last_rank_has_submitted_it_and_is_told(sent, hosts):
    """Rank 1 is late in each step: it submits when rank 0 waits."""
    settings, found = sent
    waits = [threading.Event() for _ in range(STEPS)]

    def program():
        engine = runtime.current("test").engine
        for number in range(STEPS):
            if rr.rank() == 0:
                handle = rr.allreduce_async(np.ones(5000), name="gradient")
                engine._inbox.drive = lambda _, at=number: waits[at].set()
                handle.wait()
            else:
                assert waits[number].wait(10)
                rr.allreduce(np.ones(5000), name="gradient")
            rr.mark_step()
        return [each.operations for each in engine.recorder.steps], [each.waits for each in engine.recorder.steps]

    (early, blocked), (late, _) = run_ranks(2, program, hosts=hosts, settings=settings)
    for number, ((first,), (last,), ((_, from_s, to_s),)) in enumerate(zip(early, late, blocked, strict=True)):
        assert (
            (first.name, first.kind, first.nbytes)
            == (last.name, last.kind, last.nbytes)
            == ("gradient", "allreduce", 40_000)
        )
        assert (
            first.submitted_s <= from_s <= last.submitted_s <= first.ready_s <= first.begun_s <= first.ended_s <= to_s
        ), number
        assert first.algorithm == last.algorithm != ""
    assert {each["about"]["rank"]: each["about"]["size"] for each in found if "about" in each} == {0: 2, 1: 2}
    steps = [each["step"] for each in found if "step" in each]
    assert sorted(each["number"] for each in steps) == sorted(list(range(STEPS)) * 2)
    assert [tuple(row) for each in steps for row in each["operations"]].count(tuple(early[1][0])) == 1
    totals = [each["totals"] for each in found if "totals" in each]
    assert max(each["step"] for each in totals) == STEPS - 1
    assert set(totals[-1]) == {
        *("at_s", "step", "step_s", "histogram", "blocked_s", "computing_s", "moving_s", "hidden_s", "operations"),
        *("bytes", "by_algorithm", "by_name", "sent", "send_s", "lines", "samples", "cpu_s", "core_wait_s", "rss"),
        *("shm", "fusion", "no_overlap", "examples"),
    }
