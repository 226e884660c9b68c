"""What the families of functions share: checking arguments, and turning results into the caller's kind of array."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ringreduce import runtime
from ringreduce.arrays import trees
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.memory import Memory, in_common
from ringreduce.arrays.view import to_write, wrong_out
from ringreduce.collectives.ops import Average, ReduceOp, Sum
from ringreduce.errors import InputError, RingreduceError, described
from ringreduce.execution.signature import REFUSED, calling_line, named
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.protocol import GLOBAL

Array = TypeVar("Array")
Made = TypeVar("Made")
Failed = TypeVar("Failed", bound=Exception)


def like(original: Any, result: Buffer) -> Any:
    """The result as the caller's kind of array; a NumPy number where a number was passed."""
    return as_passed(original, result.array())


def as_passed(original: Any, array: Any) -> Any:
    """The array, or a NumPy number where a number was passed."""
    return array[()] if isinstance(original, bool | int | float | complex | np.generic) else array


only = operator.itemgetter(0)
_TREES = (list, tuple, Mapping)  # a union would be made at every call


def taken_apart(tree: Any) -> tuple[Sequence[Any], Sequence[str] | None, Callable[[Sequence[Any]], Any]]:
    """The arrays of a tree, their names, and what makes such a tree of as many results; of an array no names."""
    if type(tree) is np.ndarray or not isinstance(tree, _TREES):  # to ask a Mapping takes 0.2 us
        return [tree], None, only
    named = trees.named_leaves(tree)
    names = [name for name, _ in named]

    def whole(results: Sequence[Any]) -> Any:
        by_name = dict(zip(names, results, strict=True))
        return trees.map_leaves(tree, lambda name, _: by_name[name])

    return [leaf for _, leaf in named], names, whole


def listed(function: str, tensors: Any) -> list[Any]:
    """The tensors of a group, which may be of any iterable kind."""
    try:
        return list(tensors)
    except TypeError as exc:
        raise InputError(f"{function}: tensors={tensors!r}; expected a list of arrays") from exc


def refused(
    function: str,
    error: Failed,
    process_set: int | None,
    name: str | None = None,
    names: Sequence[str] | None = None,
    count: int = 1,
) -> Failed:
    """The error for a call with `count` arrays, which names the one that is meant; other ranks learn of it, too."""
    if isinstance(error, InputError) and error.at is not None:
        error = type(error)(f"{function}{named(name, names, error.at, count)}: {error}")
    if process_set is not None:
        submitting = runtime.current(function).engine.submitting
        submitting.refuse(function, name, process_set, _why(error), calling_line())
    return error


def outs_of(
    function: str, out: Any, inputs: Sequence[Buffer], otherwise: Callable[[Submission], list[Any]]
) -> tuple[list[Buffer], Callable[[Submission], list[Any]]]:
    """The buffer of an array for the result of one input, and what returns that array when it has it.

    None: no buffers, and `otherwise`.

    A shape of which the caller could not know that it is wrong, as others' rows make it, is an error of the latter.
    Raises: InputError where it is of another type or on another device, or has memory in common with the input.
    """
    if out is None:
        return [], otherwise
    (source,), ((target,), written) = inputs, to_write([out])
    if (target.element, target.device) != (source.element, source.device):
        own, expected = (f"{each.element.name} on {each.device}" for each in (target, source))
        raise InputError(f"{function}: out is {own}; expected {expected}, as the tensor")
    places = [
        Memory(each.device, each.start, each.nbytes, name) for each, name in ((source, "tensor"), (target, "out"))
    ]
    if why := in_common(places):
        raise InputError(f"{function}: {why}; pass another array as out")

    def finish(submission: Submission) -> list[Any]:
        (made,) = submission.outputs
        if made is not target:
            raise wrong_out(function, target, made)
        written()
        return [out]

    return [target], finish


def which_op(function: str, average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The op meant by `op`, or by Horovod's older `average`; Average by default."""
    if average is not None:
        if op is not None:
            raise InputError(f"{function}: both average={average} and op={op!r} were given; pass op only")
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        raise InputError(f"{function}: op={op!r}; expected Average, Sum, Adasum, Min, Max or Product of ringreduce")
    return op


def submit_and_wait(
    kind: str,
    name: str | None = None,
    process_set: int = GLOBAL,
    details: tuple[tuple[str, Any], ...] = (),
    *,
    inputs: Sequence[Buffer] = (),
    payload: Any = None,
    finish: Callable[[Submission], Any] = lambda submission: submission.payload,
) -> Any:
    """Submit an operation that all ranks of a set call with equal `details`, wait for it, and return its result."""
    handle = runtime.current(kind).engine.submit(
        kind,
        name,
        process_set,
        details=details,
        signed=(),
        inputs=inputs,
        payload=payload,
        finish=finish,
        waits=True,
    )
    return handle.wait()


def prepared(kind: str, name: str | None, process_set: int, prepare: Callable[[], Made]) -> Made:
    """What `prepare` makes for an operation that all ranks are about to submit.

    Where it raises, the operation fails on all other ranks, with the error's text: none of them waits for this rank.
    """
    try:
        return prepare()
    except Exception as error:
        if runtime.is_initialized():
            _fail_on_all(kind, name, process_set, error)
        raise


def _fail_on_all(kind: str, name: str | None, process_set: int, error: Exception) -> None:
    """Submit what no other rank can have submitted, and wait until all have seen it."""
    engine = runtime.current(kind).engine
    members = engine.process_sets.sets.get(process_set, ())
    if len(members) > 1 and engine.world.rank in members:
        why = _why(error)
        with contextlib.suppress(RingreduceError):
            engine.submit(kind, name, process_set, details=((REFUSED, why),), signed=(), waits=True).wait()


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, InputError) else described(error)


def whole_number(what: str, value: Any, least: int, otherwise: str = "") -> int:
    """`value` as Python's int, whatever kind of integer it is; raises InputError for another, or one below `least`.

    what, otherwise: how the error begins and ends.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{what}={value!r}; expected a whole number of {least} or more{otherwise}")
    return int(number)


def whole(value: Any) -> Any:
    """A rank as Python's int, so that all agree, whatever kind of integer they pass; else text, for the error."""
    if isinstance(value, int | np.integer):
        return int(value)
    return value if isinstance(value, str) else repr(value)
