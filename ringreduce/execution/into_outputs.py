"""Operations whose results go into arrays that the caller passes, as torch.distributed's do.

Where a submission has arrays for each rank, those of rank r are r * k to (r + 1) * k - 1, of k together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from ringreduce.collectives import pairwise
from ringreduce.collectives.ops import Reduction
from ringreduce.errors import MismatchError
from ringreduce.execution import halves
from ringreduce.execution.allreduce import allreduce
from ringreduce.execution.context import Context, Operation
from ringreduce.execution.halves import Arrays
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps


def all_gather(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Copy the k inputs of every rank into the outputs of all."""

    def move(sources: Arrays, targets: Arrays) -> Steps[None]:
        yield from halves.allgather(sources, _by_rank(targets, context.transport.size), context)

    for submission in submissions:
        yield from halves.on_host([submission], "ALL_GATHER", move, context)


def reduce_scatter(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Reduce the inputs for each rank, of all ranks, into the k outputs of that rank; parts may differ by rank."""

    def move(sources: Arrays, targets: Arrays, of: list[Reduction]) -> Steps[None]:
        yield from halves.reduce_scatter(_by_rank(sources, context.transport.size), targets, of, context)

    for submission in submissions:
        reductions = [submission.reduction(each.element) for each in submission.outputs]
        yield from halves.on_host([submission], "REDUCE_SCATTER", partial(move, of=reductions), context)


def exchange(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Send input r to rank r, and receive its input into output r.  payload: True where sizes may not match."""
    size = context.transport.size

    def move(sources: Arrays, targets: Arrays) -> Steps[None]:
        yield from pairwise.alltoall(sources, targets, context.transport)

    for submission in submissions:
        if submission.payload:
            counts = np.array([each.count for each in (*submission.inputs, *submission.outputs)], np.int64)
            gathered = yield from halves.integers_of_all(counts, context)
            sent, expected = gathered[:, :size], gathered[:, size:].T
            if (sent != expected).any():
                source, to = np.argwhere(sent != expected)[0].tolist()
                submission.fail(
                    MismatchError(
                        f"rank {context.members[context.transport.rank]}, {submission.signature.text} "
                        f"({submission.line}): rank {context.members[source]} sends "
                        f"{sent[source, to]} elements to rank {context.members[to]}, which expects "
                        f"{expected[source, to]}; splits must match"
                    )
                )
                continue
        yield from halves.on_host([submission], submission.signature.kind.upper(), move, context)


def _by_rank(arrays: Arrays, size: int) -> list[Arrays]:
    count = len(arrays) // size
    return [arrays[rank * count : (rank + 1) * count] for rank in range(size)]


INTO_OUTPUTS: Mapping[str, Operation] = {
    "reduce": allreduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    **dict.fromkeys(("all_to_all", "gather", "scatter"), exchange),
}
