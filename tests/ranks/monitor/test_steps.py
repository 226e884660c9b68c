"""What ranks record of steps, and send: each front end's steps, operations in order, and nothing while it is off."""

import contextlib
import dataclasses
import json
import socket
import threading
import time

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce import runtime
from ringreduce.execution.steps import StepRecorder
from ringreduce.monitor import reporting
from ringreduce.monitor.sampling import Sampler
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.ranks.torch.test_distributed import on_ring
from tests.support.patience import wait_until
from tests.support.world import on_a_pool

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


def sharded(**options):
    params = {"w": np.ones(50)}
    optimizer = rr.ShardedOptimizer(lambda pieces: lambda grads: None, params, **options)
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
        "sharded, shared": lambda: sharded(shared_parameters=True),
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
        assert stats["computing_s"] == stats["step_s"] - stats["blocked_s"]
        assert stats["step_s"] > 0
        assert stats["moving_s"] >= stats["hidden_s"] >= 0
        return stats

    first, second = run_ranks(2, program)
    assert first["no_overlap"] == second["no_overlap"]
    assert abs(first["operations"] - second["operations"]) <= 1, (
        "which nobody waits for: it ends in this step or the next"
    )
    assert first["step"] == second["step"] == STEPS - 1
    assert (first["examples_per_s"] is not None) == (train[0] == "by hand")


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """Settings by which all ranks report to one socket, and what each has sent to it, by rank's thread."""
    path, found = str(tmp_path / "rank.json"), []
    for name in ("TOTALS_S", "FIRST_STEPS_S", "STEPS_S"):
        monkeypatch.setattr(reporting, name, 0.05)
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
        wait_until(lambda: sum(each.get("step", {}).get("number") == STEPS - 1 for each in found) == 2)
        return [each.operations for each in engine.recorder.steps], [each.waits for each in engine.recorder.steps]

    (early, blocked), (late, _) = run_ranks(2, program, hosts=hosts, settings=settings)
    for number, ((first,), (last,), ((_, from_s, to_s),)) in enumerate(zip(early, late, blocked, strict=True)):
        assert (
            (first.name, first.kind, first.nbytes)
            == (last.name, last.kind, last.nbytes)
            == ("gradient", "allreduce", 40_000)
        )
        assert (
            first.submitted_s <= from_s <= last.submitted_s <= first.ready_s < first.begun_s <= first.ended_s <= to_s
        ), number
        assert first.algorithm == last.algorithm != ""
    assert {each["about"]["rank"]: each["about"]["size"] for each in found if "about" in each} == {0: 2, 1: 2}
    settings = [each["about"]["settings"] for each in found if "settings" in each.get("about", ())]
    assert settings == [{"stall_abort_s": [20.0, 0.0]}], "the one of the tests, and not that it reports"
    assert all(each["about"]["versions"]["torch"] == torch.__version__ for each in found if "about" in each)
    steps = [each["step"] for each in found if "step" in each]
    assert sorted(each["number"] for each in steps) == sorted(list(range(STEPS)) * 2)
    assert [tuple(row) for each in steps for row in each["operations"]].count(tuple(early[1][0])) == 1
    totals = [each["totals"] for each in found if "totals" in each]
    assert max(each["step"] for each in totals) == STEPS - 1
    assert set(totals[-1]) == {
        *("at_s", "step", "step_s", "histogram", "blocked_s", "computing_s", "moving_s", "hidden_s", "operations"),
        *("bytes", "by_algorithm", "by_name", "sent", "send_s", "lines", "samples", "core_wait_s", "rss"),
        *("shm", "fusion", "no_overlap", "examples", "stores"),
    }


def test_steps_that_are_sent_follow_one_another_however_short_they_are(sent, monkeypatch):
    """So that those of all ranks are the same: only in such can be seen who waits for whom."""
    settings, found = sent
    monkeypatch.setattr(reporting, "STEPS_S", 60.0)
    monkeypatch.setattr(reporting, "FIRST_STEPS_S", 0.5)  # in which three steps end, on a busy machine, too

    def program():
        while len(numbers := [each["step"]["number"] for each in found if "step" in each]) < 3:
            rr.mark_step()
            time.sleep(1e-3)
        return numbers

    ((first, *others),) = run_ranks(1, program, settings=settings)
    assert others == [first + 1, first + 2]


