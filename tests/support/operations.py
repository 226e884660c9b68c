"""The collectives as a table, which each framework's tests run through their own functions: results and gradients."""

import collections

import numpy as np

Operation = collections.namedtuple(
    "Operation", "call model factor rows", defaults=[lambda size: 1, lambda rank, size: 4]
)
"""call(hvd, x): what a rank calls, with the framework's module and its rows;  model(everyones, rank): what that gives;
factor(size): by which its gradient, as Horovod's, is more than that of the sum of all ranks' results;
rows(rank, size): how many it has.
"""


def splits(rank, size):
    """How many rows a rank sends to each."""
    return [(1 + rank + 2 * to) % 3 for to in range(size)]


def parts_for(rank, everyones, counts):
    """Of everyone's rows, of which counts(source) go to each rank, those for this one."""
    each = [np.split(rows, np.cumsum(counts(source)))[rank] for source, rows in enumerate(everyones)]
    return np.concatenate(each)


def scattered(total, xs, rank):
    return np.array_split(total, len(xs))[rank]


SCALES = {"prescale_factor": 1.5, "postscale_factor": 0.25}
SHARED, SCATTERED = {"factor": lambda size: 1 / size}, {"factor": float, "rows": lambda rank, size: 2 * size + 1}
OPERATIONS = {
    "allreduce": Operation(lambda hvd, x: hvd.allreduce(x), lambda xs, _: np.mean(xs, 0)),
    "allreduce by average": Operation(lambda hvd, x: hvd.allreduce(x, average=False), lambda xs, _: np.sum(xs, 0)),
    "scaled allreduce": Operation(
        lambda hvd, x: hvd.allreduce(x, op=hvd.Sum, name="s", **SCALES), lambda xs, _: np.sum(xs, 0) * 0.375
    ),
    "allgather": Operation(lambda hvd, x: hvd.allgather(x), lambda xs, _: np.concatenate(xs), **SHARED),
    "broadcast": Operation(lambda hvd, x: hvd.broadcast(x, hvd.size() - 1), lambda xs, _: xs[-1], **SHARED),
    "alltoall": Operation(
        lambda hvd, x: hvd.alltoall(x),
        lambda xs, rank: parts_for(rank, xs, lambda source: [len(xs[source]) // len(xs)] * len(xs)),
        rows=lambda rank, size: 2 * size,
    ),
    "reducescatter": Operation(
        lambda hvd, x: hvd.reducescatter(x), lambda xs, rank: scattered(np.mean(xs, 0), xs, rank), **SCATTERED
    ),
    "scaled reducescatter": Operation(
        lambda hvd, x: hvd.reducescatter(x, op=hvd.Sum, **SCALES),
        lambda xs, rank: scattered(np.sum(xs, 0) * 0.375, xs, rank),
        **SCATTERED,
    ),
}
UNEVEN = {
    "allgather of other rows": OPERATIONS["allgather"]._replace(rows=lambda rank, size: rank),
    "alltoall of other rows": OPERATIONS["alltoall"]._replace(rows=lambda rank, size: 2 * (rank + 1) % 3 * size),
    "alltoall with splits": Operation(
        lambda hvd, x: hvd.alltoall(x, splits(hvd.rank(), hvd.size()))[0],
        lambda xs, rank: parts_for(rank, xs, lambda source: splits(source, len(xs))),
        rows=lambda rank, size: sum(splits(rank, size)),
    ),
}
"""Those of which ranks pass other numbers of rows, that no compiler knows before."""
ALL = OPERATIONS | UNEVEN
Case = collections.namedtuple("Case", "x result weights gradient")


def case(name, rank, size):
    """This rank's rows and result, weights of its elements, and the gradient of all weighted results by the rows."""

    def weighted(result, rank):
        return np.arange(1.0, 1 + result.size).reshape(result.shape) * (1 + rank)

    operation = ALL[name]
    counts = [operation.rows(each, size) for each in range(size)]
    everyones = [np.arange(2.0 * count).reshape(count, 2) + 100 * each for each, count in enumerate(counts)]
    gradient = np.zeros_like(everyones[rank])
    for at in np.ndindex(*gradient.shape):  # all is linear
        unit = [np.zeros_like(each) for each in everyones]
        unit[rank][at] = operation.factor(size)
        results = [operation.model(unit, each) for each in range(size)]
        gradient[at] = sum((weighted(each, number) * each).sum() for number, each in enumerate(results))
    result = operation.model(everyones, rank)
    return Case(everyones[rank], result, weighted(result, rank), gradient)
