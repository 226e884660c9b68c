"""Stall reports, on threads: who gave a tensor, who did not, and what the others do instead."""

import contextlib
import itertools
import math
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.engine import stalls
from ringreduce.engine.engine import Engine
from ringreduce.execution.signature import Signature, ranks_text
from ringreduce.monitor import stall_report
from ringreduce.monitor.stall_report import headline
from ringreduce.negotiation.coordinator import Waiting
from ringreduce.negotiation.protocol import StackRequest
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import known
from tests.support.patience import wait_until
from tests.support.tiers import parted

SOON = Settings(stall_check_s=0.2)


def busy(seconds):
    time.sleep(seconds)


def late_rank(late):
    begins = threading.Barrier(3)

    def program():
        rr.allreduce(np.ones(3), name="first")
        begins.wait()  # or the others wait, on a busy machine, before it is there
        if rr.rank() == late:
            busy(0.7)
        return rr.allreduce(np.ones((2, 5)), name="late", op=rr.Sum)[0, 0]

    return program


@pytest.mark.parametrize("late", [0, 2], ids=["the coordinator", "another rank"])
def test_the_report_names_tensor_ranks_lines_and_what_the_missing_rank_does(capsys, late):
    begun_s = time.monotonic()
    assert run_ranks(3, late_rank(late), settings=SOON) == [3, 3, 3]
    told = capsys.readouterr().err
    most = 1 + math.log2((time.monotonic() - begun_s) / SOON.stall_check_s)
    assert 1 <= told.count("stalled:") <= most, "after one, two, four times stall_check_s"
    given = rf"ranks {'1-2' if late == 0 else '0-1'} \(test_stalls.py:\d+\)"
    assert re.search(
        rf"ringreduce: stalled: allreduce 'late' \(float64\[2, 5\]\): waiting for \d s; submitted by {given}; "
        rf"missing: rank {late}\. All ranks must submit it\n"
        rf"rank {late} last submitted allreduce 'first' \(test_stalls.py:\d+\) \d s ago; it is here:\n",
        told,
    ), told
    assert "in busy\n    time.sleep(seconds)" in told


def test_many_tensors_are_one_report_and_what_waits_elsewhere_is_told(monkeypatch):
    reports = []
    monkeypatch.setattr(stall_report.LOGGER, "warning", reports.append)

    def program():
        handles = [rr.allreduce_async(np.ones(2), name=f"t{k}.{rr.rank()}") for k in range(5)]
        wait_until(
            lambda: reports and reports[-1].count("2 more: waiting") == 2
        )  # on a busy machine others come before
        return len(handles)

    run_ranks(2, program, settings=SOON)
    told = reports[-1]
    for rank in (0, 1):
        names = rf"allreduce 't0.{rank}' \(float64\[2\]\), and 't1.{rank}', 't2.{rank}' and 2 more"
        where = rf"submitted by rank {rank} \(test_stalls.py:\d+\); missing: rank {1 - rank}"
        assert re.search(rf"^(stalled: )?{names}: waiting for \d+ s; {where}", told, re.MULTILINE), told
    assert "All ranks must submit them\nrank" in told
    assert re.search(
        r"rank 1 last submitted allreduce 't4.1' .*, and waits for allreduce 't0.1', .* and 2 more", told
    ), told


def test_a_report_is_also_of_what_began_to_wait_a_little_later(monkeypatch):
    reports = []
    monkeypatch.setattr(stalls, "warn", lambda settings, text, full="": reports.append(full or text))

    def program():
        time.sleep(0.5 * (1 - rr.rank()))
        handle = rr.allreduce_async(np.ones(2), name=f"t{rr.rank()}")
        wait_until(lambda: reports)
        return handle

    run_ranks(2, program, settings=Settings(stall_check_s=1))
    for name in ("t0", "t1"):
        assert f"allreduce '{name}' (float64[2]): waiting for " in reports[0]


