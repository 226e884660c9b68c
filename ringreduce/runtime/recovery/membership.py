"""Which ranks the launcher counts to the world of an elastic job: it sends a list whenever that changes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

EXPELLED_EXIT_CODE = 1


class Membership(NamedTuple):
    """A list; ranks are those of the job's start, see `World.origins`."""

    number: int  # rises; 0: the world of the start
    ranks: tuple[int, ...]
    dead: Mapping[int, str]  # all that are lost since the start, and how each ended
    heard_s: float = 0.0  # when it arrived, by this host's monotonic clock


class Members:
    """The newest list; `rank` is this one at the job's start. The launcher's messages are heard in a thread."""

    def __init__(self, rank: int) -> None:
        self.newest = Membership(-1, (), {})
        self.hosts = ""
        """Those that have come, with which the job is to be started again; empty: none."""
        self.on_news: Callable[[Membership], object] = lambda _: None
        """Called, in that thread, with each newer list."""
        self._rank = rank
        self._changed = threading.Condition()

    def hear(self, message: Mapping[str, Any]) -> None:
        """Keep what the launcher says: which hosts have come, or a list of ranks."""
        if "hosts" in message:
            self.hosts = str(message["hosts"])
        else:
            self._hear_list(message["membership"])

    def _hear_list(self, said: Mapping[str, Any]) -> None:
        """Keep a list, if it is newer. A rank that it calls dead ends: the others go on without."""
        dead = {int(rank): str(how) for rank, how in said.get("dead", {}).items()}
        found = Membership(int(said["number"]), tuple(said["ranks"]), dead, time.monotonic())
        if self._rank in dead:
            print(f"rank {self._rank} was given up ({dead[self._rank]}); it ends", file=sys.stderr, flush=True)
            os._exit(EXPELLED_EXIT_CODE)
        with self._changed:
            if found.number <= self.newest.number:
                return
            self.newest = found
            self._changed.notify_all()
        self.on_news(found)

    def newer_than(self, number: int) -> bool:
        """True when a list with a higher number is known."""
        return self.newest.number > number

    def wait(self, is_wanted: Callable[[Membership], bool], timeout_s: float | None = None) -> bool:
        """Wait until a newest list is wanted; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: is_wanted(self.newest), timeout_s)
