"""Errors for submissions that cannot be accepted or completed."""

from __future__ import annotations

from collections.abc import Mapping

from ringreduce.errors import CollectiveError, InputError, PeerLostError
from ringreduce.execution.executor import Running
from ringreduce.execution.signature import ranks_text
from ringreduce.execution.submission import Submission
from ringreduce.transport.world import World


def unknown_set(
    kind: str, process_set: int, sets: Mapping[int, tuple[int, ...]], rank: int, gone: Mapping[int, str]
) -> InputError:
    """This rank is not in the process set, or the set does not exist; gone: why sets of lost ranks do not."""
    if process_set in sets:
        return InputError(
            f"{kind}: rank {rank} is not in process set {process_set}, which has {ranks_text(sets[process_set])}; "
            "call it only on those (check process_set.included())"
        )
    if process_set in gone:
        return InputError(f"{kind}: process set {process_set} no longer exists: {gone[process_set]}")
    return InputError(
        f"{kind}: there is no process set {process_set}; expected one that was passed to init() or add_process_set(), "
        "and not removed"
    )


def name_is_pending(submission: Submission, rank: int) -> InputError:
    """The previous submission of this name is not synchronized."""
    signature = submission.signature
    return InputError(
        f"{signature.text}: a tensor of this name is already pending on rank {rank}; "
        "synchronize it first, or use another name"
    )


def after_join(submission: Submission) -> InputError:
    """This rank has joined."""
    signature = submission.signature
    return InputError(f"{signature.text} after join(): a rank may call nothing else until all ranks have called join()")


def engine_closed(submission: Submission, why: str, error: Exception | None) -> CollectiveError:
    """The engine has failed, or this rank is leaving."""
    text = f"{submission.signature.text}: {why}"
    found = PeerLostError(text, error.lost_ranks) if isinstance(error, PeerLostError) else CollectiveError(text)
    if error is not None:
        found.__cause__ = error.__cause__
    return found


def never_complete(state: Running, submission: Submission, world: World, leaving: str) -> CollectiveError:
    """A rank, perhaps this one, has left, or the process set was removed."""
    signature = submission.signature
    what = f"rank {world.rank} of {world.size}, {signature.text} ({submission.line})"
    if state.leaver == world.rank:
        return CollectiveError(f"{what}: was pending when this rank left the job ({leaving}); synchronize it first")
    if state.leaver < 0:
        return CollectiveError(f"{what}: {state.closed}")
    return PeerLostError(
        f"{what}: {state.closed}; all ranks must call the same collectives the same number of times", [state.leaver]
    )