class Steps:
    """Of one rank, 12 of them or 11: how it reduces, and counts."""

    def __init__(self):
        self.optimizer = rr.DistributedOptimizer(SimpleNamespace(step=lambda gradients: None))

    def named(self):
        rr.allreduce(np.ones(3), name="w")

    def unnamed(self):
        rr.allreduce(np.ones(3))
        rr.allreduce(np.ones(4))

    def two(self):
        rr.allreduce(np.ones(3), name="v")
        rr.allreduce(np.ones(3), name="w")

    def marked(self):
        for name in ("v", "v", "w"):
            rr.allreduce(np.ones(3), name=name)
        rr.mark_step()

    def optimizer_s(self):
        self.optimizer.step([np.ones(3), np.ones(4)])


WHAT = {
    "named": "allreduce 'w' (float64[3])",
    "unnamed": "allreduce of an unnamed tensor (float64[3])",
    "two": "allreduce 'v' (float64[3])",
    "marked": "allreduce 'v' (float64[3])",
    "optimizer_s": "allreduce of '0' and 1 more (float64[3], float64[4])",
}


@pytest.mark.parametrize(
    ("how", "behind"),
    parted(itertools.product(WHAT, [0, 2]), lambda how, behind: (behind == 0) == (how in ("named", "two"))),
)
def test_the_rank_that_has_taken_fewer_steps_is_named_with_their_number(how, behind, monkeypatch):
    """Each operation with the ranks that have submitted it, and with those that have not."""
    reports = []
    monkeypatch.setattr(stall_report.LOGGER, "warning", reports.append)

    def train():
        step = getattr(Steps(), how)
        for number in range(12):
            if number != 5 or rr.rank() != behind:
                step()
        handle = rr.allreduce_async(np.float32(rr.rank()), name="loss")
        wait_until(lambda: reports and f"{ahead} are in" in reports[-1] and "'loss'" in reports[-1])
        return handle

    def program():
        ends = pytest.raises(rr.CollectiveError, match=r"rank \d has left the job")
        with contextlib.nullcontext() if rr.rank() == behind else ends:
            train()

    here, ahead, what = f"rank {behind}", f"ranks {'0-1' if behind else '1-2'}", WHAT[how].partition(" (")[0]
    run_ranks(3, program, settings=SOON)
    first, *others = reports[-1].removeprefix("stalled: ").splitlines()[:3]
    assert first == (
        f"{here} took 11 steps, {ahead} are in their 12th ({what}): do all ranks have the same number of batches?"
    )
    waits = {WHAT[how]: (ahead, here), "allreduce 'loss' (float32[])": (here, ahead)}
    for name, (submitted, missing) in waits.items():
        where = rf"submitted by {submitted} \(test_stalls.py:\d+\); missing: {missing}"
        (said,) = [each for each in others if each.startswith(name)]
        assert re.fullmatch(rf": waiting for \d s; {where}(\. All ranks must submit them)?", said.removeprefix(name)), (
            said
        )


def test_a_rank_that_is_late_in_a_step_is_asked_nothing_about_batches():
    lines = {0: "train.py:7", 2: "train.py:7"}
    waiting = [Waiting(Signature("allreduce", name), 1.0, lines, [1], step) for name, step in (("w", 21), ("v", -1))]
    sentence = "rank 1 took 21 steps, ranks 0,2 are in their 22nd (allreduce 'w')"
    assert headline(waiting, 3.0).splitlines() == [
        "allreduce 'w', and 'v': waiting for 2 s; submitted by ranks 0,2 (train.py:7); missing: rank 1. All ranks must "
        "submit them",
        sentence,
    ]
    unnamed = [
        Waiting(Signature("allreduce", f"unnamed.{step}", numbered=True), 1.0, lines, [1], step)
        for step in (20, 22, 21)
    ]
    assert headline(unnamed, 3.0).endswith("rank 1 took 20 steps, ranks 0,2 are in their 21st (allreduce)")
    (first,) = headline([waiting[0]._replace(step=0)], 3.0).splitlines()
    assert first.endswith("missing: rank 1. All ranks must submit it")


