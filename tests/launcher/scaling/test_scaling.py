"""`ringrun scaling`: what made-up runs say; small real jobs, of which nothing is asked that a busy machine changes."""

import json
import math
import os
import re
import signal
import subprocess
from types import SimpleNamespace

import pytest

from ringrun import cli
from ringrun.config import resolve as config
from ringrun.errors import UsageError
from ringrun.job.control_socket import COUNTS, TOTALS
from ringrun.machine.topology import Core, Gpu, Topology
from ringrun.scaling import command, measure
from ringrun.scaling.analyse import GLOBAL, OTHER, PER_RANK, UNKNOWN, analyse, figure, rows, table
from ringrun.scaling.measure import Bounds, Run, Seen, run_of
from ringrun.scaling.page import render
from tests.support.loops import in_a_loop
from tests.support.patience import patient, wait_until

FEWER = "fewer cores or less memory bandwidth per rank than with 1 rank"


def a_run(size, step_ms=100.0, examples=32.0, **more):
    return Run(size, 50, 1e3 / step_ms, examples, step_ms, **more)


def answer(*runs, rounds=1, cores=8):
    return analyse([{each.size: each for each in runs}] * rounds, cores)


def test_equal_batches_of_each_rank_are_compared_by_examples():
    found = answer(a_run(1), a_run(2, 125.0))
    assert table(found) == [
        "RANKS  STEPS/S  EXAMPLES/S  SPEED-UP  EFFICIENCY  LIMITED BY",
        "    1  10       320         1         100 %       computing",
        f"    2  8        512         1.6       80 %        {FEWER}: 25 of 125 ms",
    ]
    assert (found.held, found.best) == (PER_RANK, 2)
    assert found.sentence == (
        f"2 ranks pay off: 1.6 times as fast as 1 rank, 80 % efficiency; limited by {FEWER} (25 of a step's 125 ms)"
    )
    assert found.notes == ["held equal: the batch per rank, 32 examples; the global batch grows with the ranks"]


def test_a_global_batch_is_divided_and_so_should_be_the_time_of_a_step():
    found = answer(a_run(1), a_run(2, 55.0, 16.0), a_run(4, 30.0, 8.0))
    assert (found.held, found.best) == (GLOBAL, 4)
    assert [row["speed_up"] for row in rows(found)] == ["1", "1.82", "3.33"]
    assert [each.limit for each in found.sizes] == ["computing"] * 2 + [found.sizes[2].limit]
    assert found.sizes[2].limit_ms == pytest.approx(5.0)
    assert "held equal: the global batch, 32 examples; with 4 ranks each has 8" in found.notes


def test_what_is_held_equal_is_not_guessed():
    found = answer(a_run(1, examples=None), a_run(2, 110.0, None))
    assert (found.held, found.best) == (UNKNOWN, 0)
    assert [row["speed_up"] for row in rows(found)] == ["1", "0.909 or 1.82"]
    assert rows(found)[1]["efficiency"] == "–"
    assert "1.82 times as fast if each rank has its own batch" in found.sentence
    assert "call rr.mark_step(examples=…) in the script" in found.notes[0]
    for runs in ([a_run(2, examples=None)], [a_run(2, examples=None), a_run(4)]):
        unknown = answer(a_run(1), *runs)
        assert unknown.held == UNKNOWN
        assert unknown.notes[0].startswith("the number of examples in a step is unknown")
    other = answer(a_run(1), a_run(2, examples=25.0))
    assert other.held == OTHER
    assert "no batch was held equal; examples per rank and step: 32 with 1 rank, 25 with 2 ranks" in other.notes[0]
    assert answer(a_run(1), a_run(2), a_run(4, examples=8.0)).held == OTHER, "with 2 ranks one, with 4 the other"


@in_a_loop(
    ("more", "limit"),
    [
        ({"core_ms": 30.0, "exposed_ms": 20.0}, "waiting for a CPU core: 30 of 100 ms"),
        ({"loading_ms": 60.0}, "data loader: 60 of 100 ms"),
        ({"exposed_ms": 12.0}, "all-reduce: 12 of 100 ms"),
        ({"exposed_ms": 12.0, "hosts": 2}, "all-reduce between hosts: 12 of 100 ms"),
        ({"waiting_ms": 10.0, "late_ms": 20.0, "late": "rank 1 (its loader)"}, "rank 1 (its loader): 20 of 100 ms"),
        ({"waiting_ms": 20.0}, "waiting for other ranks: 20 of 100 ms"),
        ({"exposed_ms": 9.0}, "computing"),
    ],
)
def test_the_limit_is_what_takes_most_of_a_step(more, limit):
    assert answer(a_run(1), a_run(2, **more)).sizes[1].limited_by == limit


