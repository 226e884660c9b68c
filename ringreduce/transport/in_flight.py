"""The one owner of memory that MPI may still read or write.

MPI has a bare pointer to each message's memory until the message is done. From the moment in which it is posted the
message keeps that memory alive, and this module the message; nothing else needs to be kept for MPI's sake.

    Transport.send, receive            Work.done() is true
    ───── add ─────────►  in flight  ───── discard ─────────►  the memory is its owner's alone
                             │
                             │ abandon(tags): the operations that posted these will not go on. Their channel was closed,
                             │ their engine failed, their world was given up or has ended
                             ▼
                     a receive for which nothing has begun to arrive is cancelled: done
                     what has begun to arrive, and sends, are left behind   ───── sweep: done, or failed ─────► freed

So after `abandon` no late message reaches an array, but for one that was arriving already. What is left behind outlives
its engine and its world: the process keeps it, to its end if need be, since MPI_Finalize may still read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, MutableSet
from typing import Protocol

ALL_TAGS = range(-1, 1 << 62)
CONTROL_TAG = -1  # of control messages, which have no other


class Message(Protocol):
    """A message in flight, and its memory."""

    peer: int
    tag: int
    receives: bool

    def done(self) -> bool:
        """See `Work.done`; it has called `discard` before it returns True. Raises when it never will be."""

    def cancel(self) -> None:
        """Cancel a receive, unless something has begun to arrive."""


_OF_PROCESS: set[InFlight] = set()
"""Those that have left anything behind."""


class InFlight:
    """The messages of one transport: of one world."""

    def __init__(self, worlds: MutableSet[InFlight] = _OF_PROCESS) -> None:
        """worlds: of all worlds of this rank, those that have left anything behind."""
        self._messages: set[Message] = set()
        self._left: list[Message] = []
        self._worlds = worlds
        self.add, self.discard = self._messages.add, self._messages.discard

    def abandon(self, tags: range = ALL_TAGS, peers: Container[int] | None = None) -> None:
        """Nobody waits for the messages with these tags any more, to and from these ranks; None: all ranks."""
        found = [each for each in self._messages if each.tag in tags and (peers is None or each.peer in peers)]
        self._messages.difference_update(found)
        for each in found:
            if each.receives:
                with contextlib.suppress(Exception):  # what has failed may be MPI itself
                    each.cancel()
        self._left += found
        self._worlds.add(self)
        self.sweep()

    def sweep(self) -> None:
        """Free what MPI is done with, of all that was left behind in any world."""
        for each in list(self._worlds):
            each._left = [message for message in each._left if not _is_over(message)]
            if not each._left:
                self._worlds.discard(each)

    def receives_from(self, ranks: Container[int]) -> bool:
        """True while something left behind still arrives from these ranks."""
        self.sweep()
        return any(each.receives and each.peer in ranks for each in self._left)


def _is_over(message: Message) -> bool:
    try:
        return message.done()
    except Exception:  # the other rank is dead, as MPI says: it does not touch the memory any more
        return True