def test_calls_of_the_fast_lane_are_operations_and_waits_too():
    def program():
        rr.stats()
        channel = rr.ordered()
        rr.mark_step()
        for _ in range(20):
            time.sleep(0.005 * rr.rank())  # some of rank 0's are submitted in the end
            channel.allreduce_(np.ones(100))
        rr.mark_step()
        step = runtime.current("test").engine.recorder.steps[-1]
        for _, since_s, _ in step.waits:
            assert [each for each in step.operations if each.submitted_s <= since_s < each.ended_s], "it was submitted"
        found = {each[:3] for each in step.operations}, len(step.waits) >= 20
        return rr.stats()["operations"], rr.stats()["bytes"], *found

    assert run_ranks(2, program) == [(20, 16_000, {("ordered", "allreduce", 800)}, True)] * 2


class Around(torch.optim.SGD):
    """Has another optimizer inside, as torch's ZeroRedundancyOptimizer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.inside = torch.optim.SGD([parameter()], lr=0.1)

    def step(self):
        self.inside.step()
        super().step()


def test_what_the_fast_lane_has_begun_is_not_taken_for_the_beginning_of_another():
    def program():
        rr.stats()
        engine = runtime.current("test").engine
        recorder = engine.recorder
        recorder.passed("ordered", "allreduce", 8, time.monotonic() - 100.0, None)
        with pytest.raises(rr.InputError, match="there is no process set 77"):
            engine.submit("barrier", None, 77)
        rr.mark_step()
        rr.allreduce(np.ones(3))
        rr.mark_step()
        step = recorder.steps[-1]
        return [each.submitted_s >= step.from_s for each in step.operations]

    assert run_ranks(1, program) == [[True]]


def test_examples_are_a_whole_number_of_any_library():
    def program():
        rr.stats()
        for examples in 32, np.int64(32), torch.tensor(32), 0:
            rr.mark_step(examples)
        for wrong in -1, 2.5, "x", np.ones(2):
            with pytest.raises(rr.InputError, match=r"mark_step: examples=.*; expected a whole number of 0 or more"):
                rr.mark_step(wrong)
        assert rr.stats()["examples_per_s"] == 0
        return [json.dumps(each.examples) for each in runtime.current("test").engine.recorder.steps]

    assert run_ranks(1, program) == [["32", "32", "32", "0"]]


def ddp(rank, size):
    """What DDP waits for, it waits for in C++, on a future; and of two optimizers, one in the other, one counts."""
    rr.stats()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(300, 300)] * 3))
    optimizer = Around(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        if rank:
            time.sleep(0.01)
        optimizer.step()
    recorder = runtime.current("test").engine.recorder
    recorder.recording = False
    return [(each.number, each.blocked_s > 0, each.moving_s >= each.hidden_s) for each in recorder.steps]


@on_a_pool
def test_training_over_the_backend_ring(world, tmp_path):
    program = on_ring(ddp, tmp_path)
    assert world(2).run(program) == [[(number, True, True) for number in range(STEPS)]] * 2


def test_while_it_is_off_nothing_is_recorded_or_sent_and_steps_are_counted(sent, monkeypatch):
    for name in ("ended", "passed", "waited", "_end"):
        monkeypatch.setattr(StepRecorder, name, lambda *args: pytest.fail(f"{args}"))

    def program():
        calls_of(rr.DistributedOptimizer)
        assert (taken := runtime.current("test").engine.recorder.taken) > 1
        channel = rr.ordered()
        for _ in range(5):
            channel.allreduce_(np.ones(100))
        rr.mark_step(7)
        engine = runtime.current("test").engine
        assert engine.recorder.taken == taken + 1
        handle = rr.allreduce_async(np.ones(3))
        recorder = handle.recorder
        handle.wait()  # no rank ends before the others have submitted it
        return engine.transport.traffic, engine.recorder.recording, recorder

    assert run_ranks(2, program, settings=dataclasses.replace(sent[0], report=False)) == [(None, False, None)] * 2
    assert not any(sent[1])
    assert not [each for each in threading.enumerate() if each.name == "ringreduce reports"]


def test_steps_that_are_only_counted_change_no_totals_and_the_time_of_the_last_is_told(sent):
    settings, found = sent

    def program():
        def steps(until):
            while not until([each["totals"] for each in found if "totals" in each]):
                rr.allreduce(np.ones(100), name="w")
                rr.mark_step()
                time.sleep(1e-3)

        engine = runtime.current("test").engine
        steps(lambda said: said and said[-1]["step"] > 2)
        engine.report(0.0)
        steps(lambda said: said[-1].get("counted"))
        recorded, taken = engine.recorder.totals(), engine.recorder.taken
        steps(lambda said: said[-1]["counted"][0] > taken)
        assert engine.recorder.totals() == recorded
        assert (engine.recorder.recording, engine.transport.traffic) == (False, None)
        return recorded["step"]

    (step,) = run_ranks(1, program, settings=settings)
    counted = [each["totals"] for each in found if each.get("totals", {}).get("counted")]
    assert {each["step"] for each in counted} == {step}
    (first, first_s, _), (last, last_s, core_s) = counted[0]["counted"], counted[-1]["counted"]
    assert core_s >= 0
    assert last_s - first_s >= 1e-3 * (last - first) > 0


def test_before_steps_are_only_counted_those_that_were_recorded_are_sent(sent, monkeypatch):
    """Who keeps the others waiting is seen in them alone, and a rank that counts is ended by a signal."""
    settings, found = sent
    for name, seconds in (("FIRST_STEPS_S", 1e9), ("LAST_S", 20.0)):
        monkeypatch.setattr(reporting, name, seconds)

    def program():
        for _ in range(STEPS * (1 + rr.rank())):
            rr.mark_step()
        engine = runtime.current("test").engine
        engine.report(0.0)
        wait_until(lambda: not engine.recorder.recording)
        wait_until(lambda: sum("step" in each for each in found) == 3 * STEPS)

    run_ranks(2, program, settings=settings)
    numbers = sorted(each["step"]["number"] for each in found if "step" in each)
    assert numbers == sorted([*range(STEPS), *range(2 * STEPS)])


def test_the_last_totals_wait_for_an_agent_that_is_slow_to_read(tmp_path, monkeypatch):
    """Of a short script they alone have its steps, and on a busy machine its agent may have no core just then."""
    path, found, close = str(tmp_path / "rank.json"), [], reporting.Reporting.close
    monkeypatch.setattr(reporting.launcher_link, "WAIT_S", 60.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(f"{path}.agent")
        agent.settimeout(10.0)

        def listen():
            time.sleep(2 * reporting.LAST_S)
            while not any(each.get("step", 0) for each in found):
                found.append(json.loads(agent.recv(1 << 17)).get("measured", {}).get("totals", {}))

        def closed(of):
            listener = threading.Thread(target=listen)
            listener.start()
            close(of)
            listener.join()

        def program():
            calls_of(rr.DistributedOptimizer)
            while reporting.launcher_link.report(path, wait_s=0, notice="of something else"):
                continue

        monkeypatch.setattr(reporting.Reporting, "close", closed)
        run_ranks(1, program, settings=Settings(report=True, error_file=path))
    assert found[-1]["step"] == STEPS - 1


@pytest.mark.parametrize("what", ["the socket goes", "it fails"])
def test_the_job_goes_on_without_its_record(sent, tmp_path, monkeypatch, caplog, what):
    if what == "it fails":
        monkeypatch.setattr(Sampler, "look", lambda _: 1 // 0)

    def program():
        calls_of(rr.DistributedOptimizer)
        if rr.rank() == 0:
            wait_until(lambda: len(caplog.messages) == 2 if what == "it fails" else sent[1])
            (tmp_path / "rank.json.agent").unlink()
        rr.barrier()
        calls_of(rr.DistributedOptimizer)
        return rr.stats()["step"]

    with caplog.at_level("WARNING", "ringreduce"):
        assert run_ranks(2, program, settings=sent[0]) == [2 * STEPS - 2] * 2, (
            "another optimizer counts from its second step on"
        )
    warnings = [
        f"the record of steps of rank {rank} failed, and ends; the job continues: ZeroDivisionError" for rank in (0, 1)
    ]
    found = sorted(each.partition(": integer")[0] for each in caplog.messages)
    assert found == (warnings if what == "it fails" else [])
