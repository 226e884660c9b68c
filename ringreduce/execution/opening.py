"""Opens a channel that its members create alone: no other rank takes part, as in torch.distributed's new_group.

By messages with tags that are kept for this they agree on tags of the channel's own, and make shared memory of its own.
So a rank opens one channel after the other, and none any more with a rank with which it has given one up: that one's
messages may come later. The memory goes with the channel, and its tags are not used again: whatever
a channel leaves behind, no later one meets it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import bruck, ring
from ringreduce.errors import InputError, MismatchError
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.host import HostResources
from ringreduce.transport.base import Steps, Transport
from ringreduce.transport.blocks import shared_blocks
from ringreduce.transport.window import GPU_PACKED, Flags, Region, Signatures, Window, block_bytes


def allgather_object(value: Any, transport: Transport) -> Steps[list[Any]]:
    """Every rank's value, by rank, pickled.

    Cost: log2(size) messages a rank for the lengths, size - 1 for the values.
    """
    mine = np.frombuffer(pickle.dumps(value), np.uint8)
    lengths = (yield from bruck.allgather(np.array([mine.size], np.int64), transport))[:, 0].tolist()
    gathered, start = np.empty(sum(lengths), np.uint8), sum(lengths[: transport.rank])
    gathered[start : start + mine.size] = mine
    yield from ring.allgather(gathered, transport, lengths, transport.rank)
    return [pickle.loads(each.data) for each in np.split(gathered, np.cumsum(lengths)[:-1])]  # noqa: S301


def before_opening(host: HostResources, members: Sequence[int]) -> Algorithms:
    """What the members open a channel with. All openings have the same tags, so `abandon` does nothing by itself."""
    algorithms = host.own_algorithms(host.first_own_tags, members)
    algorithms.abandon = nothing
    return algorithms


def nothing() -> None:
    """Abandon nothing: the channel has no messages in flight, and others may use its tags."""


def opened(
    host: HostResources, members: Sequence[int], name: str, transport: Transport
) -> Steps[tuple[Algorithms, Any]]:
    """The algorithms of a channel, and its `Signatures`, None where its members share no memory.

    transport: of `before_opening`.
    Raises:    MismatchError when the members do not open the same one; InputError when MPI has no tags left.
    """
    mine = tuple(members), name
    found = yield from allgather_object((mine, host.next_own_tags), transport)
    theirs = next((rank for rank, (each, _) in zip(members, found, strict=True) if each != mine), None)
    if theirs is not None:
        other = found[members.index(theirs)][0]
        raise MismatchError(
            f"rank {host.world.rank} of {host.world.size} opens {name!r} of ranks {list(members)}, but rank {theirs} "
            f"opens {other[1]!r} of ranks {list(other[0])}; all members must create the same groups in the same order"
        )
    tags = max(each for _, each in found)
    if tags >= host.most_tags:
        raise InputError(
            f"{name}: MPI has tags for {tags - host.first_own_tags} groups per rank, and all have been used; "
            "start the job again"
        )
    host.next_own_tags = tags + 1
    hosts = [host.world.hosts[each] for each in members]
    if len(set(hosts)) == len(members):
        return host.own_algorithms(tags, members), None
    settings = host.settings
    nbytes = block_bytes(settings.shared_slot_bytes, 1)
    blocks, _ = yield from shared_blocks(
        nbytes, hosts, transport.rank, lambda value: allgather_object(value, transport)
    )
    if not blocks:
        return host.own_algorithms(tags, members), None
    ranks = [each for each in members if host.world.hosts[each] == hosts[transport.rank]]
    place = range(len(ranks)), ranks, ranks.index(host.world.rank)
    region = Region(Window(blocks), 0, settings.shared_slot_bytes, *place)
    flags = Flags(region.window, 0, GPU_PACKED, *place) if len(ranks) == len(members) else None
    return host.own_algorithms(tags, members, region, flags), Signatures(region.window, 0, *place)
