"""Teams of ranks. A team's first rank asks rank 0, where one thread for each team answers."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from ringreduce import runtime
from ringreduce.api.objects import broadcast_object, pickled, unpickled
from ringreduce.api.ordered import Ordered
from ringreduce.api.process_sets import ProcessSet
from ringreduce.errors import CollectiveError, InputError, RingreduceError, described
from ringreduce.sweeps.study import Study

HEAD = 0  # the rank with the study


class Team:
    """This rank's team; `process_set` has its ranks.

    study: on rank 0.
    """

    def __init__(self, process_set: ProcessSet, channel: Ordered, study: Study | None) -> None:
        self.process_set, self._channel, self._study = process_set, channel, study
        self._rank = runtime.current("sweep").world.rank
        self._first, *self._others = process_set.ranks or []

    def ask(self) -> int | None:
        """The number of the team's next trial, on all its ranks, which must have ended the last."""
        if self._rank != self._first:
            return self._channel.recv_object(self._first)  # type: ignore[no-any-return]
        number: int | None = self._asked("ask")
        for each in self._others:
            self._channel.send_object(number, each)
        return number

    def call(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of Optuna's trial; all ranks of the team get its result, or what it raised."""
        result = self._tried("call", number, method, *args, **kwargs) if self._rank == self._first else None
        found, error = broadcast_object(result, self._first, f"sweep.{method}", self.process_set)
        if error is not None:
            raise error
        return found

    def tell(self, number: int, *outcome: Any) -> None:
        """Tell the study what came out."""
        if self._rank == self._first:
            self._asked("tell", number, *outcome)

    def _asked(self, method: str, *args: Any, **kwargs: Any) -> Any:
        found, error = self._tried(method, *args, **kwargs)
        if error is not None:
            raise error
        return found

    def _tried(self, method: str, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
        if self._study is not None:
            return tried(getattr(self._study, method), *args, **kwargs)
        self._channel.send_object((method, args, kwargs), HEAD)
        return self._channel.recv_object(HEAD)  # type: ignore[no-any-return]


def tried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    """What it returned, or what it raised, as other ranks can get it."""
    try:
        return function(*args, **kwargs), None
    except Exception as exc:  # raised on the rank that asked
        return None, _sendable(exc)


def _sendable(error: Exception) -> Exception:
    """The error; one of ours with its text, where it cannot be pickled, or be made again of what was."""
    try:
        unpickled(pickled(error), "it")
    except Exception:
        plain = RingreduceError(described(error))
        plain.__cause__ = error
        return plain
    return error


def answer(channel: Ordered, study: Study, first: int) -> None:
    """Answer a team's first rank, in a thread, until no trial is left for it."""

    def run() -> None:
        asks = True
        # when a rank is lost, as is raised where sweep() was called, too; by then there may be another world
        with contextlib.suppress(CollectiveError, InputError):
            while asks:
                method, args, kwargs = channel.recv_object(first)
                reply = tried(getattr(study, method), *args, **kwargs)
                channel.send_object(reply, first)
                asks = method != "ask" or reply != (None, None)

    context = contextvars.copy_context()  # it holds the rank, in ringreduce.testing
    threading.Thread(target=context.run, args=(run,), name=f"sweep-{first}", daemon=True).start()