def test_one_rank_that_waits_for_a_core_is_not_one_of_too_many():
    found = answer(a_run(1, core_ms=40.0), a_run(2))
    assert found.sizes[0].limit == "waiting for a CPU core"
    assert "busy: even with 1 rank, 40 of a step's 100 ms are spent waiting for a core" in found.notes[1]


def test_ratios_are_those_of_one_round():
    """The machine is half as fast in the second round; ranges of figures are wide, that of the ratio is not."""
    found = analyse([{1: a_run(1, 100.0), 2: a_run(2, 125.0)}, {1: a_run(1, 200.0), 2: a_run(2, 250.0)}], 8)
    assert rows(found)[1] | {"limit": ""} == {
        "ranks": "2",
        "steps_s": "6 (4–8)",
        "examples_s": "384 (256–512)",
        "speed_up": "1.6",
        "efficiency": "80 %",
        "limit": "",
    }
    varied = analyse([{1: a_run(1), 2: a_run(2, 125.0)}, {1: a_run(1), 2: a_run(2, 100.0)}], 8)
    assert rows(varied)[1]["speed_up"] == "1.8 (1.6–2)"


def test_more_ranks_that_gain_nothing_in_some_round_do_not_pay():
    rounds = [{1: a_run(1), 2: a_run(2, 120.0), 4: a_run(4, each)} for each in (200.0, 235.0)]
    found = analyse(rounds, 8)
    assert found.best == 2
    assert re.fullmatch(
        r"2 ranks pay off: 1.67 times .*; 4 ranks are 1.85 \(1.7–2\) times as fast, limited by .*", found.sentence
    )
    alone = answer(a_run(1), a_run(2, 200.0, exposed_ms=100.0))
    assert alone.best == 1
    assert alone.sentence == (
        "more ranks do not pay off: 2 ranks are 1 times as fast as 1 rank, limited by all-reduce "
        "(100 of a step's 200 ms)"
    )


def test_a_number_of_ranks_without_figures_is_said_and_the_rest_compared():
    found = answer(a_run(1), Run(2, problem="failed: rank 1 exit code 1"), a_run(4))
    assert rows(found)[1]["limit"] == "see below"
    assert found.best == 4
    assert "2 ranks: failed: rank 1 exit code 1" in found.notes
    without_one = answer(Run(1, problem="failed: x"), a_run(2), a_run(4, 100.0))
    assert rows(without_one)[2]["efficiency"] == "100 %", "compared with the fewest that ran"
    assert "times as fast as 2 ranks" in without_one.sentence
    assert answer(a_run(1), Run(2, problem="failed: x")).sentence.startswith("only 1 rank could be measured")
    nothing = answer(Run(1, problem="no step was counted"), Run(2, problem="failed: x"))
    assert nothing.sentence == "nothing could be measured: no step was counted"
    assert nothing.measured == []
    assert analyse([{}], 8).sentence == "nothing was measured"


def test_a_run_that_fails_in_one_round_is_said_and_the_others_count():
    rounds = [{1: a_run(1), 2: a_run(2)}, {1: a_run(1), 2: Run(2, problem="failed: x")}]
    found = analyse(rounds, 8)
    assert "2 ranks, in 1 of 2 runs: failed: x" in found.notes
    assert rows(found)[1]["speed_up"] == "2"