def test_a_rank_that_waits_in_a_step_that_others_have_left_is_asked_about_frozen_parameters():
    waiting = [
        Waiting(Signature("allreduce", "w"), 1.0, {1: "train.py:7"}, [0, 2], 5),
        Waiting(Signature("allreduce", "v"), 1.0, {0: "train.py:8", 2: "train.py:8"}, [1], 6),
    ]
    first, *_ = headline(waiting, 3.0).splitlines()
    assert first == (
        "rank 1 took 6 steps, ranks 0,2 are in their 7th (allreduce 'v'): is a parameter frozen (requires_grad=False) "
        "on some ranks only?"
    )


def test_of_operations_of_many_groups_of_ranks_the_first_are_told():
    waiting = [Waiting(Signature("allreduce", f"w{rank}"), 1.0, {rank: "a.py:1"}, [9]) for rank in range(5)]
    first, *_, last = headline(waiting, 3.0).splitlines()
    assert first == "allreduce 'w0': waiting for 2 s; submitted by rank 0 (a.py:1); missing: rank 9"
    assert last == "and 2 more, of other ranks or lines. All ranks must submit them"


def test_numbers_in_order():
    numbers = 1, 2, 3, 4, 11, 12, 13, 21, 101, 111, 122
    expected = "1st 2nd 3rd 4th 11th 12th 13th 21st 101st 111th 122nd"
    assert " ".join(map(stall_report.ordinal, numbers)) == expected


@pytest.mark.parametrize("name", ["w", "ordered"])
def test_what_a_rank_waits_for_is_told_with_its_line(name):
    asked = threading.Event()

    def ask(activity, told):
        wait_until(lambda: f"'{name}'" in activity.waiting_for())
        told.append(activity.waiting_for())
        asked.set()

    def program():
        engine, told = runtime.current("a test").engine, []
        chosen = {"process_set": rr.ordered()} if name == "ordered" else {"name": name}
        first = rr.allreduce_async(np.ones(3), name="first")
        assert engine.stalls.waiting_for() == ""
        if rr.rank() == 1:
            assert asked.wait(20)
        else:
            threading.Thread(target=ask, args=(engine.stalls, told)).start()
        assert rr.allreduce(np.ones(2), op=rr.Sum, **chosen)[0] == 2
        assert engine.stalls.waiting_for() == ""
        return [*told, rr.synchronize(first)[0]]

    (told, first), (other,) = run_ranks(2, program)
    assert re.fullmatch(rf"allreduce '{name}' \(test_stalls.py:\d+\)", told)
    assert first == other == 1


def test_no_report_when_it_is_turned_off_or_comes_in_time(capsys):
    run_ranks(3, late_rank(1), settings=Settings(stall_check_s=0))
    run_ranks(3, late_rank(1), settings=Settings(stall_check_s=5))
    assert capsys.readouterr().err == ""


def test_texts_of_many_ranks_are_short():
    lines = {rank: f"train.py:{rank % 5}" for rank in range(1, 4095)}
    first = Waiting(Signature("allreduce", "w"), 1.0, lines, [0, 4095])
    assert len(headline([first], 3.0)) < 1000, "of scattered ranks the first ones are named"
    first = first._replace(submitted=dict.fromkeys(lines, "train.py:41"))
    assert headline([first], 3.0) == (
        "allreduce 'w': waiting for 2 s; submitted by ranks 1-4094 (train.py:41); missing: ranks 0,4095. "
        "All ranks must submit it"
    )


