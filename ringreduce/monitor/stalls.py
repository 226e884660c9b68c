"""The stall watch: which ranks are missing, and what they do instead; reported to ringrun, or else on stderr.

When a tensor stalls, its coordinator requests the missing ranks' last submissions and the Python stacks of the threads
that called init(). A rank that has waited long sends its coordinator a probe. A rank that does not reply is stopped, or
holds the interpreter in C code.

Source: Horovod's stall inspector, which names the ranks.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ringreduce.errors import StalledError
from ringreduce.execution.channel import Channel
from ringreduce.execution.executor import Running
from ringreduce.execution.signature import PACKAGE, Signature, ranks_text, tensor_text
from ringreduce.log import LOGGER
from ringreduce.monitor import launcher_link
from ringreduce.monitor.side_job import SideJob
from ringreduce.negotiation.coordinator import Coordinator, Waiting
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import GLOBAL, Failure, StackReply, StackRequest
from ringreduce.settings import Settings
from ringreduce.transport.waiting import WaitsFor

REPLY_S = 3.0  # how long to wait for a reply
NAMED = 3  # how many tensors and lines a report names; of others it states the number
QUERIED = 8  # how many of the missing ranks are queried
POLLS = 20  # checks per `stall_check_s`
RECENT = 0.1  # of `stall_check_s`: what has waited for less is not in a report of what has waited for longer
SILENT = "it is stopped, or in C code that holds the GIL"


class Inquiry(NamedTuple):
    """A report that waits for replies."""

    headline: str
    queried: tuple[int, ...]
    until_s: float
    replies: dict[int, StackReply]
    over: Running | None  # of an elastic job: stalled for too long; the replies tell for whom it waits
    of_leaving: bool  # those that reply may take their time: only silence is reported


class StallWatch:
    """One engine's."""

    def __init__(
        self,
        settings: Settings,
        mailbox: Mailbox,
        ending: Ending,
        lock: threading.Lock,
        running: Callable[[], Sequence[Running]],
        doing: Callable[[StackRequest], str],
        give_up: Callable[[StalledError, Sequence[int]], None],
    ) -> None:
        """lock: the inbox's;  running: all process sets and channels of this rank.

        doing:   replies for this rank, which has its stack reported of the thread that calls this.

        give_up: called after `stall_abort_s` with the ranks that this one waits for; in an elastic job again and again,
            since there only those end.
        """
        self._settings, self._mailbox, self._lock = settings, mailbox, lock
        self._ending, self._running, self._doing, self._give_up = ending, running, doing, give_up
        self._init_thread = threading.get_ident()
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
            for each in self._running()
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
        with self._lock:  # the user's threads add to it; joins may wait for as long as the others train
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
        with self._lock:
            first = next(iter(state.running.values()), None)
        what = "an operation" if first is None else f"{first.signature.text} ({first.line})"
        text = (
            f"{what} is under way, and has not moved for {stalled_s:.0f} s; rank {self._mailbox.rank} waits "
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
        """Query what the ranks do; the report follows when all have replied, or after `REPLY_S`."""
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
        text = f"rank {state.negotiator.coordinator_rank}, which coordinates, does not answer"
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


def warn(settings: Settings, text: str, full: str = "") -> None:
    """Report `text` to ringrun, which adds the stacks of all ranks; without ringrun log the full text."""
    if not launcher_link.report(settings.error_file, stalled=text):
        LOGGER.warning(f"stalled: {full or text}")


def stack_of(thread: int) -> str:
    """The Python stack of a thread, down to the line that called this package."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its main thread has ended\n"
    frames = list(traceback.extract_stack(frame))
    while len(frames) > 1 and frames[-1].filename.startswith(PACKAGE):
        frames.pop()
    return "".join(traceback.format_list(frames))


def headline(waiting: Sequence[Waiting], now: float) -> str:
    """Who is behind, as far as it is known; which tensors wait, for how long, who has submitted them, and who has not.

    Tensors that the same ranks have submitted in the same lines are one sentence.
    """
    groups: dict[tuple[object, ...], list[Waiting]] = {}
    for each in waiting:
        groups.setdefault((each.signature.kind, *each.submitted.items(), *each.missing), []).append(each)
    lines = [_sentence(each, now) for each in list(groups.values())[:NAMED]]
    others = sum(map(len, list(groups.values())[NAMED:]))
    lines += [f"and {others} more, of other ranks or lines"] if others else []
    lines[-1] += f". All ranks must submit {'them' if waiting[1:] else 'it'}"
    if behind := _behind(waiting):
        lines.insert(0 if len(groups) > 1 else 1, behind)
    return "\n".join(lines)


def _sentence(waiting: Sequence[Waiting], now: float) -> str:
    """Of tensors that wait for the same ranks."""
    first = waiting[0]
    shapes = ", ".join(map(tensor_text, first.signature.tensors[:NAMED]))
    text = first.signature.text + (f" ({shapes})" if shapes else "")
    if len(waiting) > 1:
        names = ", ".join(each.signature.text.removeprefix(f"{first.signature.kind} ") for each in waiting[1:NAMED])
        more = len(waiting) - NAMED
        text += f", and {names}" + (f" and {more} more" if more > 0 else "")
    by_line: dict[str, list[int]] = {}
    for rank, line in sorted(first.submitted.items()):
        by_line.setdefault(line, []).append(rank)
    submitted = [f"{ranks_text(ranks)} ({line})" for line, ranks in list(by_line.items())[:NAMED]]
    others = f" and in {len(by_line) - NAMED} more lines" if len(by_line) > NAMED else ""
    return (
        f"{text}: waiting for {now - first.since_s:.0f} s; submitted by {', '.join(submitted)}{others}; "
        f"missing: {ranks_text(first.missing)}"
    )


def _behind(waiting: Sequence[Waiting]) -> str:
    """How many steps ranks have taken, where that is known: all had reduced a tensor that waits equally often."""
    newest = max(waiting, key=lambda each: each.step)
    same = [
        each
        for each in waiting
        if (each.signature.unnumbered, each.missing) == (newest.signature.unnumbered, newest.missing)
    ]
    newest = min(same, key=lambda each: each.step)  # of unnamed tensors several may wait
    if newest.step < 1:
        return ""
    own, late, number = list(newest.submitted), newest.missing, newest.step
    text = (
        f"{ranks_text(late)} took {number} step{'s' * (number > 1)}, {ranks_text(own)} {'are' if own[1:] else 'is'} in "
        f"{'their' if own[1:] else 'its'} {ordinal(number + 1)} ({newest.signature.text})"
    )
    elsewhere = any(rank in each.submitted for each in waiting for rank in late)
    return text + (": do all ranks have equally many batches?" if elsewhere else "")


def ordinal(number: int) -> str:
    """Such as 1st, 12th, 22nd."""
    teen = 10 <= number % 100 < 20
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def report(text: str, queried: Sequence[int], replies: Mapping[int, StackReply], *, stacks: bool = True) -> str:
    """The headline, and each rank's reply, with or without its stack."""
    parts = [text]
    for rank in queried:
        reply = replies.get(rank)
        if reply is None:
            parts.append(f"rank {rank} does not answer: {SILENT}")
        else:
            parts.append(f"rank {rank} {reply.doing}" + (f"; it is here:\n{reply.stack.rstrip()}" if stacks else ""))
    return "\n".join(parts)
