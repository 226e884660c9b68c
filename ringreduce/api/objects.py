"""Any Python object, pickled: lambdas and classes of the script too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.arrays.view import as_buffer
from ringreduce.execution.submission import Submission
from ringreduce.runtime.submit import prepared, submit_and_wait, whole

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, of any length, on every rank; the root gets its own back.

    Raises: InputError for a root_rank that does not exist; MismatchError, also where the root's object cannot be
            pickled, which raises there what pickling does; InputError where it cannot be unpickled; PeerLostError.
            Only the root's `obj` is used.
    Source: Horovod's broadcast_object.
    """
    return broadcast_made(lambda: obj, root_rank, name, process_set)


def broadcast_made(make: Callable[[], Any], root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    """As `broadcast_object`, of what `make` returns on the root; where it raises there, all ranks fail."""
    root = whole(root_rank)
    is_root = root == runtime.current("broadcast_object").world.rank
    number = number_of(process_set, "broadcast_object")

    def own() -> tuple[Any, Any]:
        obj = make() if is_root else None
        return obj, pickled(obj) if is_root else np.empty(0, np.uint8)

    obj, payload = prepared("broadcast_object", name, number, own)

    def finish(submission: Submission) -> Any:
        return obj if is_root else unpickled(submission.payload, f"broadcast_object: what rank {root} sent")

    return submit_and_wait("broadcast_object", name, number, (("root_rank", root),), payload=payload, finish=finish)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object, of any length, in rank order.

    Raises: MismatchError, also where another rank's object cannot be pickled, which raises there what pickling does;
            InputError where one cannot be unpickled; PeerLostError.
    Source: Horovod's allgather_object.
    """

    def finish(submission: Submission) -> list[Any]:
        ends = np.cumsum(submission.payload[:-1, 0])  # of each rank's bytes, which are rows
        pieces = np.split(submission.outputs[0].flat, ends)
        return [
            unpickled(each, f"allgather_object: what rank {rank} sent")
            for rank, each in zip(process_set._members(), pieces, strict=True)
        ]

    number = number_of(process_set, "allgather_object")
    payload = prepared("allgather_object", name, number, lambda: pickled(obj))
    result: list[Any] = submit_and_wait("allgather_object", name, number, inputs=[as_buffer(payload)], finish=finish)
    return result


def pickled(obj: Any) -> Any:
    """The bytes of any Python object. See `pickling.dumps`, which loads more than the whole API does."""
    from ringreduce.transport import pickling

    return np.frombuffer(pickling.dumps(obj), np.uint8)


def unpickled(data: Any, what: str) -> Any:
    """The object of such bytes, which are `what`; see `pickling.loads`."""
    from ringreduce.transport import pickling

    return pickling.loads(data.data, what)