@in_a_loop(
    ("run", "advice"),
    [
        (
            {"core_ms": 40.0},
            ["no more ranks than cores (1 here): with 2 ranks, waiting for a core takes 40 of a step's 100 ms"],
        ),
        (
            {"exposed_ms": 50.0},
            [
                "local steps (LocalSGD) with an all-reduce every 8 steps: with 2 ranks, this saves up to 43.8",
                "a batch twice as large per rank: with 2 ranks, the all-reduce would take 33 % of a step instead",
            ],
        ),
        (
            {"exposed_ms": 50.0, "hosts": 2},
            ["local steps", "compression=int4, an eighth of the bytes", "a batch twice"],
        ),
        ({"loading_ms": 40.0}, ["more workers for the data loader, or a faster disk: with 2 ranks, it takes 40 of"]),
        (
            {"advice": (("rank 1: give it less to do", 20.0), ("all ranks wait for a CPU core: …", 30.0))},
            ["rank 1: give it less to do: with 2 ranks, this saves about 20 of a step's 100 ms"],
        ),
        ({}, []),
    ],
)
def test_what_would_pay_more_stands_with_its_figure(run, advice):
    found = answer(a_run(1), a_run(2, 100.0, 15.0, **run), cores=1).advice
    assert [text[: len(begin)] for text, begin in zip(found, advice, strict=True)] == advice


def test_more_ranks_than_cores_that_pay_off_are_not_advised_against():
    pays, does_not = (answer(a_run(1), a_run(4, each, core_ms=40.0), cores=2) for each in (100.0, 400.0))
    assert (pays.best, does_not.best) == (4, 1)
    assert pays.advice == []
    assert does_not.advice == [
        "no more ranks than cores (2 here): with 4 ranks, waiting for a core takes 40 of a step's 400 ms"
    ]


def test_figures_have_three_digits_or_all_before_the_point():
    assert [figure(each) for each in (12846.2, 99.94, 1.837)] == ["12,846", "99.9", "1.84"]


def totals(step, **more):
    return {"step": step, "step_s": 0.1 * step, "examples": 32 * step, "core_wait_s": 0.01 * step, "lines": {}} | more


def a_report(*steps, **more):
    row = {"core_wait_ms": 10.0, "end": ""}
    parts = {"computing_ms": 40.0, "exposed_ms": 5.0, "waiting_ms": 5.0}
    return {
        "ranks": [
            row | {"rank": rank, "steps": each, "steps_s": 0.1 * each, "examples": 32 * each}
            for rank, each in enumerate(steps)
        ],
        "step": parts,
        "stragglers": [],
        "advice": [],
        "job": {"hosts": {"a": len(steps)}},
    } | more


def test_the_first_steps_are_taken_off_by_each_ranks_own_clock():
    slow_first = totals(10, step_s=30.0)
    now = {rank: totals(30, step_s=32.0) for rank in (0, 1)}
    report = a_report(30, 30)
    for row in report["ranks"]:
        row["steps_s"] = 32.0
    report["advice"] = [{"text": "rank 1: give it less to do", "saves_ms": 20.0}]
    run = run_of(2, report, Seen(({0: slow_first, 1: slow_first}, now)), (), None)
    assert (run.steps, run.steps_s, run.examples, run.problem) == (20, 10.0, 32.0, "")
    assert (run.step_ms, run.computing_ms) == (100.0, pytest.approx(80.0)), "parts are scaled to the mean step"
    assert run.advice == (("rank 1: give it less to do", pytest.approx(40.0)),), "and so is what would be saved"
    assert run.core_ms == pytest.approx(10.0)
    assert run.examples_s == pytest.approx(640.0)


NAMES = "step", "step_s", "core_wait_s"


@pytest.mark.parametrize(("counted", "expected"), [(25, (25, 12.5, 80.0)), (4, (30, 10.0, 100.0))])
def test_the_speed_is_that_of_the_steps_that_were_only_counted_if_there_are_enough(counted, expected):
    """Recording makes these 100 ms long, and others 80."""
    before, now = (40, 7.0, 1.0), (40 + counted, 7.0 + 0.08 * counted, 1.0 + 0.008 * counted)
    seen = Seen(({}, {0: totals(30)}), tuple({0: dict(zip(NAMES, each, strict=True))} for each in (before, now)))
    run = run_of(1, a_report(30), seen, (), None)
    assert (run.steps, run.steps_s, run.step_ms) == pytest.approx(expected)
    assert (run.computing_ms, run.examples) == (pytest.approx(0.8 * expected[2]), 32.0)
    assert run.core_ms == pytest.approx(expected[2] / 10)


def test_a_script_that_ends_by_itself_is_measured_as_a_whole():
    run = run_of(1, a_report(40), Seen(), ["done"], 0)
    assert (run.steps, run.ended, run.problem) == (40, True, "")
    late = run_of(1, a_report(40), Seen(({0: totals(38)}, {0: totals(38)})), ["done"], 0)
    assert late.steps == 40, "seen only when it was over"
    assert any("ended on its own" in note for note in answer(run, a_run(2)).notes)