def test_of_many_missing_ranks_some_are_asked(capsys):
    def program():
        if rr.rank() > 1:
            time.sleep(0.8)
        return rr.allreduce(np.ones(2), name="late", op=rr.Sum)[0]

    assert run_ranks(12, program, settings=SOON) == [12] * 12
    told = capsys.readouterr().err.split("stalled: ")[1]
    assert re.search(r"submitted by ranks 0-1 \(test_stalls.py:\d+\); missing: ranks 2-11\. All", told), told
    assert len(re.findall(r"^rank \d+ has submitted nothing yet; it is here:", told, re.MULTILINE)) == 8


def in_a_set(process_set):
    return rr.allreduce_async(np.ones(3), name="w", process_set=process_set)


def another(_):
    return rr.broadcast_async(np.ones(3), 0, name="w")


@pytest.mark.parametrize(
    ("ranks", "other", "submitted", "number"),
    [
        ([0, 1], in_a_set, "0 last .*; it submitted allreduce", 1),
        ([1, 2], in_a_set, "1 last .*; it submitted allreduce", 1),
        ([0, 1, 2], another, "(0 last .*; it submitted broadcast|[12] last .*; it submitted allreduce)", 0),
    ],
    ids=["one coordinator", "two coordinators", "another operation"],
)
def test_a_name_in_another_process_set_or_of_another_operation_is_told(capsys, ranks, other, submitted, number):
    def program():
        handle = other(known(ranks, 1)) if rr.rank() == ranks[0] else rr.allreduce_async(np.ones(3), name="w")
        with pytest.raises(rr.StalledError, match="'w'"):
            rr.synchronize(handle)
        return rr.allreduce(1.0, name="after", op=rr.Sum)

    settings = Settings(stall_check_s=0.2, stall_abort_s=1.5)
    assert run_ranks(3, program, process_sets=[ranks] if number else [], settings=settings) == [3, 3, 3]
    told = capsys.readouterr().err
    where = rf"'w' \(test_stalls.py:\d+\) to process set {number} \(ranks {ranks[0]}-{ranks[-1]}\)"
    assert re.search(f"rank {submitted} {where}: all ranks must call the same operation on the same ", told), told


def test_a_call_that_the_missing_rank_refused_is_told(capsys):
    failed = []

    def program():
        if rr.rank() == 1:
            with pytest.raises(rr.InputError):
                rr.allreduce("three", name="w")
            wait_until(lambda: len(failed) == 2)
        else:
            with pytest.raises(rr.StalledError, match="'w'"):
                rr.allreduce(np.ones(3), name="w")
            failed.append(rr.rank())
        return rr.allreduce(1.0, name="after", op=rr.Sum)

    assert run_ranks(3, program, settings=Settings(stall_check_s=0.2, stall_abort_s=1.5)) == [3, 3, 3]
    told = capsys.readouterr().err
    assert re.search(r"rank 1 .*; its call for 'w' \(test_stalls.py:\d+\) was refused: allreduce 'w': ", told), told


@pytest.mark.parametrize("patient", [False, True])
def test_a_patient_channel_waits_without_a_report(capsys, patient):
    def program():
        channel = rr.ordered(patient=patient)
        if rr.rank() == 1:
            busy(1.0)
            channel.send_object("at last", 0)
            return None
        return channel.recv_object(1)

    assert run_ranks(2, program, settings=SOON)[0] == "at last"
    assert ("recv 'ordered'" in capsys.readouterr().err) is not patient


@pytest.mark.parametrize("kind", ["join", "allreduce"])
def test_a_rank_that_waits_in_join_is_not_stalled(monkeypatch, kind):
    probed = threading.Event()
    monkeypatch.setattr(stalls.StallWatch, "_probe_coordinator", lambda *_: probed.set())

    def program():
        if rr.rank() == 0:
            probed.wait(0.5 if kind == "join" else 20)  # longer than stall_check_s
        return rr.join() if kind == "join" else rr.allreduce(1.0, name="w", op=rr.Sum)

    run_ranks(2, program, settings=Settings(stall_check_s=0.1))
    assert probed.is_set() == (kind == "allreduce")


