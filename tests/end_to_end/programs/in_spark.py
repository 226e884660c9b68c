"""Ranks that are Spark's barrier tasks, by mapInArrow; then TorchDistributor over the backend "ring"."""

import os

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

import ringreduce.spark


def total(batches):
    import numpy as np
    import pyarrow as pa

    import ringreduce as rr

    values = np.concatenate([each.column(0).to_numpy() for each in batches])
    found = {"rank": rr.rank(), "pid": os.getpid(), "rows": len(values)}
    found["total"] = float(rr.allreduce(values.sum(), op=rr.Sum))
    yield pa.RecordBatch.from_pydict({name: [value] for name, value in found.items()})


def raises(batches):
    import ringreduce as rr

    if rr.rank() == 1:
        raise KeyError("shard")
    rr.allreduce(1.0, name="never")
    yield from ()


def loop(backend):
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    values = torch.arange(3.0) + dist.get_rank()
    dist.all_reduce(values)
    return values.tolist(), dist.get_backend(), dist.get_world_size()


def main():
    options = {"spark.ui.enabled": "false", "spark.log.level": "OFF"}
    builder = SparkSession.builder.master("local[3]")
    for name, value in options.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    table = spark.range(100, numPartitions=2).selectExpr("cast(id as double) as x")

    def run(fn, rows=table):
        schema = "rank long, pid long, rows long, total double"
        return rows.mapInArrow(ringreduce.spark.rank(fn), schema, barrier=True).collect()

    first, second = run(total), run(total)
    for found in (first, second):
        print(
            "ranks", sorted(each.rank for each in found), [each.rows for each in found], {each.total for each in found}
        )
    print("the same processes", {each.pid for each in first} == {each.pid for each in second})
    for fn, rows in ((total, table.repartition(3)), (raises, table)):
        try:
            run(fn, rows)
        except Exception as error:
            lines = [each for each in str(error).splitlines() if "MPI can be started" in each or "KeyError: " in each]
            print("raised", lines[0].strip())
    print("distributor", TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(loop, "ring"))
    spark.stop()


if __name__ == "__main__":
    main()