def test_the_share_of_the_data_loader_is_that_of_the_samples_since_the_first_steps():
    before = {0: totals(10, lines={"train.py:3 (data loader)": 50, "train.py:5": 50})}
    now = {0: totals(30, lines={"train.py:3 (data loader)": 80, "train.py:5": 60})}
    assert run_of(1, a_report(30), Seen((before, now)), (), None).loading_ms == pytest.approx(75.0)


def test_a_script_that_ends_before_a_second_look_has_its_parts_all_the_same():
    """Of the first look, which came after the first steps, as between it and the end."""
    looks = {rank: totals(20 + rank, lines={"t.py:3 (data loader)": 50, "t.py:5": 50}) for rank in (0, 1)}
    run = run_of(2, a_report(40, 41), Seen((looks, looks)), (), 0)
    assert (run.steps, run.loading_ms, run.core_ms) == (20, pytest.approx(50.0), pytest.approx(10.0))


def test_a_wait_for_a_core_in_the_first_steps_is_in_no_other_one():
    before, now = totals(10, core_wait_s=50.0), totals(20, core_wait_s=50.1)
    run = run_of(1, a_report(40), Seen(({0: before}, {0: now})), (), None)
    assert run.core_ms == pytest.approx(10.0)


def test_who_is_late_is_named_and_no_link():
    late = [
        {"who": "link from a to b", "kind": "slow link", "text": "it carries half"},
        {"who": "rank 1", "kind": "core shared", "text": "another process runs on its core"}
        | {"delay_ms": 10.0, "caused_ms": 6.0},
    ]
    run = run_of(2, a_report(30, 30, stragglers=late), Seen(), (), None)
    assert (run.late, run.late_ms) == ("rank 1 (another process runs on its core)", 12.0), "scaled to the mean step"


def test_a_late_rank_is_the_limit_rather_than_fewer_cores_for_all():
    """Of two ranks one computes 60 ms longer: their means hide half of that."""
    late = {"waiting_ms": 30.0, "late": "rank 1 (another process runs on its core)", "late_ms": 60.0}
    assert answer(a_run(1), a_run(2, 160.0, **late)).sizes[1].limit == late["late"]


def test_more_ranks_than_cores_are_named():
    found = answer(a_run(1), a_run(2, core_ms=30.0), a_run(4, core_ms=50.0), cores=2)
    assert [each.limit for each in found.sizes] == ["computing", "waiting for a CPU core", "more ranks than cores"]


def test_a_machine_too_busy_to_compare_is_said_first():
    found = answer(a_run(1, 600.0, core_ms=540.0), a_run(2, 80.0, core_ms=50.0))
    assert found.best == 0
    assert answer(a_run(1, 600.0, None, core_ms=540.0), a_run(2, 80.0, None)).sentence == found.sentence
    assert answer(a_run(1, 600.0), a_run(2, 80.0)).best == 2, "not for want of a core"
    assert answer(a_run(1, core_ms=54.0), a_run(2)).best == 2, "busy, but not impossible"
    assert found.sentence == (
        "this machine is too busy to compare anything: even with 1 rank, 540 of a step's 600 ms are spent waiting for "
        "a core; measure again when it is idle"
    )
    assert not any("busy" in note for note in found.notes)


