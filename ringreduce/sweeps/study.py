"""Optuna's study, on rank 0: one at a time, the teams ask for trials, for values, and tell what came out."""

from __future__ import annotations

import operator
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from ringreduce.errors import InputError, MissingExtraError

TrialState: TypeAlias = Literal["complete", "pruned", "failed"]
Direction: TypeAlias = Literal["minimize", "maximize"]
Storage: TypeAlias = str | os.PathLike[str] | None
REPEATS = "repeats"  # the attribute of a trial with the values of one that ended with its job: that one's number
JOB = "job"  # the attribute of a study in use: host, pid and start of the process that has it
ENDING_S, POLL_S = 5.0, 0.1


class Finished(NamedTuple):
    """A trial that has ended."""

    number: int  # from 0
    state: TrialState
    value: float | None  # None unless complete
    params: dict[str, Any]
    error: str  # of one that has failed: the rank and its traceback


class Study:
    """The study of one sweep; used by several threads."""

    def __init__(self, trials: int, storage: Storage, name: str, direction: Direction, options: dict[str, Any]) -> None:
        """options: further arguments of optuna.create_study, such as sampler and pruner."""
        try:
            import optuna
        except ImportError as exc:
            raise MissingExtraError.of("sweep needs Optuna", "optuna", exc) from exc
        if direction not in get_args(Direction):
            raise InputError(f"sweep: direction={direction!r}; expected minimize or maximize")
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # there is a line of our own
        states = optuna.trial.TrialState
        self._running_state, self._waiting_state = states.RUNNING, states.WAITING
        self._ended_states: dict[TrialState, Any] = {
            "complete": states.COMPLETE,
            "pruned": states.PRUNED,
            "failed": states.FAIL,
        }
        self._study = optuna.create_study(
            storage=_storage(storage), study_name=name, direction=direction, load_if_exists=True, **options
        )
        if (begun := self._study.direction.name.lower()) != direction:  # Optuna keeps that of a study that exists
            raise InputError(
                f"sweep: direction={direction!r}, but study {name!r} of {storage} was begun with {begun!r}; pass "
                f"direction={begun!r}, or another name= or storage="
            )
        self._study.stop = self._stop  # type: ignore[method-assign] # Optuna's, for its own loop, would raise
        self._lock = threading.RLock()
        self._trials = self._begun = 0
        self._running: dict[int, Any] = {}  # by number
        self._sign = -1 if direction == "maximize" else 1
        self._job = [socket.gethostname(), os.getpid(), _started(os.getpid())]
        self._take(storage)
        self._repeat_interrupted()
        self._trials, self._begun = trials, len(self.finished())  # and those that run

    def _take(self, storage: Storage) -> None:
        """Say that this job has the study: its trials that run are not those of a job that ended."""
        host, pid, started = job = self._study.user_attrs.get(JOB) or ["", 0, ""]
        until_s = time.monotonic() + ENDING_S  # a rank that was lost may still be ending
        while job != self._job and host == self._job[0] and _started(pid) == started:
            if time.monotonic() > until_s:
                raise InputError(
                    f"sweep: process {pid} of this host runs study {self._study.study_name!r} of {storage}; one job at "
                    "a time can run a study: wait for it, or pass another name= or storage="
                )
            time.sleep(POLL_S)
        self._study.set_user_attr(JOB, self._job)

    def release(self) -> None:
        """Let another job have the study."""
        if self._study.user_attrs.get(JOB) == self._job:
            self._study.set_user_attr(JOB, None)

    def _check_job(self) -> None:
        """Raise InputError where a job of another host, which could not know that this one runs, has the study."""
        if (job := self._study.user_attrs.get(JOB)) != self._job:
            raise InputError(
                f"sweep: another job has taken study {self._study.study_name!r} ({JOB}: {job}), and repeats the trials "
                "that ran; one job at a time can run a study: pass another name= or storage="
            )

    def _repeat_interrupted(self) -> None:
        """Trials that ran when an earlier job ended are tried again, with the same values; others from their sampler.

        Source: Optuna's RetryHeartbeatStaleTrialCallback, which keeps what samplers have noted, such as a grid's point.
        """
        import optuna

        repeated = self._repeated()
        for trial in self._study.get_trials(deepcopy=False, states=(self._running_state,)):
            if trial.number not in repeated:
                params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
                noted, user_attrs = {**trial.system_attrs, "fixed_params": params}, {REPEATS: trial.number}
                again = optuna.trial.create_trial(state=self._waiting_state, system_attrs=noted, user_attrs=user_attrs)
                self._study.add_trial(again)
            self._study.tell(trial.number, state=self._ended_states["failed"])

    def _repeated(self) -> set[Any]:
        """The numbers of those, and None."""
        return {each.user_attrs.get(REPEATS) for each in self._study.get_trials(deepcopy=False)}

    def ask(self) -> int | None:
        """The number of a new trial; None when all have begun."""
        with self._lock:
            if self._begun >= self._trials:
                return None
            self._check_job()
            self._begun += 1
            trial = self._study.ask()
            self._running[trial.number] = trial
            return trial.number

    def _stop(self) -> None:
        """Begin no more trials but those that wait: the sampler, such as GridSampler, has tried all that it can."""
        waiting = self._study.get_trials(deepcopy=False, states=(self._waiting_state,))
        self._trials = min(self._trials, self._begun + len(waiting))

    def call(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a running trial."""
        with self._lock:
            return getattr(self._running[number], method)(*args, **kwargs)

    def tell(self, number: int, state: TrialState, value: float | None, error: str) -> None:
        """A trial has ended; prints how far the sweep is."""
        with self._lock:
            self._check_job()
            trial = self._running.pop(number)
            if error:
                trial.set_user_attr("error", error)
            self._study.tell(trial, value, self._ended_states[state])
            print(self.progress(), file=sys.stderr, flush=True)

    def finished(self) -> list[Finished]:
        """The trials that have ended, in the order in which they began."""
        names = {state: name for name, state in self._ended_states.items()}
        with self._lock:
            ended = self._study.get_trials(deepcopy=False, states=tuple(names))
        repeated = self._repeated()
        found = []
        for each in ended:
            if each.number not in repeated:
                state, error = names[each.state], each.user_attrs.get("error", "")
                value = each.value if state == "complete" else None
                found.append(Finished(each.number, state, value, dict(each.params), error))
        return found

    def best(self) -> Finished | None:
        """The complete trial with the best value."""
        valued = [(each.value * self._sign, each) for each in self.finished() if each.value is not None]
        return min(valued, key=operator.itemgetter(0), default=(0.0, None))[1]

    def progress(self) -> str:
        """One line: how many trials have ended, and the best of them."""
        ended = self.finished()
        parts = [f"sweep: {len(ended)} of {self._trials} trials"]
        for state in ("failed", "pruned"):
            if count := sum(each.state == state for each in ended):
                parts.append(f"{count} {state}")
        if self._running:
            parts.append(f"{len(self._running)} running")
        if (best := self.best()) is not None:
            params = ", ".join(f"{name}={_short(value)}" for name, value in best.params.items())
            parts.append(f"best {_short(best.value)}: trial {best.number} ({params})")
        return ", ".join(parts)


def _started(pid: int) -> str:
    """When a process of this host began, by the kernel's clock; empty: it has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "XZ" and int(others[16]) <= 1 else others[18]  # of a zombie that is only its main thread


def _storage(storage: Storage) -> Any:
    """What Optuna takes: a URL; a journal where the file's name ends so, else SQLite."""
    if storage is None:
        return None
    storage = os.fspath(storage)
    if "://" in storage:
        return storage
    if not storage.endswith(".journal"):
        return f"sqlite:///{storage}"
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(storage))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
