"""The stall watch: which ranks are missing, and what they do instead; reported to ringrun, or else on stderr.

When a tensor stalls, its coordinator requests the missing ranks' last submissions and the Python stacks of the threads
that called init(). A rank that has waited long sends its coordinator a probe. A rank that does not reply is stopped, or
holds the interpreter in C code.

Source: Horovod's stall inspector, which names the ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringreduce.engine.inbox import Inbox
from ringreduce.engine.process_sets import ProcessSets
from ringreduce.errors import StalledError
from ringreduce.execution.channel import Channel
from ringreduce.execution.executor import Running
from ringreduce.execution.signature import Signature, ranks_text
from ringreduce.monitor.side_job import SideJob
from ringreduce.monitor.stall_report import NAMED, SILENT, headline, named, report, stack_of, warn
from ringreduce.negotiation.coordinator import Coordinator, Waiting
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import GLOBAL, Failure, StackReply, StackRequest
from ringreduce.settings import Settings
from ringreduce.transport.waiting import WaitsFor

REPLY_S = 3.0  # how long to wait for a reply
QUERIED = 8  # how many of the missing ranks are queried
POLLS = 20  # checks per `stall_check_s`
RECENT = 0.1  # of `stall_check_s`: what has waited for less is not in a report of what has waited for longer


class Inquiry(NamedTuple):
    """A report that waits for replies."""

    headline: str
    queried: tuple[int, ...]
    until_s: float
    replies: dict[int, StackReply]
    over: Running | None  # of an elastic job: stalled for too long; the replies tell for whom it waits
    of_leaving: bool  # those that reply may take their time: only silence is reported


class StallWatch:
    """The stall watch of one engine."""

    def __init__(
        self,
        settings: Settings,
        mailbox: Mailbox,
        inbox: Inbox,
        ending: Ending,
        process_sets: ProcessSets,
        give_up: Callable[[StalledError, Sequence[int]], None],
    ) -> None:
        """give_up: called after `stall_abort_s` with the ranks that this one waits for; in an elastic job again and
        again, since there only those end.
        """
        self._settings, self._mailbox, self._inbox = settings, mailbox, inbox
        self._ending, self._process_sets, self._give_up = ending, process_sets, give_up
        self._init_thread = threading.get_ident()  # whose stack is reported
        self._job = SideJob("the stall watch", mailbox.rank)
        messages = (StackRequest, StackReply)
        mailbox.handlers |= dict.fromkeys(messages, lambda *args: self._job(lambda: self._receive(*args)))
        self._check_s = min(filter(None, (settings.stall_check_s, settings.stall_abort_s)), default=0.0)
        self._next_poll_s = 0.0
        self._reported: dict[int, float] = {}  # by process set: for how long it was stalled at its last report
        self._inquiry: Inquiry | None = None
        self._requests = 0
        self._probed_s: dict[int, float] = {}  # by process set: when its coordinator was probed; 0 after its reply
        self._silent: set[int] = set()  # process sets whose coordinator did not reply
        self._attentive = False  # true while something is stalled

    def waits_for(self) -> WaitsFor:
        """Control messages, while something is stalled."""
        return WaitsFor.CONTROL if self._attentive else WaitsFor.NOTHING

    def poll(self) -> bool:
        """Find what is stalled; query ranks, report, or fail it. Returns False."""
        now = time.monotonic()
        return bool(self._check_s) and now >= self._next_poll_s and self._job(lambda: self._check(now))

    def _check(self, now: float) -> None:
        self._next_poll_s = now + self._check_s / POLLS
        if self._inquiry is not None and (
            len(self._inquiry.replies) == len(self._inquiry.queried) or now > self._inquiry.until_s
        ):
            inquiry, self._inquiry = self._inquiry, None
            self._end(inquiry)
        stalled = [
            self._check_operation(each, now - each.stuck().moved_s)
            if each.busy
            else isinstance(each, ProcessSetState) and self._check_set(each, now)
            for each in self._process_sets.all()
        ]
        self._attentive = any(stalled) or self._inquiry is not None

    def _end(self, inquiry: Inquiry) -> None:
        """Report; or give up those that do not reply: others may wait for a rank that waits for these."""
        headline, queried, _, replies, over, of_leaving = inquiry
        mute = [each for each in queried if each not in replies]
        now = time.monotonic()
        if of_leaving:
            if mute:
                warn(self._settings, report(headline, mute, replies))
                if self._is_over(now - self._ending.leaving_s):
                    self._give_up(StalledError(report(headline, mute, replies)), mute)
        elif over is None:
            warn(self._settings, report(headline, queried, replies, stacks=False), report(headline, queried, replies))
        elif over.busy and self._is_over(now - over.stuck().moved_s):
            stuck_on = over.stuck().stuck_on()
            self._give_up(StalledError(report(headline, queried, replies, stacks=False)), mute or [stuck_on or 0])
        elif missing := self._missing(over):
            text = report(headline, missing, replies, stacks=False)
            self._give_up(StalledError(text), [each for each in missing if each in mute] or missing)

    def _missing(self, state: Running) -> list[int]:
        """The ranks that have kept others waiting for too long."""
        coordinator = state.coordinator if isinstance(state, ProcessSetState) else None
        late = coordinator.waiting(self._settings.stall_abort_s) if coordinator else []
        return sorted({rank for each in late for rank in each.missing})

    def _check_set(self, state: ProcessSetState, now: float) -> bool:
        """Check what waits in one process set; True when something is stalled in it."""
        if state.coordinator is not None:
            waiting = state.coordinator.waiting(self._check_s)
            if waiting:
                self._check_waiting(state, state.coordinator, waiting, now)
            return bool(waiting) or self._check_leaving(state, now)
        with self._inbox.lock:  # the user's threads add to it; joins may wait for as long as the others train
            oldest = next((each for key, each in state.pending.items() if key != "join.join"), None)
        leaving_s = self._ending.leaving_s if state.number == GLOBAL else math.inf
        waited_s = now - (oldest.submitted_s if oldest else leaving_s)
        if waited_s < self._check_s:
            self._probed_s.pop(state.number, None)
            return False
        self._probe_coordinator(state, now, waited_s)
        return True

    def _check_leaving(self, state: ProcessSetState, now: float) -> bool:
        """Check on ranks that this one awaits in shutdown(); True while it waits long."""
        waited_s = now - self._ending.leaving_s
        missing = sorted(set(state.members) - state.left)
        if waited_s < self._check_s or state.number != GLOBAL or not missing:
            return False
        if self._is_due(state, waited_s) or (self._is_over(waited_s) and self._inquiry is None):
            text = f"rank {self._mailbox.rank} has waited in shutdown() for {waited_s:.0f} s for {ranks_text(missing)}"
            self._query(state, text, missing, of_leaving=True)
        return True

    def _check_operation(self, state: Running, stalled_s: float) -> bool:
        """Check an operation under way: when it does not move, some rank is stopped, or its engine cannot run."""
        if stalled_s < self._check_s or (isinstance(state, Channel) and state.patient):
            return False
        with self._inbox.lock:
            first = next(iter(state.running.values()), None)
        what = "an operation" if first is None else f"{first.signature.text} ({first.line})"
        text = (
            f"{what} is under way, but has not moved for {stalled_s:.0f} s; rank {self._mailbox.rank} waits "
            f"for rank {state.stuck().stuck_on()}"
        )
        asks = isinstance(state, Channel) or (isinstance(state, ProcessSetState) and state.coordinator is not None)
        if self._is_due(state, stalled_s) and asks:
            self._query(state, text, state.members)
        if self._is_over(stalled_s):
            if not self._settings.elastic:
                self._give_up(StalledError(f"{text}; data that has begun to arrive may still change its array"), [])
            elif self._inquiry is None:
                self._query(state, text, state.members, is_over=True)
        return True

    def _check_waiting(
        self, state: ProcessSetState, coordinator: Coordinator, waiting: Sequence[Waiting], now: float
    ) -> None:
        """Report tensors that some ranks have not submitted, or fail them."""
        if self._is_due(state, now - waiting[0].since_s):
            waiting = coordinator.waiting(RECENT * self._check_s)
            missing = sorted({rank for each in waiting for rank in each.missing})
            self._query(state, headline(waiting, now), missing, [each.signature for each in waiting[:NAMED]])
        over = [each for each in waiting if self._is_over(now - each.since_s)]
        if over and self._settings.elastic:
            if self._inquiry is None:
                self._query(state, headline(over, now), self._missing(state), is_over=True)
        elif over:
            failures = [Failure(each.signature.key, "StalledError", headline([each], now)) for each in over]
            state.negotiator.respond(coordinator.abandon(failures))

    def _is_due(self, state: Running, stalled_s: float) -> bool:
        """Report after `stall_check_s`, twice that, four times that and so on."""
        if self._inquiry is not None or not self._settings.stall_check_s:
            return False
        last = self._reported.get(state.number, 0.0)
        if last <= stalled_s < 2 * last:  # below `last` it is another stall
            return False
        self._reported[state.number] = stalled_s
        return True

    def _is_over(self, stalled_s: float) -> bool:
        return 0 < self._settings.stall_abort_s <= stalled_s

    # Messages

    def _query(
        self,
        state: Running,
        text: str,
        ranks: Sequence[int],
        stalled: Sequence[Signature] = (),
        is_over: bool = False,
        of_leaving: bool = False,
    ) -> None:
        """Ask the ranks what they are doing; the report follows when all have replied, or after `REPLY_S`."""
        self._requests += 1
        kind = stalled[0].kind if stalled else ""
        request = StackRequest(self._requests, state.number, kind, tuple(each.name for each in stalled))
        queried = tuple(ranks if is_over else ranks[:QUERIED])
        until_s, over = time.monotonic() + REPLY_S, state if is_over else None
        self._inquiry = Inquiry(text, queried, until_s, {}, over, of_leaving)
        for rank in queried:
            if rank == self._mailbox.rank:
                self._inquiry.replies[rank] = self._reply(request)
            else:
                self._mailbox.send(request, rank)

    def _probe_coordinator(self, state: ProcessSetState, now: float, waited_s: float) -> None:
        """Report a coordinator that does not reply."""
        probed_s = self._probed_s.get(state.number)
        if probed_s is None:
            self._probed_s[state.number] = now
            self._mailbox.send(StackRequest(-state.number, state.number), state.negotiator.coordinator_rank)
        text = f"rank {state.negotiator.coordinator_rank}, the coordinator, does not answer"
        if probed_s and now - probed_s > REPLY_S:
            self._probed_s[state.number] = 0.0
            self._silent.add(state.number)
            warn(self._settings, f"rank {self._mailbox.rank} has waited for {waited_s:.0f} s; {text}: {SILENT}")
        if state.number in self._silent and self._is_over(waited_s):
            self._give_up(StalledError(text), [state.negotiator.coordinator_rank])

    def _receive(self, source: int, message: StackRequest | StackReply) -> None:
        """Handle a message of another rank's stall watch."""
        if isinstance(message, StackRequest):
            self._mailbox.send(self._reply(message), source)
        elif message.number <= 0:  # the reply to a probe
            self._probed_s[-message.number] = 0.0
            self._silent.discard(-message.number)
        elif self._inquiry is not None and message.number == self._requests:
            self._inquiry.replies[source] = message
            self._next_poll_s = 0.0

    def _reply(self, request: StackRequest) -> StackReply:
        return StackReply(request.number, self._doing(request), stack_of(self._init_thread))

    # What this rank does, in words

    def _doing(self, request: StackRequest) -> str:
        """This rank's last submission, what it waits for, and whether a stalled name waits in another process set."""
        with self._inbox.lock:
            text = self._inbox.last_submission_text()
            waiting = self._process_sets.pending()
            refusals = [
                f"its call for {name!r} {self._inbox.refusals[name]}"
                for name in request.names
                if name in self._inbox.refusals
            ]
        if waiting:
            text += f", and waits for {named([each.signature.text for each in waiting])}"
        text += "".join(f"; {each}" for each in refusals)
        for each in waiting:
            (kind, name, *_), number = each.signature, each.process_set
            if name in request.names and (number, kind) != (request.process_set, request.kind):
                text += f"; it submitted {each.signature.text} ({each.line}) to process set {number}"
                text += f" ({ranks_text(self._process_sets.members[number])})"
                return f"{text}: all ranks must call the same operation on the same process set"
        return text

    def waiting_for(self) -> str:
        """What threads of this rank wait for, such as `allreduce 'layer3.w' (train.py:41)`; empty for nothing.

        Any thread may call it.
        """
        with self._inbox.lock:
            running = [each for on in self._process_sets.all() for each in list(on.running.values())]
            lines = {id(each): each.line for each in self._process_sets.pending() + running}
            handles = self._inbox.waited_for()
        texts = [
            f"{each.signature.text} ({lines[id(each)]})"
            for each in handles
            if id(each) in lines  # not one that has just been completed
        ]
        if self._ending.leaving and not texts:
            return f"waits in shutdown() for the others ({self._ending.leaving})"
        return named(texts, ",")
