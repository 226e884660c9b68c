"""ringreduce on Spark: ranks on the machines that Spark has.

    import ringreduce.spark

Nothing of Spark is imported before a function here is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ringreduce.api import joined
from ringreduce.transport import joining

__all__ = ["rank"]


def rank(fn: Callable[[Iterator[Any]], Iterable[Any]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Make each task of a barrier stage a rank; its partition is the data, and what it yields are rows of the result.

        rows = df.mapInArrow(ringreduce.spark.rank(train), "loss double", barrier=True).collect()

    fn: gets the partition's batches, and yields batches, as mapInArrow and mapInPandas have them.
    Needs MPICH, and as many slots as there are partitions. `ringreduce.init()` has been called when `fn` begins, and
    `shutdown()` is when it ends. A failing task ends the stage, as with any barrier stage.
    Spark keeps its Python processes for a minute, and MPI starts once in a process: the same ones can be ranks again,
    with ranks that need not be the partitions' numbers, but not some of them together with others: then StartupError
    says so, and the setting spark.python.worker.reuse=false gives each stage new ones.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        number, size = context.partitionId(), len(context.getTaskInfos())
        said = [json.loads(each) for each in context.allGather(json.dumps([number, joined.place()]))]
        places = [place and joined.Place(*place) for _, place in sorted(said, key=lambda each: each[0])]
        ranks = joined.ranks_again(places, "set spark.python.worker.reuse=false")
        address = ""
        if ranks is None:
            address = next(filter(None, context.allGather("" if number else joining.start(size))))
        with joined.rank_of(address, ranks[number] if ranks else number, size, "Spark"):
            yield from fn(batches)

    return run
