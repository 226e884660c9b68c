"""What the last training step took, and where a step ends for a script without an optimizer of ours."""

from __future__ import annotations

from typing import Any

from ringreduce import runtime
from ringreduce.execution.steps import MARKED, SECONDS
from ringreduce.runtime.submit import whole_number


def mark_step(examples: int | None = None) -> None:
    """A training step ends here, on all ranks alike.

    An optimizer of ringreduce, or any of torch with the backend "ring", ends steps by itself; from the first call on
    only this function does. The report of a stall says how many there were; there is no other effect unless steps are
    recorded: see `stats`.

    examples: how many this rank has trained on in this step; without it they are counted where a data loader of torch,
              Keras's fit() or a tf.data.Dataset gives them.

    Raises: InputError (a ValueError) where examples is no whole number of 0 or more.
    """
    if examples is not None:
        examples = whole_number("mark_step: examples", examples, 0, ", or None")
    runtime.current("mark_step").engine.recorder.stepped(MARKED, examples)


def stats() -> dict[str, Any]:
    """This rank's last training step, for TensorBoard and the like; empty before the first one that was recorded.

    step            its number, from 0
    step_s          seconds from the end of the step before
    computing_s     of these, without waiting for an operation
    blocked_s       waiting for operations
    moving_s        with an operation under way that all ranks had submitted
    hidden_s        of moving_s, while this rank computed
    operations      how many ended; bytes: of their arrays
    examples_per_s  of this rank, where `mark_step` was told, or a data loader's batches are counted; else None
    no_overlap      why gradients are not reduced during backward; empty: they are, where that is faster

    Steps are recorded from init() on with RINGREDUCE_REPORT=1, as under `ringrun --report`; else from the first call of
    this function.  Cost: some microseconds an operation while they are.
    Raises: NotInitializedError.
    """
    engine = runtime.current("stats").engine
    engine.record()
    if not engine.recorder.steps:
        return {}
    last = engine.recorder.steps[-1]
    return {
        "step": last.number,
        **{name: getattr(last, name) for name in SECONDS},
        "computing_s": last.step_s - last.blocked_s,
        "operations": last.count,
        "bytes": last.nbytes,
        "examples_per_s": None if last.examples is None else last.examples / last.step_s,
        "no_overlap": engine.host.no_overlap,
    }