@in_a_loop(
    ("report", "said", "code", "problem"),
    [
        (a_report(3), ["x"], 0, "only 3 steps could be measured before the script ended; let it train longer"),
        (a_report(3), (), None, "only 3 steps could be measured in the time allowed; allow more with --wait"),
        (a_report(0, 0), (), None, "no step was counted before the time of --wait was up: a step ends when"),
        (a_report(30, 0, timeline={"step": 30}), (), None, "rank 1 counted no step, others did: every rank must"),
        (a_report(0, 30, 0), (), 0, "ranks 0,2 counted no step, others did: every rank must end its steps"),
        (a_report(0, timeline={"step": 0}), (), 0, "no step after the first one was counted before the script ended: "),
        ({}, ["ringrun: the 2 ranks are not connected: y"], 0, "rr.mark_step(); the 2 ranks are not connected"),
        (
            a_report(1, failures=[{"rank": 1, "text": "exit code 1: ValueError: 7"}]),
            [],
            1,
            "failed: rank 1 exit code 1: V",
        ),
        (
            a_report(
                0,
                failures=[{"rank": 0, "text": "exit code 2"}],
                job={
                    "hosts": {},
                    "card": ["-- rank 0", "its last lines on stderr:", "usage: x", "x: error: no data", "--"],
                },
            ),
            [],
            2,
            "failed: rank 0 exit code 2: x: error: no data",
        ),
        (
            a_report(
                0,
                failures=[{"rank": 7, "text": "exit code 3"}],
                job={"hosts": {}, "card": ["-- rank 7", "it wrote nothing to stderr", "--"]},
            ),
            ["[ 7] first", "2026-03-29 14:05:09.250 [ 7] no data: /x", "[17] other", "ringrun: last"],
            3,
            "failed: rank 7 exit code 3: no data: /x",
        ),
        ({}, ["ringrun: error: no mpirun"], 3, "failed: no mpirun"),
        ({}, ["boom"], 1, "failed: boom"),
        ({}, [], 9, "failed: exit code 9"),
    ],
)
def test_a_run_without_figures_says_why(report, said, code, problem):
    run = run_of(max(1, len(report.get("ranks", ()))), report, Seen(), said, code)
    assert problem in run.problem


def test_when_the_first_steps_are_over_and_when_it_is_enough():
    bounds = Bounds(10.0, 100)
    enough = totals(20, step_s=3.0)
    assert [bounds.are_first_over({0: enough, 1: totals(each, step_s=3.0)}) for each in (9, 10)] == [False, True]
    assert [bounds.are_first_over({0: totals(500, step_s=each)}) for each in (2.4, 2.5)] == [False, True], "short steps"
    assert [bounds.are_first_over({0: totals(each, step_s=6.0)}) for each in (1, 2)] == [False, True], "long steps"
    before = {0: totals(10)}
    assert not bounds.is_enough(before, {0: totals(109, step_s=10.0)})
    assert bounds.is_enough(before, {0: totals(110, step_s=10.0)}), "steps"
    assert bounds.is_enough(before, {0: totals(20, step_s=11.0)}), "seconds"
    assert not bounds.is_enough(before, {0: totals(12, step_s=40.0)}), "too few"
    assert bounds.is_enough(before, {0: totals(12, step_s=61.0)}), "for too long"
    half = bounds.half
    assert half.is_enough(before, {0: totals(20, step_s=6.0)}), "half the seconds"
    assert not half.is_enough(before, {0: totals(12, step_s=60.0)}), "but a long step has as much time"


@pytest.fixture
def simulated(monkeypatch, tmp_path):
    """Measure a job with one step in so many seconds, by a clock that only waiting moves; see the fields it returns."""
    now, asked = [0.0], []

    def wait(timeout_s):
        now[0] += timeout_s
        raise subprocess.TimeoutExpired("ringrun", timeout_s)

    def measured(step_s, bounds):
        def ask(job, question):
            asked.append(question)
            steps = int(now[0] / step_s + 1e-9)
            if question is TOTALS:
                row = a_report(steps)["ranks"][0] | {"steps_s": steps * step_s}
                (tmp_path / "report.json").write_text(json.dumps(a_report(steps, ranks=[row])))
            said = {"rank": 0, "step": steps, "step_s": steps * step_s}
            return json.dumps(said | {"counted": [steps, steps * step_s, 0.0]})

        monkeypatch.setattr(measure, "ask", ask)
        run = measure.measure(1, [], ["python", "train.py"], str(tmp_path), bounds)
        return SimpleNamespace(run=run, took_s=now[0], asked=asked)

    process = SimpleNamespace(pid=1, returncode=None, wait=wait, terminate=lambda: setattr(process, "wait", id))
    monkeypatch.setattr(measure, "start_with_parent", lambda *_, **_more: process)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(measure, "find_jobs", lambda: [SimpleNamespace(pid=1)])
    return measured


def test_a_run_is_looked_at_seldom_since_each_look_takes_time_from_its_ranks(simulated):
    found = simulated(0.1, Bounds(seconds=20.0))
    assert found.took_s == pytest.approx(25.0, abs=1.0)
    assert found.asked.count(TOTALS) <= 30  # five a second for the first 5 s, whose end nobody can foresee
    assert found.asked.count(COUNTS) <= 4
    assert (found.run.problem, found.run.step_ms) == ("", pytest.approx(100.0))


