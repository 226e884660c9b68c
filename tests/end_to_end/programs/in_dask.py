"""Ranks that are Dask's workers: trains where the chunks lie, then meets a rank that raises, and one that ends."""

import functools
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import ringreduce.dask
from ringreduce.errors import InputError, PeerLostError, StartupError

STEPS, RATE = 30, 0.1
SOON_S = 300.0  # ten minutes are how long ranks wait for one that never comes


def train(x, y):
    import ringreduce as rr

    rows = rr.allreduce(float(len(x)), op=rr.Sum)
    weights = np.zeros(x.shape[1])
    for _ in range(STEPS):
        weights -= RATE * rr.allreduce(x.T @ (x @ weights - y), name="gradient", op=rr.Sum) / rows
    return weights, rr.rank(), len(x), os.getpid()


def raises(x, y):
    import ringreduce as rr

    if rr.rank() == 1:
        raise KeyError("shard")
    rr.allreduce(1.0, name="never")


def ends():
    import ringreduce as rr

    if rr.rank() == 1:
        os._exit(9)
    rr.allreduce(1.0, name="never")


def counts(frame):
    import ringreduce as rr

    return float(rr.allreduce(float(frame["a"].sum()), op=rr.Sum))


def summed(part, times):
    import ringreduce as rr

    return [float(rr.allreduce(times * float(part.sum()), op=rr.Sum)) for _ in range(STEPS)][-1]


def kinds(masked, frame, index):
    """What a rank gets, of several chunks or of none."""
    import pandas as pd

    import ringreduce as rr

    count = float(rr.allreduce(float(np.ma.count_masked(masked)), op=rr.Sum))
    return count, np.ma.isMaskedArray(masked), str(frame["a"].dtype), isinstance(index, pd.Index)


def breaks(block, block_id):
    if block_id[0] == 1:
        raise ValueError(f"chunk {block_id[0]} has {len(block)} rows")
    return block


def refused(error, called, *args, **kwargs):
    try:
        called(*args, **kwargs)
    except error as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    raise AssertionError("nothing was raised")


def main():
    import dask.array as da
    import dask.dataframe as dd
    import pandas as pd
    from distributed import Client, LocalCluster

    random = np.random.default_rng(1)
    x = random.standard_normal((900, 5))
    y = x @ np.arange(5.0) + 1e-3 * np.arange(900.0)
    alone = np.zeros(5)
    for _ in range(STEPS):
        alone -= RATE * (x.T @ (x @ alone - y)) / len(x)
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        chunks = da.from_array(x, chunks=(70, 3)).persist(), da.from_array(y, chunks=400)
        broken = chunks[1].rechunk(70).map_blocks(breaks, dtype=float, meta=np.empty(0))
        print(refused(ValueError, ringreduce.dask.map, train, chunks[0], broken))
        began_s = time.monotonic()
        first, second = (ringreduce.dask.map(train, *chunks) for _ in range(2))
        print("soon", time.monotonic() < began_s + SOON_S)
        for found in (first, second):
            weights, ranks, rows, pids = zip(*found, strict=True)
            print("ranks", ranks, "rows", sum(rows), "workers", len(set(pids)))
            print("as alone", all(np.allclose(each, alone, rtol=1e-12, atol=0) for each in weights))
            print("the same bits", all(each.tobytes() == weights[0].tobytes() for each in weights))
        print("the same processes", [each[3] for each in first] == [each[3] for each in second])
        frame = dd.from_pandas(pd.DataFrame({"a": range(10)}), npartitions=2)
        print("frame", {*ringreduce.dask.map(counts, frame)})
        masked = da.ma.masked_greater(da.arange(4, chunks=1), 0)
        letters = dd.from_pandas(pd.DataFrame({"a": list("abcd")}), npartitions=4)
        letters = letters.map_partitions(lambda part: part.astype("category"))
        print("kinds", {*ringreduce.dask.map(kinds, masked, letters, letters.index)})
        print(refused(KeyError, ringreduce.dask.map, raises, *chunks))
        print(refused(InputError, ringreduce.dask.map, train, chunks[0], chunks[1][:800]))
        print(refused(InputError, ringreduce.dask.map, train, x, y))
        print(refused(InputError, ringreduce.dask.map, train, chunks[0][chunks[0][:, 0] > 0], chunks[1]))
        print(refused(InputError, ringreduce.dask.map, train, chunks[0], chunks[1][chunks[1] > 0]))
        print(refused(InputError, ringreduce.dask.map, counts, frame, workers=[]))
        some = [*client.ncores()][:2]
        print(refused(StartupError, ringreduce.dask.map, train, *chunks, workers=some))
        print(refused(PeerLostError, ringreduce.dask.map, ends))
    with LocalCluster(**options | {"n_workers": 2, "threads_per_worker": 2}) as cluster, Client(cluster) as client:
        numbers = da.arange(10, chunks=3)
        calls = [functools.partial(ringreduce.dask.map, functools.partial(summed, times=each)) for each in (1, 10)]
        with ThreadPoolExecutor() as pool:
            print("two calls", [*pool.map(lambda call: call(numbers, client=client), calls)])
    with LocalCluster(**options | {"n_workers": 0}) as cluster, Client(cluster) as client:
        print(refused(InputError, ringreduce.dask.map, counts, frame))


if __name__ == "__main__":
    main()
