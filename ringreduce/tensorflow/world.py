"""Numbers of ranks as operations: in a graph the values when it runs, which an elastic job changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce import runtime
from ringreduce.api import world
from ringreduce.api.process_sets import get_process_set_ids_and_ranks
from ringreduce.errors import InputError
from ringreduce.tensorflow.host import on_host, unconverted

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

NOT_INITIALIZED, NOT_KNOWN = -1, -2
"""What Horovod's process_set_included_op returns in place of 0 and 1."""


@unconverted
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks of a process set when the graph runs, an int32 scalar.

    process_set_id: of a set's `process_set_id`; 0: all ranks.
    name:           Horovod's, without effect, as of the others here.
    Raises:         InputError for a set that is not there; inside tf.function an error of TensorFlow's with that text.
    Source:         Horovod's size_op, as the others here.
    """
    return _number("size_op", lambda: len(_members("size_op", process_set_id)))


@unconverted
def rank_op(name: str | None = None) -> Any:
    """This rank's number when the graph runs, an int32 scalar."""
    return _number("rank_op", lambda: world.rank())


@unconverted
def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host when the graph runs, an int32 scalar."""
    return _number("local_size_op", lambda: world.local_size())


@unconverted
def local_rank_op(name: str | None = None) -> Any:
    """This rank's number on its host when the graph runs, an int32 scalar."""
    return _number("local_rank_op", lambda: world.local_rank())


@unconverted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this rank is in a process set when the graph runs: 1 or 0; -1 before init(), -2 without such a set."""
    return _number("process_set_included_op", lambda: _included(process_set_id))


def when_it_runs(of_ranks: Callable[[], int | None]) -> Any:
    """A number of ranks, or a rank's; in the graph of an elastic job, which may outlive ranks, that when it runs."""
    if tf.executing_eagerly() or not runtime.current("size").is_elastic:
        return of_ranks()
    return _number("size", lambda: of_ranks() or 0)


def _included(process_set_id: int) -> int:
    if not runtime.is_initialized():
        return NOT_INITIALIZED
    members = get_process_set_ids_and_ranks().get(process_set_id)
    return NOT_KNOWN if members is None else int(world.rank() in members)


def _members(function: str, process_set_id: int) -> list[int]:
    sets = get_process_set_ids_and_ranks()
    if process_set_id not in sets:
        raise InputError(f"{function}: process_set_id={process_set_id!r}; the process sets are {sorted(sets)}")
    return sets[process_set_id]


def _number(what: str, function: Callable[[], int]) -> Any:
    return on_host(what, lambda _: [np.int32(function())], [], [tf.TensorSpec([], tf.int32)])[0]