@pytest.mark.parametrize("step_s", [8.0, 15.0, 22.0])
def test_long_steps_are_measured_in_the_time_that_there_is(simulated, step_s):
    found = simulated(step_s, Bounds())
    assert (found.run.problem, found.run.step_ms) == ("", pytest.approx(1e3 * step_s))
    assert found.took_s <= 2 * step_s + 121.0


def test_steps_that_are_too_long_ask_for_more_seconds(simulated):
    problem = "only 3 steps could be measured in the time allowed; allow more with --seconds"
    assert simulated(35.0, Bounds()).run.problem == problem


def test_flags_of_ringrun_go_on_to_each_run_and_ours_do_not():
    words = [
        "-np",
        "1,2",
        "-H",
        "a:2",
        "--seconds=3",
        "--json",
        "f",
        "--no-bind",
        "--",
        "python",
        "x.py",
        "--steps",
        "3",
    ]
    assert command.passed_on(words, words[-4:]) == ["-H", "a:2", "--no-bind"]
    assert command.passed_on(["-n", *words[1:]], words[-4:]) == ["-H", "a:2", "--no-bind"]


def test_which_numbers_of_ranks():
    assert command.sizes("auto", "-np", 6) == [1, 2, 4, 6]
    assert command.sizes("auto", "-np", 1) == [1, 2]
    assert command.sizes("4, 1", "-np", 2) == [1, 4]


def planned(*arguments):
    return command.plan(config.resolve(command._parser(), [*arguments, "true"], {}), ())


SIXTEEN = Topology(tuple(Core((cpu,)) for cpu in range(16)))


@pytest.mark.parametrize(
    ("arguments", "topology", "cores"),
    [
        ([], SIXTEEN, 16),
        ([], SIXTEEN._replace(quota=3.5), 3),
        (["-H", "localhost:32"], SIXTEEN, 16),
        ([], SIXTEEN._replace(gpus=(Gpu("0"),)), math.inf),
        (["-H", "big:32"], SIXTEEN, math.inf),
        (["-H", "localhost:2,big:32"], SIXTEEN, math.inf),
    ],
)
def test_cores_are_too_few_only_where_all_ranks_compute_on_them(arguments, topology, cores, monkeypatch):
    monkeypatch.setattr(command, "read_topology", lambda _: topology)
    todo = planned("-np", "1,2", *arguments)
    assert todo.cores == cores
    found = answer(a_run(1), a_run(4, 400.0, core_ms=300.0), cores=todo.cores)
    assert (found.sizes[1].limit == "more ranks than cores") == (cores < 4)
    assert any(text.startswith("no more ranks than cores") for text in found.advice) == (cores < 4)


def test_hosts_without_slots_have_as_many_ranks_as_they_say(monkeypatch):
    has = {"h1": 3, "h2": 5}
    told = SimpleNamespace(automatic_size=lambda host: has[host.name], machines={})
    monkeypatch.setattr(cli, "check_job", lambda *_, **_more: told)
    assert planned("-H", "h1,h2").sizes == [1, 2, 4, 8]
    monkeypatch.setattr(cli, "check_job", lambda *_, **_more: pytest.fail("nobody needs to know"))
    assert planned("-H", "h1,h2", "-np", "2,9").sizes == [2, 9]


def test_every_other_round_goes_backwards():
    plan = command.Plan([1, 2], 3, Bounds(), (), (), "")
    assert list(plan.order()) == [(0, 1), (0, 2), (1, 2), (1, 1), (2, 1), (2, 2)]


