"""Sweeps: teams, values alike on all ranks of a team, trials that fail or are pruned, what is wrong."""

import socket
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.sweeps import study
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.xdist_group("optuna")  # one worker imports SQLAlchemy


def seeded(objective, trials, ranks, **options):
    """What each rank runs; Optuna's draws are the same each time."""

    def program():
        sampler = optuna.samplers.RandomSampler(seed=3)
        return rr.sweep(objective, trials, ranks, sampler=sampler, **options)

    return program


@pytest.mark.parametrize(("size", "ranks"), [(4, 2), (3, 1), (4, 4), (1, 1)])
def test_every_rank_of_a_team_gets_the_same_and_all_get_the_best(size, ranks):
    seen = []

    def objective(trial):
        rate = trial.suggest_float("rate", 0.1, 10, log=True)
        kind = trial.suggest_categorical("kind", ["a", "b"])
        width = trial.suggest_int("width", 4, 64)
        team = trial.process_set
        seen.append((trial.number, tuple(team.ranks or range(team.size())), rr.rank(), rate, kind, width))
        total = rr.allreduce(np.float64(rate * (1 + team.rank())), name="value", op=rr.Sum, process_set=team)
        assert trial.params == {"rate": rate, "kind": kind, "width": width}
        return total / sum(range(1, ranks + 1))

    results = run_ranks(size, seeded(objective, 8, ranks))
    assert all(result == results[0] for result in results)
    trials = results[0].trials
    assert [each.number for each in trials] == list(range(8))
    for each in trials:
        assert each.value == pytest.approx(each.params["rate"], rel=1e-12)
        mine = [row for row in seen if row[0] == each.number]
        assert sorted(row[2] for row in mine) == sorted(mine[0][1])
        assert {row[3:] for row in mine} == {tuple(each.params.values())}
    assert results[0].best == min(trials, key=lambda each: each.value)
    assert len({row[1] for row in seen}) == size // ranks or size > 1


@pytest.mark.parametrize(("direction", "best"), [("minimize", 1.0), ("maximize", 3.0)])
def test_a_value_that_is_nan_fails_its_trial_alone(direction, best):
    objective = lambda trial: [1.0, float("nan"), 3.0][trial.number]  # noqa: E731
    found = run_ranks(2, seeded(objective, 3, 2, direction=direction))[1]
    assert found.best.value == best
    assert [(each.state, each.value) for each in found.trials] == [("complete", 1), ("failed", None), ("complete", 3)]
    assert found.trials[1].error == "rank 0: the objective returned nan"


@pytest.mark.parametrize("host", ["here", "another"])
def test_a_study_has_one_job_at_a_time(tmp_path, monkeypatch, host):
    monkeypatch.setattr(study, "ENDING_S", 0.2)
    storage, other = f"sqlite:///{tmp_path / 'study.db'}", subprocess.Popen(["sleep", "100"])
    first = study.Study(3, storage, "sweep", "minimize", {})
    number = first.ask()
    # as if that process had the study
    first._job = [socket.gethostname() if host == "here" else "another", other.pid, study._started(other.pid)]
    first._study.set_user_attr(study.JOB, first._job)
    try:
        if host == "here":
            with pytest.raises(rr.InputError, match=f"process {other.pid} of this host runs study 'sweep' of sqlite"):
                study.Study(3, storage, "sweep", "minimize", {})
            first.tell(number, "complete", 1.0, "")
        else:
            study.Study(3, storage, "sweep", "minimize", {})
            with pytest.raises(rr.InputError, match="another job has taken study 'sweep'"):
                first.tell(number, "complete", 1.0, "")
    finally:
        other.kill()
        other.wait()
    assert [each.number for each in study.Study(3, storage, "sweep", "minimize", {}).finished()] == [0] * (
        host == "here"
    )


@pytest.mark.parametrize("raises_on", [(0, 1), (1,), (0,)], ids=["all", "the second", "the first"])
def test_a_trial_that_raises_has_failed_and_its_team_goes_on(raises_on, caplog):
    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        team = trial.process_set
        if trial.number in (2, 5) and team.rank() in raises_on:
            raise ZeroDivisionError(f"in trial {trial.number}")
        for step in range(3):
            sent = np.full(5, x)
            rr.allreduce_(sent, name="gradient", process_set=team)
            trial.report(sent[0], step)
        return sent[0]

    for result in run_ranks(4, seeded(objective, 8, 2, direction="maximize")):
        assert [each.state for each in result.trials] == [
            "failed" if number in (2, 5) else "complete" for number in range(8)
        ]
        for number in (2, 5):
            failed = result.trials[number]
            assert f"ZeroDivisionError: in trial {number}" in failed.error, "not what followed on the other rank"
            assert failed.error.startswith(("rank 0:", "rank 2:") if 0 in raises_on else ("rank 1:", "rank 3:"))
            assert failed.value is None


