"""The channels of one engine: operations in program order. Drives those that nobody waits for, and closes them."""

from __future__ import annotations

from ringreduce.errors import CollectiveError, PeerLostError, StalledError
from ringreduce.execution.channel import Channel
from ringreduce.log import LOGGER
from ringreduce.monitor.launcher_link import report_stall
from ringreduce.negotiation.negotiation import Negotiation
from ringreduce.settings import Settings
from ringreduce.transport.waiting import WaitsFor

LAST_MESSAGES_S = 1.0  # how long operations may take that a rank had done before it left


class Channels:
    """Channels by number; those are negative, and equal on all ranks."""

    def __init__(self, settings: Settings, negotiation: Negotiation) -> None:
        self.of: dict[int, Channel | None] = {}  # None: without this rank
        self.members: dict[int, tuple[int, ...]] = {}
        self._settings, self._negotiation = settings, negotiation
        self._process_sets: dict[int, int] = {}  # by channel
        self._reported_s: dict[int, float] = {}

    def add(self, channel: Channel | None, process_set: int, members: tuple[int, ...]) -> int:
        """Add a channel of a process set, in the same order on all ranks; returns its number."""
        number = -1 - len(self.of)
        self._process_sets[number] = process_set
        self.of[number], self.members[number] = channel, members
        return number

    def poll(self) -> bool:
        """Advance all channels; close those whose operations can never complete."""
        moved = False
        for number, channel in list(self.of.items()):
            if channel is not None and channel.error is None:
                moved |= channel.poll()
                self._watch(number, channel)
        return moved

    def end(self) -> None:
        """This rank has left: close all channels."""
        for channel in self.of.values():
            if channel is not None:
                channel.fail(self._negotiation.error or CollectiveError("ordered: this rank has left the job"))

    def waits_for(self) -> WaitsFor:
        """What operations under way must be polled for."""
        found = (each.waits_for() for each in self.of.values() if each is not None and each.error is None)
        return max(found, default=WaitsFor.NOTHING)

    def _watch(self, number: int, channel: Channel) -> None:
        """Close a channel when a rank is lost; report what has not moved for long."""
        waited_s, text = channel.stalled()
        state = self._negotiation.states.get(self._process_sets[number])
        if self._negotiation.error is not None:
            channel.fail(self._negotiation.error)
        elif state is None:
            channel.fail(CollectiveError("ordered: its process set was removed"))
        elif state.closed and waited_s > LAST_MESSAGES_S:
            channel.fail(PeerLostError(f"{text}; {state.closed}", [state.leaver] if state.leaver >= 0 else []))
        check_s, abort_s = self._settings.stall_check_s, self._settings.stall_abort_s
        if waited_s < self._reported_s.get(number, 0.0):
            self._reported_s.pop(number)  # it has moved
        if check_s and waited_s >= check_s and number not in self._reported_s:
            self._reported_s[number] = waited_s
            if not report_stall(self._settings.error_file, text):
                LOGGER.warning(f"stalled: {text}")
        if 0 < abort_s <= waited_s:
            channel.fail(StalledError(text))