@pytest.fixture
def mute(monkeypatch):
    """Ranks that do not answer when they are asked what they do, as if they were stopped."""
    monkeypatch.setattr(stalls, "REPLY_S", 0.3)
    receive, ranks = stalls.StallWatch._receive, set()

    def received(watch, source, message):
        if not (isinstance(message, StackRequest) and watch._mailbox.rank in ranks):
            receive(watch, source, message)

    monkeypatch.setattr(stalls.StallWatch, "_receive", received)
    return ranks


@pytest.mark.parametrize(
    ("late", "answers_not", "expected"), [([1], [], [1]), ([1, 2], [], [1, 2]), ([1, 2], [2], [2])]
)
def test_in_an_elastic_job_those_who_keep_others_waiting_are_given_up_and_nothing_fails(
    monkeypatch, mute, late, answers_not, expected
):
    """ringrun ends them, and the others go on; here nobody does, and the late rank comes after all.

    Of several those that do not answer: the others may wait for these.
    """
    mute.update(answers_not)
    given_up, failed = [], []
    monkeypatch.setattr(Engine, "_stalled", lambda _, error, ranks: given_up.append((str(error), list(ranks))))

    def program():
        if rr.rank() in late:
            wait_until(lambda: given_up or failed)
        try:
            return rr.allreduce(np.ones(2), name="w", op=rr.Sum)[0]
        except rr.StalledError as error:
            failed.append(error)
            raise

    settings = Settings(stall_check_s=0.1, stall_abort_s=0.3, elastic=True)
    assert run_ranks(3, program, settings=settings) == [3, 3, 3]
    why, ranks = given_up[0]
    assert ranks == expected
    assert re.match(rf"allreduce 'w' .*; missing: {ranks_text(late)}\. ", why)


def test_a_rank_that_takes_its_time_while_others_leave_is_not_reported(capsys):
    def program():
        if rr.rank() == 1:
            busy(0.7)

    run_ranks(2, program, settings=SOON)
    assert capsys.readouterr().err == ""


def test_a_rank_that_is_stopped_while_others_leave_keeps_none_of_them(capsys, mute):
    mute.add(2)
    left = threading.Barrier(3)

    def program():
        if rr.rank() < 2:
            rr.shutdown()
        left.wait(30)

    run_ranks(3, program, settings=Settings(stall_check_s=0.2, stall_abort_s=0.5), timeout_s=30)
    assert re.search(r"rank 0 has waited in shutdown\(\) for \d s for rank 2\nrank 2 does not", capsys.readouterr().err)


class Guarded(dict):
    """What the user's threads add to meanwhile: nobody may look through it without the lock."""

    def __init__(self, lock):
        super().__init__()
        self.lock = lock

    def values(self):
        assert self.lock.locked()
        return super().values()

    def items(self):
        assert self.lock.locked()
        return super().items()


@pytest.mark.parametrize("late", [0, 1], ids=["the coordinator", "another rank"])
def test_the_watch_looks_through_what_threads_add_to_with_the_lock_held(capsys, late):
    def program():
        engine, channel = runtime.current("a test").engine, rr.ordered()
        for each in engine.process_sets.all():
            each.running = Guarded(engine.negotiation._lock)
        engine.states[0].pending = Guarded(engine.negotiation._lock)
        if rr.rank() == late:
            busy(0.7)
        total = rr.allreduce(np.ones(2), name="late", op=rr.Sum)[0]
        if rr.rank() == late:
            busy(0.7)
        return total + channel.allreduce(np.ones(2), op=rr.Sum)[0]

    assert run_ranks(2, program, settings=SOON) == [4, 4]
    told = capsys.readouterr().err
    assert "stalled: allreduce 'late'" in told
    assert "stalled: allreduce 'ordered'" in told
    assert "failed" not in told
