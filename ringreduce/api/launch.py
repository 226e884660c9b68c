"""run(): a function on ranks of a job of its own; the launcher's run_function.py does it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringreduce.errors import InputError
from ringrun import run_function

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    executable: str | None = None,
    **flags: object,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on each of `np` ranks of a new job; returns the results, by rank.

    np:         how many ranks; by default as many as ringrun starts: one per GPU, physical core, or slot of `hosts`.
    env:        variables for the ranks, besides this process's own.
    executable: the ranks' Python, by default this one.
    flags:      ringrun's, as in hosts="h1:4,h2:4", hostfile=…, timeout=60, restarts=1, ranks="0", log_level="debug",
                verbose=True; Horovod's use_gloo, use_mpi and disable_cache have no effect here. With elastic=True, or
                Horovod's min_num_proc, the results are those of the ranks that are left in the end.

    What `func` refers to by name is imported on the ranks, from the folders where this process finds it; what stands in
    a script or a notebook itself travels with it. Ctrl-C, and a notebook's stop button, end all ranks.

    Raises: JobFailedError when a rank fails: its text is ringrun's report; InputError, StartupError when no rank can
            start; KeyboardInterrupt once all ranks have ended.
    Source: horovod.run.

    >>> losses = run(train, args=(0.1,), np=4)                                                         # doctest: +SKIP
    """
    if isinstance(args, str) or not isinstance(args, Iterable):
        raise InputError(f"run(): args={args!r}: expected a tuple of the function's arguments, such as ({args!r},)")
    if not isinstance(kwargs, Mapping | None):
        raise InputError(f"run(): kwargs={kwargs!r}: expected a dict of the function's arguments by name")
    call = func, tuple(args), dict(kwargs or {})
    results: list[Any] = run_function.on_ranks(call, {"np": np, **flags}, env or {}, executable or sys.executable)
    return results
