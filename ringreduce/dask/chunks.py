"""Ranks that are Dask's workers, each on the chunks that lie there."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.api import joined
from ringreduce.errors import InputError, PeerLostError
from ringreduce.transport import joining

from .tasks import Wanted, current, workers_of

_LOOK_S = 2.0  # whether Dask has lost a worker, whose task it would keep for ever
_NOTICED_S = 5.0  # for ranks to end that have waited for one that has failed


def map(fn: Callable[..., Any], *collections: Any, client: Any = None, workers: Wanted = None) -> list[Any]:
    """Call `fn` in each of Dask's workers, as a rank, with the data stored there; return the results by rank.

        model = ringreduce.dask.map(train, x, y)[0]

    collections: Dask's arrays or dataframes, divided alike along the first axis: by rows, or by the same known
                 divisions. `fn` gets of each what this worker holds, in one piece, which may be empty: an array or a
                 dataframe. Chunks that are in no worker yet, or elsewhere than those of the first collection, are
                 brought there.
    workers:     their addresses or names; by default all that the cluster has, each with a thread that is free.
                 `client`: by default the current one.
    On several hosts needs MPICH. `ringreduce.init()` has been called when `fn` begins, and `shutdown()` is when it
    ends. The same workers can be called again, but not others together with them, since MPI starts once in a process.
    Calls on a cluster wait for each other: one runs at a time, also of several clients.
    Raises: what `fn` has raised; the other ranks get PeerLostError. What a chunk has raised; no rank has begun then.
            InputError for collections that do not fit. StartupError where workers have been ranks with others.
            MissingExtraError where Dask is not installed.
    Source: dask-mpi's issue 25 asks for it.
    """
    client = client or current("ringreduce.dask.map()")
    import distributed

    # a client that was killed holds it for lease-timeout, which is 30 s
    with distributed.Lock("ringreduce.dask.map", scheduler_rpc=client.scheduler, loop=client.loop):
        return _call(fn, collections, client, workers)


def _call(fn: Callable[..., Any], collections: Sequence[Any], client: Any, workers: Wanted) -> list[Any]:
    """Do what `map` says, while no other call does."""
    found = client.run(_where, workers=workers_of(client, workers, "map"))
    names = sorted(found, key=lambda name: (found[name][0], name))
    if len({found[name][:2] for name in names}) < len(names):
        raise InputError("map: Dask workers share a process, but each rank needs its own; use processes=True")
    ranks = joined.ranks_again(
        [found[name][2] for name in names], "get new workers, with client.restart() or from another cluster"
    )
    if ranks:
        names = [name for _, name in sorted(zip(ranks, names, strict=True))]
    held = _held(client, names, collections)
    empty = [_empty(each) for each in collections]
    here = {"allow_other_workers": False, "pure": False, "retries": 0}
    address = "" if ranks else client.submit(joining.start, len(names), workers=names[:1], **here).result()
    futures = [
        client.submit(_rank, fn, parts, empty, address, rank, len(names), workers=[name], **here)
        for rank, (name, parts) in enumerate(zip(names, held, strict=True))
    ]
    try:
        _wait(client, futures, names)
    finally:
        client.cancel([each for each in futures if not each.done()])
    errors = [each.exception() for each in futures if each.status == "error"]
    gone = [rank for rank, each in enumerate(futures) if not each.done()]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerLostError))  # the others' follow from it
    if gone:
        raise PeerLostError(f"map: Dask has lost {', '.join(names[rank] for rank in gone)}, ranks {gone}", gone)
    return list(client.gather(futures))


def _wait(client: Any, futures: Sequence[Any], names: Sequence[str]) -> None:
    """Return when all have ended; or when one has failed, or its worker, and the others have had time to notice."""
    import distributed

    until_s = math.inf
    while (left := [each for each in futures if not each.done()]) and time.monotonic() < until_s:
        with contextlib.suppress(distributed.TimeoutError):
            distributed.wait(left, timeout=_LOOK_S, return_when="FIRST_COMPLETED")
        waits_for = {name for name, each in zip(names, futures, strict=True) if not each.done()}
        if any(each.status == "error" for each in futures) or not waits_for <= client.ncores().keys():
            until_s = min(until_s, time.monotonic() + _NOTICED_S)


def _where() -> tuple[str, int, Any]:
    return socket.gethostname(), os.getpid(), joined.membership()


def _rank(fn: Callable[..., Any], parts: list[Any], empty: list[Any], address: str, rank: int, size: int) -> Any:
    with joined.rank_of(address, rank, size, "Dask"):
        return fn(*(_in_one_piece(each) if each else none for each, none in zip(parts, empty, strict=True)))


def _parts(collection: Any, number: int, first: Any) -> list[Any]:
    """The parts of a collection along the first axis, divided as those of the first one."""
    which = f"map: collection {number}"
    if not hasattr(collection, "_meta") or collection.ndim == 0:  # a Bag or a Delayed has none
        raise InputError(f"{which} is a {type(collection).__name__}; expected an array or a dataframe of Dask")
    if hasattr(collection, "rechunk"):
        if math.isnan(sum(collection.shape)):
            raise InputError(f"{which}: the sizes of its chunks are unknown; call compute_chunk_sizes() of it first")
        rows = (first if hasattr(first, "rechunk") else collection).chunks[0]
        if sum(rows) != collection.shape[0]:
            raise InputError(f"{which} has {collection.shape[0]} rows; expected {sum(rows)}, as in the first one")
        collection = collection.rechunk({0: rows, **dict.fromkeys(range(1, collection.ndim), -1)})
    parts = list(np.ravel(collection.to_delayed()))
    if len(parts) != (expected := first.numblocks[0] if hasattr(first, "rechunk") else first.npartitions):
        raise InputError(f"{which} has {len(parts)} partitions, and the first one {expected}; repartition it")
    if _divided_alike(collection, first) is False:
        here, there = next(
            pair for pair in zip(collection.divisions, first.divisions, strict=True) if pair[0] != pair[1]
        )
        cure = "repartition it, or clear_divisions() of it if its rows belong together by their places"
        raise InputError(f"{which} is divided at {here!r} where the first one is at {there!r}; {cure}")
    return parts


def _divided_alike(collection: Any, first: Any) -> bool | None:
    """Return whether the parts of both are known to belong together, as those of arrays do; None: it is not known."""
    arrays = [hasattr(each, "rechunk") for each in (collection, first)]
    if any(arrays) or not (collection.known_divisions and first.known_divisions):
        return True if all(arrays) else None
    return bool(collection.divisions == first.divisions)


def _compare_rows(client: Any, collections: Sequence[Any], computed: Sequence[Sequence[Any]]) -> None:
    """Raise InputError for parts that have not as many rows as those of the first collection, unless they need not."""
    for number, collection in enumerate(collections):
        if number and _divided_alike(collection, collections[0]) is None:
            rows, expected = client.gather([client.map(_rows, computed[each]) for each in (number, 0)])
            for k, pair in enumerate(zip(rows, expected, strict=True)):
                if pair[0] != pair[1]:
                    what = (
                        f"partition {k} of collection {number} has {pair[0]} rows, and that of the first one {pair[1]}"
                    )
                    raise InputError(f"map: {what}; rechunk or repartition one as the other is divided")


def _rows(part: Any) -> int:
    return int(part.shape[0])


def _held(client: Any, names: Sequence[str], collections: Sequence[Any]) -> list[list[list[Any]]]:
    """By rank and collection, the parts that it gets: where a part of the first one lies, those of the others go."""
    import distributed

    parts_of = [_parts(each, number, collections[0]) for number, each in enumerate(collections)]
    computed = [client.compute(each) for each in parts_of]
    held: list[list[list[Any]]] = [[[] for _ in collections] for _ in names]
    distributed.wait(computed)
    for each in itertools.chain(*computed):
        if each.status == "error":  # its rank would never begin, and the others would wait for it
            raise each.exception()
    _compare_rows(client, collections, computed)
    holders = client.who_has(computed[0]) if computed else {}
    for parts in zip(*computed, strict=True):
        ranks = [names.index(name) for name in holders.get(parts[0].key, ()) if name in names]
        rank = min(ranks or range(len(names)), key=lambda each: len(held[each][0]))
        for column, part in zip(held[rank], parts, strict=True):
            column.append(part)
    return held


def _empty(collection: Any) -> Any:
    if hasattr(collection, "rechunk"):
        return np.empty_like(collection._meta, shape=(0, *collection.shape[1:]), dtype=collection.dtype)
    return collection._meta


def _in_one_piece(parts: list[Any]) -> Any:
    """Join parts as Dask does: masks, sparse matrices, categories and indexes stay what they are."""
    if len(parts) == 1:
        return parts[0]
    if hasattr(parts[0], "to_numpy"):
        from dask.dataframe.dispatch import concat

        return concat(parts)
    from dask.array.dispatch import concatenate_lookup

    most_special = max(parts, key=lambda part: getattr(part, "__array_priority__", 0))
    return concatenate_lookup.dispatch(type(most_special))(parts, axis=0)
