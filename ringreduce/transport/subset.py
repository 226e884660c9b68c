"""Some ranks of a transport as a transport of their own, numbered from 0, whose messages never mix with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.transport.base import Transport, Work

TAGS = 8  # tags that the collectives use: 0 to 7
CHANNELS = 8  # operations of one process set that may run at the same time, each with its own tags


class SubsetTransport:
    """See `Transport`. `members[k]` is the rank, in `whole`, of rank k here; `channel` keeps its messages apart."""

    def __init__(self, whole: Transport, members: Sequence[int], channel: int) -> None:
        self.rank, self.size = members.index(whole.rank), len(members)
        self._whole, self._members, self._first_tag = whole, tuple(members), channel * TAGS
        if isinstance(whole, SubsetTransport):  # one call a message, not two
            self._whole, self._first_tag = whole._whole, whole._first_tag + self._first_tag
            self._members = tuple([whole._members[each] for each in members])

    def send(self, array: Any, destination: int, tag: int) -> Work:
        """See `Transport.send`."""
        return self._whole.send(array, self._members[destination], self._first_tag + tag)

    def receive(self, array: Any, source: int, tag: int, at_most: bool = False) -> Work:
        """See `Transport.receive`."""
        return self._whole.receive(array, self._members[source], self._first_tag + tag, at_most)


def tags_of(number: int) -> range:
    """The tags of range `number`: those of a process set."""
    return range(number * CHANNELS * TAGS, (number + 1) * CHANNELS * TAGS)


def channels(whole: Transport, members: Sequence[int], number: int) -> list[Transport]:
    """The transports of a process set, with range `number` of tags: one for each concurrent operation."""
    return [SubsetTransport(whole, members, number * CHANNELS + each) for each in range(CHANNELS)]