def test_an_objective_that_returns_no_number_has_failed_and_that_is_told():
    for result in run_ranks(2, seeded(lambda trial: None, 1, 2, direction="maximize")):
        assert result.trials[0].error == "rank 0: the objective returned None; expected a number"


def test_a_trial_that_is_pruned_has_no_value_and_the_pruner_sees_what_was_reported():
    class Bad(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step == 1 and trial.intermediate_values[1] < 0.5

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        for step in range(4):
            trial.report(x, step)
            if trial.should_prune():
                raise rr.sweeps.Pruned if trial.number % 2 else optuna.TrialPruned
            assert step < 2 or x >= 0.5
        return x

    result = run_ranks(2, seeded(objective, 10, 2, direction="maximize", pruner=Bad()))[0]
    assert {each.state for each in result.trials} == {"complete", "pruned"}
    for each in result.trials:
        assert (each.state, each.value) == (
            ("pruned", None) if each.params["x"] < 0.5 else ("complete", each.params["x"])
        )


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize(
    ("sampler", "pruner", "trials"),
    [
        (lambda: optuna.samplers.GridSampler({"x": [0, 1, 2]}), None, 3),
        (lambda: optuna.samplers.GridSampler({"x": [0, 1, 2]}), optuna.pruners.HyperbandPruner(), 8),
        (optuna.samplers.BruteForceSampler, None, 8),
    ],
    ids=["grid", "grid and Hyperband", "brute force"],
)
def test_a_sampler_that_has_no_more_to_try_ends_the_sweep(sampler, pruner, trials):
    """It calls Study.stop, which Optuna allows in its own loop only."""
    objective = lambda trial: trial.suggest_int("x", 0, 2)  # noqa: E731
    program = lambda: rr.sweep(objective, trials, 2, sampler=sampler(), pruner=pruner)  # noqa: E731
    found = run_ranks(2, program)[1]
    assert sorted(each.value for each in found.trials) == [0, 1, 2]
    assert found.best.params == {"x": 0}


def test_what_optuna_refuses_is_raised_on_all_ranks_of_the_team_and_fails_the_trial():
    def objective(trial):
        with pytest.raises(ValueError, match="low"):
            trial.suggest_float("x", 1, 0)
        return trial.suggest_float("x", 0, 1)

    assert [each.state for each in run_ranks(2, seeded(objective, 2, 2))[1].trials] == ["complete"] * 2


class Unreadable(Exception):
    """Elsewhere it cannot be made again of its `args`."""

    def __init__(self, why, at):
        super().__init__(f"{why} at {at}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kept", [None, threading.Lock()], ids=["unreadable", "unpicklable"])
def test_an_error_of_a_sampler_is_told_with_its_text_whatever_it_is(kept, ranks):
    class Sampler(optuna.samplers.RandomSampler):
        def sample_independent(self, *args):
            error = Unreadable("no value", 3)
            error.kept = kept
            raise error

    both = threading.Barrier(2)  # each team of one rank has a trial

    def objective(trial):
        both.wait()
        return trial.suggest_float("x", 0, 1)

    found = run_ranks(2, lambda: rr.sweep(objective, 2, ranks, sampler=Sampler()))[1]
    assert all("Unreadable: no value at 3" in each.error for each in found.trials)
    assert [each.state for each in found.trials] == ["failed"] * 2


@pytest.mark.parametrize("ending", [pytest.param("db", marks=pytest.mark.extended), "journal"])
def test_a_study_goes_on_in_its_file(tmp_path, ending, capfd):
    storage = str(tmp_path / f"study.{ending}")
    first = run_ranks(2, seeded(lambda trial: trial.suggest_float("x", 0, 1), 3, 1, storage=storage))[1]
    second = run_ranks(2, seeded(lambda trial: 10 + trial.suggest_float("x", 0, 1), 5, 2, storage=storage))[0]
    assert second.trials[:3] == first.trials
    assert [each.value >= 10 for each in second.trials] == [False] * 3 + [True] * 2
    assert run_ranks(1, seeded(lambda trial: 1 / 0, 5, 1, storage=storage))[0] == second, "nothing is left to do"
    assert "sweep: 5 of 5 trials, best 0." in capfd.readouterr().err


def test_a_study_that_was_begun_in_the_other_direction_is_refused_on_all_ranks(tmp_path):
    """Optuna would go on towards the worst."""
    storage = str(tmp_path / "study.journal")
    run_ranks(1, seeded(lambda trial: 1.0, 1, 1, storage=storage))

    @each_rank_of(2)
    def refused():
        with pytest.raises(rr.InputError, match=r"direction='maximize', but study 'sweep' of .* begun with 'minimize'"):
            rr.sweep(lambda trial: 1.0, 2, 2, storage=storage, direction="maximize")

    refused()
    assert len(run_ranks(2, seeded(lambda trial: 1.0, 2, 2, storage=storage))[0].trials) == 2


@pytest.mark.extended
def test_trials_that_ran_when_their_job_ended_are_repeated_once_with_the_same_values(tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    study = optuna.create_study(storage=storage, study_name="sweep")
    running = [study.ask() for _ in range(2)]
    values = {trial.suggest_float("x", 0, 1) for trial in running}
    for _ in range(2):
        result = run_ranks(2, seeded(lambda trial: trial.suggest_float("x", 0, 1), 4, 1, storage=storage))[0]
        assert len(result.trials) == 4
        assert values <= {each.value for each in result.trials}
        assert [each.state for each in result.trials] == ["complete"] * 4


@pytest.mark.parametrize("repeated", [False, True], ids=["the job ended in a trial", "and the next one at once"])
def test_a_trial_that_was_interrupted_waits_once_to_be_repeated(tmp_path, repeated):
    storage = str(tmp_path / "study.journal")
    before = optuna.create_study(storage=study._storage(storage), study_name="sweep")
    interrupted = [before.ask() for _ in range(2)]
    drawn = [trial.suggest_float("x", 0, 1) for trial in interrupted]
    if repeated:  # the job ended after it had queued the first, and before it had told that the first ended
        before.enqueue_trial(interrupted[0].params, user_attrs={study.REPEATS: 0})
    for _ in range(2):
        found = study.Study(4, storage, "sweep", "minimize", {})
    waiting = [each for each in before.get_trials() if each.state.name == "WAITING"]
    assert sorted(each.user_attrs[study.REPEATS] for each in waiting) == [0, 1]
    numbers = [found.ask() for _ in range(2)]
    assert sorted(found.call(number, "suggest_float", "x", 0, 1) for number in numbers) == sorted(drawn)


@pytest.mark.parametrize("drawn", [0, 1], ids=["before its first value", "between two values"])
def test_a_trial_of_a_grid_that_was_interrupted_gets_all_its_values_again(tmp_path, drawn):
    storage, grid = str(tmp_path / "study.journal"), {"x": [0, 1, 2], "y": [5]}
    sampler = lambda: optuna.samplers.GridSampler(grid)  # noqa: E731
    before = optuna.create_study(storage=study._storage(storage), study_name="sweep", sampler=sampler())
    for trial in [before.ask(), before.ask()]:
        for name in ("x",)[:drawn]:
            trial.suggest_int(name, 0, 2)
    objective = lambda trial: trial.suggest_int("x", 0, 2) + trial.suggest_int("y", 0, 9)  # noqa: E731
    found = run_ranks(1, lambda: rr.sweep(objective, 9, sampler=sampler(), storage=storage))[0]
    assert sorted((each.value, each.state) for each in found.trials) == [(value, "complete") for value in (5, 6, 7)]


def test_a_files_name_says_how_a_study_is_stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    urls = ("sqlite:////tmp/a.db", "mysql://user@host/sweeps", "sqlite:///a.journal")
    assert [study._storage(url) for url in (None, *urls)] == [None, *urls]
    assert study._storage("study.db") == study._storage(Path("study.db")) == "sqlite:///study.db"
    assert study._storage("journal") == "sqlite:///journal"
    journal = optuna.create_study(storage=study._storage(Path("study.journal")), study_name="sweep")
    assert not (tmp_path / "study.journal").read_bytes().startswith(b"SQLite format")
    assert isinstance(journal._storage, optuna.storages.JournalStorage)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 2}, "3 ranks cannot be split into teams of ranks=2; expected a divisor of 3"),
        ({"ranks": 0}, "teams of ranks=0"),
        ({"ranks": "1"}, "sweep: ranks='1'; expected a whole number of 0 or more"),
        ({"trials": 2.5}, "sweep: trials=2.5; expected a whole number of 0 or more"),
        ({"direction": "up"}, "direction='up'; expected minimize or maximize"),
    ],
)
@each_rank_of(3)
def test_a_wrong_argument_is_said_on_all_ranks(arguments, message):
    with pytest.raises(rr.InputError, match=message):
        rr.sweep(lambda trial: 0, **{"trials": 1, **arguments})


def test_ranks_of_a_team_that_return_different_values_are_told(heard):
    found = run_ranks(2, seeded(lambda trial: 1.0 + rr.rank() * (trial.number == 1), 3, 2))[0]
    assert [each.value for each in found.trials] == [1, 1, 1]
    [said] = [each.getMessage() for each in heard.records if "different values" in each.getMessage()]
    assert "trial 1: the team's ranks returned different values: rank 0 complete 1.0, rank 1 complete 2.0; the" in said
