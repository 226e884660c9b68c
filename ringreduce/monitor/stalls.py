"""Who waits for whom, and what the others do instead: watched by each engine, told to ringrun, or else on stderr.

A tensor that some ranks have given and others not waits at its coordinator, which asks the missing ranks what they do:
their last submission, and the Python stack of the thread that called init(). A missing rank has nothing to wait for,
so it looks for control messages once a second only; so does a coordinator that is missing itself, of which a rank that
waits for it asks to look. A rank that does not answer is stopped, or holds the interpreter in C code.

Source: Horovod's stall inspector, which names the ranks.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringreduce.engine.coordinator import Waiting
from ringreduce.engine.process_set import ProcessSetState
from ringreduce.engine.protocol import Failure, StackReply, StackRequest, StallProbe, encode
from ringreduce.engine.signature import PACKAGE, Signature, ranks_text, tensor_text
from ringreduce.log import LOGGER
from ringreduce.monitor.launcher_link import tell_launcher

if TYPE_CHECKING:
    from ringreduce.engine.engine import Engine

ANSWER_S = 3.0
"""So long a rank has to answer: three times as long as it may rest."""
NAMED = 3
"""So many tensors are named; of others only the number is told."""
ASKED = 8
"""So many of the missing ranks are asked what they do."""
GLANCES = 20
"""Looks per `stall_check_s`."""


class Inquiry(NamedTuple):
    """A report in the making: the coordinator has asked, and gathers answers."""

    number: int
    state: ProcessSetState
    headline: str
    asked: tuple[int, ...]
    until_s: float
    answers: dict[int, StackReply]


class StallWatch:
    """One engine's; used by its thread only."""

    def __init__(self, engine: Engine, init_thread: int) -> None:
        """init_thread: the identifier of the thread whose stack tells what this rank does."""
        self._engine = engine
        self._init_thread = init_thread
        settings = engine.settings
        self._check_s = min(filter(None, (settings.stall_check_s, settings.stall_abort_s)), default=0.0)
        self._next_look_s = 0.0
        self._reported: dict[int, float] = {}
        """By process set: how long something had been stuck when it was reported last."""
        self._inquiry: Inquiry | None = None
        self._questions = 0
        self._looks: dict[int, float] = {}
        """By process set: when its coordinator was asked to look, and has not answered yet."""
        self._silent: set[int] = set()
        self._called: set[int] = set()
        """The process sets of which another rank said that it has waited long."""
        self.attentive = False
        """True while something is stuck: the engine must not sleep without end."""

    def look(self) -> None:
        """Find what is stuck, ask, report, give up. Called when nothing moves."""
        now = time.monotonic()
        if not self._check_s or now < self._next_look_s:
            return
        self._next_look_s = now + self._check_s / GLANCES
        if self._inquiry is not None:
            missing = [rank for rank in self._inquiry.asked if rank not in self._inquiry.answers]
            if not missing or now > self._inquiry.until_s:
                self._report(self._inquiry)
                self._inquiry = None
        stuck = [self._look_at(state, now) for state in list(self._engine.states.values())]
        self.attentive = any(stuck) or self._inquiry is not None or bool(self._called)

    def _look_at(self, state: ProcessSetState, now: float) -> bool:
        """Deal with one process set; True when something is stuck in it."""
        if state.busy:
            return self._look_at_operation(state, now - state.moved_s)
        if state.coordinator is not None:
            waiting = state.coordinator.waiting(self._check_s)
            if state.coordinator.oldest_s() is None:
                self._called.discard(state.number)
            return bool(waiting) and self._look_at_waiting(state, waiting, now)
        oldest = next((each for key, each in state.pending.items() if key != "join.join"), None)
        if oldest is None or now - oldest.submitted_s < self._check_s:
            self._looks.pop(state.number, None)
            return False
        self._ask_the_leader(state, now, now - oldest.submitted_s)
        return True

    def _look_at_operation(self, state: ProcessSetState, stuck_s: float) -> bool:
        """An operation that all have begun does not move on: some rank is stopped, or its engine cannot run."""
        if stuck_s < self._check_s:
            return False
        first = next(iter(state.running.values()), None)
        what = "an operation" if first is None else f"{first.signature.kind} {first.signature.name!r}"
        text = (
            f"{what} is under way, and has not moved for {stuck_s:.0f} s; rank {self._engine.transport.rank} waits for "
            f"rank {state.stuck_on()}"
        )
        if self._is_due(state, stuck_s) and state.coordinator is not None:
            self._ask(state, text, state.members)
        if self._is_over(stuck_s):
            self._engine.fail_everything(text)
        return True

    def _look_at_waiting(self, state: ProcessSetState, waiting: Sequence[Waiting], now: float) -> bool:
        stuck_s = now - waiting[0].since_s
        if self._is_due(state, stuck_s):
            missing = sorted({rank for each in waiting for rank in each.missing})
            self._ask(state, headline(waiting, now), missing, [each.signature for each in waiting[:NAMED]])
        over = [each for each in waiting if self._is_over(now - each.since_s)]
        if over and state.coordinator is not None:
            failures = [Failure(each.signature.key, "StalledError", headline([each], now)) for each in over]
            self._engine.spread(state, state.coordinator.give_up(failures))
        return True

    def _is_due(self, state: ProcessSetState, stuck_s: float) -> bool:
        """Report when it has been stuck for the time that is set, twice that, four times that and so on."""
        if self._inquiry is not None or not self._engine.settings.stall_check_s:
            return False
        last = self._reported.get(state.number, 0.0)
        if stuck_s < last:  # something else than what was reported
            last = 0.0
        if stuck_s < 2 * last:
            return False
        self._reported[state.number] = stuck_s
        return True

    def _is_over(self, stuck_s: float) -> bool:
        limit_s = self._engine.settings.stall_abort_s
        return bool(limit_s) and stuck_s >= limit_s

    # Asking

    def _ask(self, state: ProcessSetState, text: str, ranks: Sequence[int], stalled: Sequence[Signature] = ()) -> None:
        """Ask what the ranks do; the report is written when they have answered, or have not in time."""
        self._questions += 1
        kind = stalled[0].kind if stalled else ""
        question = StackRequest(self._questions, state.number, kind, tuple(each.name for each in stalled))
        own = self._engine.transport.rank
        asked = tuple(ranks[:ASKED])
        inquiry = Inquiry(self._questions, state, text, asked, time.monotonic() + ANSWER_S, {})
        for rank in asked:
            if rank == own:
                inquiry.answers[rank] = self._answer(question)
            else:
                self._engine.transport.send_control(encode(question), rank)
        self._inquiry = inquiry

    def _ask_the_leader(self, state: ProcessSetState, now: float, waited_s: float) -> None:
        """The coordinator may sleep, since it waits for nothing itself; if it does not answer either, tell that."""
        asked = self._looks.get(state.number)
        if asked is None:
            self._looks[state.number] = now
            self._engine.transport.send_control(encode(StallProbe(state.number, waited_s)), state.leader)
        if asked and now - asked > ANSWER_S:
            self._looks[state.number] = 0.0
            self._silent.add(state.number)
            own = self._engine.transport.rank
            self._tell(
                f"rank {own} has waited for {waited_s:.0f} s; rank {state.leader}, which coordinates, does not answer: "
                "it is stopped, or in C code that holds the interpreter"
            )
        if state.number in self._silent and self._is_over(waited_s):
            self._engine.fail_everything(f"rank {state.leader}, which coordinates, does not answer")

    def read(self, source: int, message: StallProbe | StackRequest | StackReply) -> None:
        """What another rank's watch wrote."""
        if isinstance(message, StallProbe):
            state = self._engine.states.get(message.process_set)
            if state is not None and state.coordinator is not None:
                state.coordinator.has_waited(message.waited_s)
                self._called.add(message.process_set)
                self.attentive = True
            self._next_look_s = 0.0
            self._engine.transport.send_control(encode(StackReply(-message.process_set, "", "")), source)
        elif isinstance(message, StackRequest):
            self._engine.transport.send_control(encode(self._answer(message)), source)
        elif message.number <= 0:  # a coordinator looks
            self._looks[-message.number] = 0.0
            self._silent.discard(-message.number)
        elif self._inquiry is not None and message.number == self._inquiry.number:
            self._inquiry.answers[source] = message
            self._next_look_s = 0.0

    def _answer(self, question: StackRequest) -> StackReply:
        return StackReply(question.number, self._engine.doing(question), stack_of(self._init_thread))

    def _report(self, inquiry: Inquiry) -> None:
        told, alone = (
            report(inquiry.headline, inquiry.asked, inquiry.answers, stacks=stacks) for stacks in (False, True)
        )
        self._tell(told, alone)

    def _tell(self, text: str, alone: str = "") -> None:
        """Tell ringrun, which shows the stacks of all ranks; without it log the text, or what is said `alone`."""
        if not tell_launcher(self._engine.settings.error_file, text):
            LOGGER.warning(f"stalled: {alone or text}")


