"""`sweep`: teams of ranks try hyperparameters until enough trials have ended."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ringreduce import runtime
from ringreduce.api.control import join
from ringreduce.api.objects import allgather_object, broadcast_object
from ringreduce.api.ordered import ordered
from ringreduce.api.process_sets import set_of
from ringreduce.errors import CollectiveError, InputError, PeerLostError
from ringreduce.runtime.submit import whole_number
from ringreduce.settings.log import JOB
from ringreduce.sweeps.study import Direction, Finished, Storage, Study, TrialState
from ringreduce.sweeps.teams import HEAD, Team, answer, tried
from ringreduce.sweeps.trial import Pruned, Trial

MOST_SHOWN = 4


class Sweep(NamedTuple):
    """What a sweep has found; the same on all ranks."""

    best: Finished | None  # None: no trial was completed
    trials: list[Finished]


def sweep(
    objective: Callable[[Trial], float],
    trials: int,
    ranks: int = 1,
    *,
    direction: Direction = "minimize",
    storage: Storage = None,
    name: str = "sweep",
    **options: Any,
) -> Sweep:
    """Train many times with different hyperparameters, on teams of `ranks` ranks side by side; all ranks call it.

    objective: trains once, data-parallel on `trial.process_set`, and returns the value to optimize, alike on all ranks
               of the team. It raises `ringreduce.sweeps.Pruned` (or optuna.TrialPruned) to give up a bad trial. Where
               it raises anything else or returns NaN, on any of its ranks, the trial has failed, and the team goes on
               with the next.
    trials:    how many, with those that have failed or were pruned, and with those that `storage` has already; fewer
               where the sampler has no more to try, as GridSampler. Rank 0 prints a line to stderr after each.
    ranks:     of a team; the number of ranks must be a multiple.
    direction: "minimize" or "maximize".
    storage:   a file that keeps the study, so that the same call goes on where a job was ended, and repeats the trials
               that ran then: SQLite, or a journal if its name ends in .journal, which network file systems want; or a
               URL of Optuna's. Only rank 0 opens it. One job at a time can run a study: another on this host is
               refused meanwhile; one on another host takes the study, and this call raises InputError.
    name:      of the study in `storage`.
    options:   further ones of optuna.create_study: sampler, pruner.

    Cost:   a few messages for each call of the trial's methods.
    Raises: InputError (a ValueError) for wrong arguments; MissingExtraError without Optuna; what Optuna raises;
            PeerLostError when a rank is lost: start the job again with the same storage; or in an elastic job call it
            inside elastic.run. Trials that ran then are repeated.
    """
    world = runtime.current("sweep").world
    trials, ranks = whole_number("sweep: trials", trials, 0), whole_number("sweep: ranks", ranks, 0)
    if not 0 < ranks <= world.size or world.size % ranks:
        raise InputError(
            f"sweep: {world.size} ranks cannot be split into teams of ranks={ranks}; expected a divisor of {world.size}"
        )
    study = _begun(world.rank, trials, storage, name, direction, options)
    teams = [set_of(range(first, first + ranks)) for first in range(0, world.size, ranks)]
    channel = ordered(patient=True)
    if study is not None:
        for first in range(ranks, world.size, ranks):
            answer(channel, study, first)
    team = Team(teams[world.rank // ranks], channel, study)
    while (number := team.ask()) is not None:
        team.tell(number, *_outcome(objective, Trial(number, team)))
    channel.barrier()
    if study is not None:
        study.release()
    return broadcast_object(study and Sweep(study.best(), study.finished()), HEAD, "sweep")  # type: ignore[no-any-return]


def _begun(rank: int, *arguments: Any) -> Study | None:
    """The study, on rank 0; what it raises there is raised on all ranks."""
    study, error = tried(Study, *arguments) if rank == HEAD else (None, None)
    if (failure := broadcast_object(error, HEAD, "sweep")) is not None:
        raise failure
    return study


class _Outcome(NamedTuple):
    """What a trial has come to on one rank."""

    rank: int
    state: TrialState
    value: float | None = None
    error: str = ""
    is_consequence: bool = False  # of what happened on another rank


def _outcome(objective: Callable[[Trial], float], trial: Trial) -> tuple[TrialState, float | None, str]:
    """Train once; what came out, the same on all ranks of the team."""
    own = _tried(objective, trial)
    join(process_set=trial.process_set)  # the other ranks may be in an allreduce that this one will not call
    outcomes: list[_Outcome] = allgather_object(own, "sweep.outcome", trial.process_set)
    failed = [each for each in outcomes if each.state == "failed"]
    if not failed:
        if own.rank == outcomes[0].rank and len({each[1:3] for each in outcomes}) > 1:
            said = ", ".join(f"rank {each.rank} {each.state} {each.value}" for each in outcomes[:MOST_SHOWN])
            JOB.warning(
                f"sweep: trial {trial.number}: the team's ranks returned different values: {said}; the first one's "
                "counts: let all return the average, rr.allreduce(value, process_set=trial.process_set)"
            )
        return outcomes[0][1:4]
    first = min(failed, key=lambda each: each.is_consequence)
    if own.rank == outcomes[0].rank:
        JOB.warning(f"sweep: trial {trial.number} failed on rank {first.rank}, with {trial.params}:\n{first.error}")
    return "failed", None, f"rank {first.rank}: {first.error}"


def _tried(objective: Callable[[Trial], float], trial: Trial) -> _Outcome:
    rank = runtime.current("sweep").world.rank
    try:
        returned = objective(trial)
    except PeerLostError:
        raise
    except Exception as exc:
        optuna = sys.modules.get("optuna")
        if isinstance(exc, Pruned) or (optuna is not None and isinstance(exc, optuna.TrialPruned)):
            return _Outcome(rank, "pruned")
        return _Outcome(rank, "failed", None, traceback.format_exc(), isinstance(exc, CollectiveError))
    try:
        value = float(returned)
    except Exception:  # of torch a RuntimeError
        return _Outcome(rank, "failed", None, f"the objective returned {returned!r}; expected a number")
    if math.isnan(value):
        return _Outcome(rank, "failed", None, "the objective returned nan")
    return _Outcome(rank, "complete", value)
