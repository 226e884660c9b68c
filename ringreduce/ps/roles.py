"""Who is a server and who a worker, and what they agree on before they begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from ringreduce import runtime
from ringreduce.api.objects import allgather_object
from ringreduce.api.ordered import Ordered, ordered
from ringreduce.compression import AnyCompressor, check_compression
from ringreduce.errors import CollectiveError, InputError, MismatchError, PeerLostError
from ringreduce.ps.layout import Key, Shard, shards_of
from ringreduce.runtime.submit import whole_number

Mode: TypeAlias = Literal["sync", "async", "ssp"]
"""When a push is applied: with those of all workers, at once, or at once while no worker is too far ahead."""
Result = TypeVar("Result")
_LONGEST = 200  # characters of what differs


class Job(NamedTuple):
    """What all ranks know of a parameter server."""

    workers: list[int]  # those that are left, by the ranks with which the job began
    servers: list[int]
    ranks: dict[int, int]  # today's, which an elastic job changes, by those
    layout: list[list[Shard]]  # by server
    channel: Ordered


def servers_of(servers: int | None) -> list[int]:
    """The ranks that are servers: the last ones; by default as many as `ringrun --servers` says."""
    running = runtime.current("ps")
    size, count = running.world.size, whole_number("ps: servers", servers or running.settings.servers, 0)
    if not 0 < count < size:
        raise InputError(
            f"ps: {count} servers of {size} ranks; expected 1 to {size - 1}, and the others are workers: pass "
            "servers=1, or start with ringrun --servers 1"
        )
    return list(range(size - count, size))


def is_server(servers: int | None = None) -> bool:
    """True on the ranks that are servers: the last `servers`; by default as many as `ringrun --servers` says.

    Raises: InputError when that would leave no server, or no worker.
    """
    return runtime.current("ps.is_server").world.rank in servers_of(servers)


def begin(
    servers: int | None,
    compression: AnyCompressor,
    keys: Sequence[Key] | None = None,
    mode: Mode | None = None,
    staleness: int = 0,
) -> Job:
    """Begin together: all ranks call it. A worker passes `keys`, a server the last two.

    Raises: InputError, on all ranks, when ranks pass different numbers of servers or compressions, workers different
            parameters, or servers different modes.
    """
    check_compression(compression)
    ranks, current = servers_of(servers), runtime.current("ps")
    rank = current.world.rank
    if current.settings.spares:
        raise InputError(
            "ps: --spares has no effect: a parameter server continues without a lost worker, and replaces none; "
            "leave it out"
        )
    if (rank in ranks) is (mode is None):
        role, expected = ("server", "Server") if rank in ranks else ("worker", "Worker")
        raise InputError(f"ps: rank {rank} is a {role}; expected ps.{expected}(...); ps.is_server() tells which it is")
    mine = len(ranks), getattr(compression, "__name__", repr(compression)), keys, mode, staleness
    passed = dict(enumerate(allgather_object(mine, name="parameter server")))
    workers = [each for each in passed if each not in ranks]
    _check_equal("number of servers and compression", {each: of[:2] for each, of in passed.items()})
    _check_parameters({each: passed[each][2] for each in workers})
    _check_equal("mode and staleness", {each: passed[each][3:] for each in ranks})
    layout = shards_of(passed[workers[0]][2], len(ranks))
    return Job(workers, ranks, {each: each for each in passed}, layout, ordered())


def retried(action: Callable[[], Result], recover: Callable[[], object]) -> Result:
    """Do it; in an elastic job, when a rank was lost meanwhile, call `recover` and begin anew."""
    while True:
        try:
            return action()
        except MismatchError:
            raise
        except CollectiveError:
            if not runtime.current("ps").is_elastic:
                raise
        recover()


def regrouped(job: Job, own: Any) -> tuple[Job, dict[int, Any]]:
    """The job of the ranks that are left, and what each of them says, by the rank with which it began.

    Raises: PeerLostError when a server is lost, or all workers; what `Runtime.reform` raises.
    """
    while True:
        current = runtime.current("ps")
        current.reform(0)
        origins = current.world.origins
        try:
            said = dict(zip(origins, allgather_object(own, name="parameter server"), strict=True))
            channel = ordered()
        except CollectiveError:
            continue  # another one
        lost = [each for each in job.servers if each not in said]
        workers = [each for each in job.workers if each in said]
        if lost or not workers:
            what = f"server {lost[0]} is lost, and with it its part of the parameters" if lost else "no worker is left"
            raise PeerLostError(f"ps: {what}", lost)
        ranks = {origin: rank for rank, origin in enumerate(origins)}
        return job._replace(workers=workers, ranks=ranks, channel=channel), said


def _check_equal(what: str, values: Mapping[int, Any]) -> None:
    first, expected = next(iter(values.items()))
    for rank, value in values.items():
        if value != expected:
            raise InputError(f"ps: {what}: rank {first} has {_shown(expected)}, but rank {rank} {_shown(value)}")


def _check_parameters(keys: Mapping[int, Sequence[Key]]) -> None:
    named = {rank: {key.name: f"{key.dtype}{list(key.shape)}" for key in held} for rank, held in keys.items()}
    first, expected = next(iter(named.items()))
    for rank, held in named.items():
        for name in {**expected, **held} if held != expected else ():
            _check_equal(f"parameter {name!r}", {each: [named[each].get(name, "none")] for each in (first, rank)})


def _shown(values: Sequence[Any]) -> str:
    text = ", ".join(map(str, values))
    return text if len(text) < _LONGEST else f"{text[:_LONGEST]}…"