@in_a_loop(
    ("arguments", "message"),
    [
        (["-np", "2", "python", "x"], "-np 2: expected several numbers of ranks to compare, as in -np 1,2,4"),
        (["-np", "1,x", "python", "x"], "-np: expected auto or a whole number from 1 to 999999, got 'x'"),
        (["-np", "1,2"], "no command to run"),
        (["--report", "r", "python", "x"], "--report: ringrun scaling does not support it; leave it out"),
        (["--restarts", "2", "python", "x"], "--restarts: ringrun scaling does not support it"),
        (["--min-np", "1", "python", "x"], "--min-np: ringrun scaling does not support it"),
        (["--max-np", "2", "python", "x"], "--max-np: ringrun scaling does not support it"),
        (["--host-discovery-script", "f", "python", "x"], "--host-discovery-script: ringrun scaling does not support"),
        (["--seconds", "0", "python", "x"], "--seconds: expected a number of seconds above 0"),
        (["--rounds", "0", "python", "x"], "--rounds: expected a whole number from 1"),
        (["--steps", "4", "python", "x"], "--steps: expected a whole number from 5"),
        (["--html", "/nowhere/x.html", "python", "x"], "--html /nowhere/x.html: "),
        (["--json", "/", "true"], "--json /: / cannot be made or written: Is a directory; give a file that this user"),
        (["--json", "x", "--html", "./x", "true"], "--json x and --html ./x are one file; give two"),
        (["nonesuch"], "command not found: 'nonesuch'"),
        (["--secnods", "3", "python", "x"], "there is no flag --secnods; did you mean --seconds?"),
    ],
)
def test_wrong_command_lines(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        command.run(arguments)


@in_a_loop("name", command._NOT_HERE)
def test_flags_that_make_no_sense_here_are_refused(name):
    flag = next(each for each in command._parser().flags if each.dest == name)
    value = [] if flag.nargs == 0 else ["1"]
    message = f"{flag.option_strings[0]}: ringrun scaling does not support it; leave it out"
    with pytest.raises(UsageError, match=re.escape(message)):
        command.run([flag.option_strings[0], *value, "true"])


@pytest.mark.parametrize("line", ["rounds: 5", "seconds: 1", "steps: 9", "wait: 60", "json: f", "html: f"])
def test_a_file_has_none_of_our_flags_since_each_ringrun_reads_it(line, tmp_path):
    (tmp_path / "f.yaml").write_text(f"# of a job\n{line}\n")
    name = line.partition(":")[0]
    message = f"f.yaml:2: --{name}: give it on the command line of ringrun scaling, not in the file"
    with pytest.raises(UsageError, match=re.escape(message)):
        command.run(["--config-file", f"{tmp_path}/f.yaml", "python", "x"])


def test_the_manual_has_our_flags_and_names_ringruns(capsys):
    with pytest.raises(SystemExit):
        command.run(["--no-bind", "--help"])
    manual = capsys.readouterr().out
    assert "-np N,N,…" in manual
    assert "--rounds N" in manual
    assert "see ringrun --help" in manual
    assert "--hostfile, " not in manual


def test_the_page_and_the_data_show_the_same():
    found = answer(a_run(1), a_run(2, 125.0, exposed_ms=30.0), Run(4, problem="failed: <b>"), rounds=2)
    document = command.as_json(found, found.notes, ["python", "train.py", "a b"])
    assert json.loads(json.dumps(document))["sizes"][1]["speed_up"] == {"middle": 1.6, "low": 1.6, "high": 1.6}
    assert document["sizes"][1]["runs"][0]["computing_ms"] == 95.0
    page = render(document)
    assert "python train.py &#x27;a b&#x27;" in page
    assert "failed: &lt;b&gt;" in page
    assert "<td class=number>1.6</td>" in page
    assert page.count("<circle") == 2
    assert page.count('<div class="scroll"') == 2, "on a narrow screen the table and the chart are moved, not squeezed"
    assert "http" not in page, "it asks the network for nothing"
    assert "<svg" not in render(command.as_json(answer(a_run(1)), (), ["x"])), "one number of ranks is no curve"


TRAIN = """
    import sys, time
    import numpy as np
    import ringreduce as rr

    rr.init()
    for step in range(int(sys.argv[1])):
        {more}
        rr.allreduce(np.ones(100, np.float32), name="gradient")
        rr.mark_step({examples})
"""


def scaling(ringrun, *arguments, **options):
    return ringrun("scaling", "-np", "1,2", "--rounds", 1, "--seconds", 0.2, *arguments, **options)


def test_a_script_is_measured_with_each_number_of_ranks(ringrun, script, tmp_path):
    command_line = script(TRAIN.format(more="time.sleep(0.005)", examples="examples=64 // rr.size()"))
    done = scaling(ringrun, "--json", "s.json", "--html", "s.html", *command_line, 1_000_000, returncode=0)
    document = json.loads((tmp_path / "s.json").read_text())
    assert document["held"] == "global batch"
    assert [each["size"] for each in document["sizes"]] == [1, 2]
    for each in document["sizes"]:
        (run,) = each["runs"]
        assert (run["examples"], run["ended"]) == (64 / each["size"], False)
        assert run["step_ms"] >= 5.0
        assert run["examples_s"] == pytest.approx(64e3 / run["step_ms"])
    assert done.stdout.startswith("RANKS  STEPS/S")
    assert document["sentence"] in done.stdout
    assert "held equal: the global batch, 64 examples; with 2 ranks each has 32" in done.stdout
    assert "run 2 of 2, 2 ranks: " in done.stderr
    assert "script.py 1000000</title>" in (tmp_path / "s.html").read_text()


def test_a_number_of_ranks_that_fails_and_files_that_are_written_are_said(ringrun, script):
    more = "time.sleep(0.01); open('model.pt', 'w').close(); 1 // (step < 5 or rr.size() == 1)"  # it is told to record
    command_line = script(TRAIN.format(more=more, examples=""))
    own = "--output-filename", "logs", "--timeline", "trace.json"
    done = scaling(ringrun, "--rounds", 2, "--seconds", 60, *own, *command_line, 400, returncode=0)
    assert re.search(r"^2 ranks: failed: rank [01] .*ZeroDivisionError", done.stdout, re.MULTILINE)
    assert "only 1 rank could be measured: there is nothing to compare" in done.stdout
    assert "files have changed here: model.pt; if the script wrote them" in done.stdout
    assert "the script ended on its own before --seconds were up" in done.stdout
    assert done.stderr.count("2 ranks: failed") == 1, "it is not tried again"


def test_files_that_ringrun_and_the_shell_write_are_none_of_the_script(tmp_path, monkeypatch):
    names = "model.pt", "out", "logs/rank.0/stdout", "trace.json", "logs.txt"
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    output = os.stat(tmp_path / "out")
    monkeypatch.setattr(command.os, "fstat", lambda stream: output if stream == 2 else os.stat("/"))
    monkeypatch.chdir(tmp_path)
    own = ["logs", "trace.json", None, ""]
    assert [name for name in names if not command._is_ours(name, own)] == ["model.pt", "logs.txt"]


def test_a_script_whose_steps_nobody_counts(ringrun, script):
    command_line = script("print('hello')")
    done = scaling(ringrun, *command_line, returncode=1)
    assert "no step was counted before the script ended: a step ends when" in done.stdout
    assert "RANKS" not in done.stdout


def test_too_few_steps(ringrun, script):
    command_line = script(TRAIN.format(more="time.sleep(1)", examples=""))
    done = scaling(ringrun, *command_line, 4, returncode=1)
    assert "only 3 steps could be measured before the script ended; let it train longer" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_prints_what_is_known_and_leaves_nothing(number, code, start, script, tmp_path, wait_until_gone):
    command_line = script(TRAIN.format(more="open(f'of{rr.size()}', 'w').close(); time.sleep(0.005)", examples=""))
    own = "--rounds", 1, "--seconds", 0.2, "--json", "s.json"
    running = start("scaling", "-np", "1,2", *own, *command_line, 1_000_000)
    wait_until((tmp_path / "of2").exists, 50)
    assert not (tmp_path / "s.json").exists(), "it would be empty"
    running.send_signal(number)
    stdout, stderr = running.communicate(timeout=patient(30))
    assert running.returncode == code
    assert len(json.loads((tmp_path / "s.json").read_text())["sizes"][0]["runs"]) == 1
    assert "interrupted; results so far:" in stderr
    assert "only 1 rank could be measured" in stdout
    wait_until_gone()


def test_one_rank_of_torch_that_knows_nothing_of_ringreduce(ringrun, script, tmp_path):
    """As a front end's is, which makes no group for one rank; its DataLoader's batches are counted."""
    command_line = script("""
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(30):
            for (inputs,) in DataLoader(TensorDataset(torch.ones(60, 4)), 20):
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
            with torch.no_grad():
                for (inputs,) in DataLoader(TensorDataset(torch.ones(60, 4)), 30):
                    model(inputs)
    """)
    ringrun("-np", 1, "--report", "run", *command_line, returncode=0, env={"OMP_NUM_THREADS": "1"})
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["step"]["count"] == 89, "all but the first"
    assert report["ranks"][0]["examples"] == 20 * 89, "of the test, which is over, none"