def stack_of(thread: int) -> str:
    """Where a thread of this process is, down to the line that called this package."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its main thread has ended\n"
    frames = list(traceback.extract_stack(frame))
    while len(frames) > 1 and frames[-1].filename.startswith(PACKAGE):
        frames.pop()
    return "".join(traceback.format_list(frames))


def headline(waiting: Sequence[Waiting], now: float) -> str:
    """What waits, for how long, and who has given it."""
    first = waiting[0]
    shapes = ", ".join(map(tensor_text, first.signature.tensors[:NAMED]))
    text = f"{first.signature.kind} {first.signature.name!r}" + (f" ({shapes})" if shapes else "")
    if len(waiting) > 1:
        names = ", ".join(repr(each.signature.name) for each in waiting[1:NAMED])
        more = len(waiting) - NAMED
        text += f", and {names}" + (f" and {more} more" if more > 0 else "")
    by_line: dict[str, list[int]] = {}
    for rank, line in sorted(first.given.items()):
        by_line.setdefault(line, []).append(rank)
    given = [f"{ranks_text(ranks)} ({line})" for line, ranks in list(by_line.items())[:NAMED]]
    others = f" and in {len(by_line) - NAMED} more lines" if len(by_line) > NAMED else ""
    return (
        f"{text}: waiting for {now - first.since_s:.0f} s; given by {', '.join(given)}{others}; "
        f"not by {ranks_text(first.missing)}. All ranks must submit it"
    )


def report(text: str, asked: Sequence[int], answers: Mapping[int, StackReply], *, stacks: bool = True) -> str:
    """The headline, and what each rank answered, with its stack or without."""
    parts = [text]
    for rank in asked:
        answer = answers.get(rank)
        if answer is None:
            parts.append(f"rank {rank} does not answer: it is stopped, or in C code that holds the interpreter")
        else:
            parts.append(f"rank {rank} {answer.doing}" + (f"; it is here:\n{answer.stack.rstrip()}" if stacks else ""))
    return "\n".join(parts)
