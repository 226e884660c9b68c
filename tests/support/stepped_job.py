"""A job of whole engines in one thread: a schedule says which rank calls, which polls, and which message arrives next.

    programs = [[Call("sum", "a"), Call("leave")]] * 2
    SteppedJob([0, 0], programs).run([Step("call", 0), Step("poll", 0), Step("arrive", 1), Step("poll", 1)])

Real: engines, their collectives, control messages as bytes. Simulated: the wires, each of which keeps its order, and
when ranks touch shared memory: at a fence of one rank, another may poll.

When the schedule is over, all that is left happens in turn. Whoever then waits for a call that another rank never makes
gives up, and leaves. What must hold is checked on the way; an AssertionError says what does not.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.collectives.ops import Sum
from ringreduce.engine.engine import Engine
from ringreduce.errors import CollectiveError, MismatchError, PeerLostError
from ringreduce.execution.host import HostResources, window_bytes
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.protocol import decode
from ringreduce.runtime.arguments import details_of
from ringreduce.settings import Settings
from ringreduce.transport.base import ControlMessage
from ringreduce.transport.threads import ThreadNetwork, ThreadTransport
from ringreduce.transport.window import Window
from ringreduce.transport.world import World

SUM = details_of(Sum, 1.0, 1.0)
LEFT = "it called shutdown()"
LATE_S = 60.0
ROUND = ("call", "arrive", "poll")
MOST_ROUNDS = 2000


class Call(NamedTuple):
    """What a rank's program calls. It waits for all but sums and barriers before it calls anything else."""

    kind: str  # sum, barrier, add, remove, join; at its end leave, when nothing of its own is pending, or leave_now
    name: str | None = None
    process_set: int = 0
    length: int = 1
    waits: bool = False  # for its result, too
    number: int = 0  # of the set that is added or removed
    ranks: tuple[int, ...] = ()  # of the set that is added

    def __repr__(self) -> str:
        shown = [f"{key}={value!r}" for key, value in self._asdict().items() if value != self._field_defaults.get(key)]
        return f"Call({', '.join(shown)})"


class Step(NamedTuple):
    """What happens next to a rank: it may call, poll, get a message, or have waited for long (late)."""

    what: str
    rank: int
    which: int = 0  # of the calls that it may make, or of the ranks of which there are messages
    fence: int = -1  # of a poll: at which the other rank polls, too
    other: int = 0

    def __repr__(self) -> str:
        more = f", {self.which}" if self.which else ""
        more += f", fence={self.fence}, other={self.other}" if self.fence >= 0 else ""
        return f"Step({self.what!r}, {self.rank}{more})"


class Made(NamedTuple):
    """A call that a rank has made.  value: of a sum's elements, or the number of the process set."""

    rank: int
    call: Call
    handle: Submission
    value: int
    array: Any

    @property
    def outcome(self) -> str:
        """How it ended: done, mismatch, joined, or why its process set was closed."""
        error = self.handle._error
        if error is None:
            return "done" if self.handle.ended else "pending"
        text = str(error)
        if isinstance(error, MismatchError):
            return "mismatch"
        if isinstance(error, PeerLostError):
            assert f"rank {error.lost_ranks[0]} has left the job: {LEFT}; all ranks must" in text, text
            return f"rank {error.lost_ranks[0]} left"
        if f"was pending when this rank left the job ({LEFT}); synchronize" in text:
            return f"rank {self.rank} left"
        assert type(error) is CollectiveError
        if "called join(), and a joined rank can take part in allreduce only" in text:
            return "joined"
        return text[text.find("process set") :]


class _Wire(ThreadTransport):
    """Control messages are on their way until a step says that they arrive."""

    def __init__(self, network: ThreadNetwork, rank: int, sent: defaultdict[tuple[int, int], deque[bytes]]) -> None:
        super().__init__(network, rank)
        self._sent = sent
        self.arrived: list[ControlMessage] = []

    def send_control(self, content: bytes, destination: int) -> None:
        """See `EngineTransport.send_control`."""
        self._sent[self.rank, destination].append(content)

    def recv_control(self) -> list[ControlMessage]:
        """See `EngineTransport.recv_control`."""
        arrived, self.arrived = self.arrived, []
        return arrived


class Rank:
    """A rank's engine, and what is left of its program."""

    def __init__(self, job: SteppedJob, number: int, window: Window, program: Sequence[Call]) -> None:
        self.job, self.number, self.left = job, number, list(program)
        self.wire = _Wire(job.network, number, job.sent)
        world = World(number, len(job.hosts), job.hosts)
        with mock.patch.object(threading, "Thread", return_value=mock.Mock(spec=["start"])):  # the job polls
            self.engine = Engine(world, self.wire, job.settings, HostResources(world, self.wire, job.settings, window))
        self.negotiation = self.engine.negotiation
        self.negotiation._next_check_s = math.inf  # when anything is late, a step says
        self._run, self.negotiation._run = self.negotiation._run, self._runs
        self.made: list[Made] = []
        self.sets = {0: 0}  # the numbers of process sets, by those of the program
        self.times: Counter[Any] = Counter()  # by set, epoch and key: how often it was called
        self.epochs: Counter[int] = Counter()  # by set: how often this rank has joined
        self.leaving = self.ended = False
        self.hasty = False  # it has left with calls pending, perhaps

    def _runs(self, state: Any, submissions: Sequence[Submission], divisor: int) -> None:
        keys = [each.key for each in submissions]
        self.job.story.append(f"    rank {self.number} runs {', '.join(keys)} of set {state.number}")
        self.job.ran[state.number][self.number] += keys
        self._run(state, submissions, divisor)

    @property
    def pending(self) -> list[Made]:
        """Of its calls, those that have not ended."""
        return [each for each in self.made if not each.handle.ended]

    def has_joined(self, number: int) -> bool:
        """True while it waits for the others to join, too."""
        return any(each.call.kind == "join" and each.call.process_set == number for each in self.pending)

    def may_call(self) -> list[int]:
        """Which of its calls it may make now: each name in order, and unnamed ones."""
        pending, found = self.pending, []
        if self.left and self.left[0].kind == "leave_now":
            return [0]
        if any(each.call.waits or each.call.kind not in ("sum", "barrier") for each in pending):
            return []
        held = {(each.call.process_set, each.call.name) for each in pending if each.call.name}
        for number, call in enumerate(self.left):
            if call.kind not in ("sum", "barrier"):
                return found or ([0] if number == 0 and not (call.kind == "leave" and pending) else [])
            if (call.process_set, call.name) not in held:
                found.append(number)
            held.add((call.process_set, call.name))
        return found

    def call(self, which: int) -> bool:
        """Make one of those calls."""
        free = self.may_call()
        if not free:
            return False
        call = self.left.pop(free[which % len(free)])
        self.job.story.append(f"rank {self.number} calls {call}")
        if call.kind.startswith("leave"):
            self.leaving, self.left, self.hasty = True, [], call.kind == "leave_now"
            self.engine._inbox.call_soon(lambda: self.engine._begin_leaving(LEFT))
        else:
            self._learn_number()
            number = call.number if call.kind == "remove" else call.process_set
            if number in self.sets:  # else it was not added
                self._submit(call, self.sets[number])
        return True

    def _learn_number(self) -> None:
        """Of the set that was added last."""
        if self.made and self.made[-1].call.kind == "add" and self.made[-1].outcome == "done":
            (_, call, handle, *_) = self.made[-1]
            self.sets[call.number] = handle.payload
            self.job.members[handle.payload] = call.ranks

    def _submit(self, call: Call, number: int) -> None:
        """As the functions of the package do.  number: of the process set, as the engine knows it."""
        # a power of two for each rank, so that a sum says whose elements it is made of, and of which calls
        value = (1 << self.number) + 1000 * len(self.made) if call.kind == "sum" else number
        array = np.full(call.length, value, np.int64)
        buffers = [numpy_buffer(array, True)] if call.kind == "sum" else []
        kind = {"sum": "allreduce", "add": "add_process_set", "remove": "remove_process_set"}.get(call.kind, call.kind)
        details = {"sum": SUM, "add": (("ranks", call.ranks),), "remove": (("process_set", number),)}
        on = 0 if call.kind == "remove" else number
        try:
            handle = self.engine.submit(
                *(kind, "join" if kind == "join" else call.name, on),
                details=details.get(call.kind, ()),
                inputs=buffers,
                outputs=buffers,
                payload=False,
                waits=call.waits,
                line=f"call {len(self.made)}",
            )
        except PeerLostError as error:
            self.job.refused += error.lost_ranks
            return
        assert isinstance(handle, Submission)
        self.made.append(Made(self.number, call, handle, value, array))
        group = on, self.epochs[on], handle.key
        self.times[group] += 1
        meets = (*group, self.times[group])
        self.job.operations[meets].append(self.made[-1])
        self.epochs[on] += call.kind == "join"

    def poll(self) -> bool:
        """One round of the engine's thread."""
        if self.ended:
            return False
        self.ended = self.engine.ending.may_end(self.engine.process_sets.all())
        moved = self.ended or self.engine._polling.poll()
        for number, state in self.negotiation.states.items():
            negotiator = state.negotiator
            held = dict(negotiator.cache)
            assert self.job.caches.setdefault((number, negotiator.applied), held) == held, "caches differ"
        return moved

    def late(self, now_s: float, overdue_s: float) -> None:
        """What is odd and waits has waited for long."""
        for state in self.negotiation.states.values():
            state.negotiator.check(now_s, overdue_s)


class SteppedJob:
    """Its ranks, and the control messages on their way.  overdue_s: infinite: ranks may be late for as long as ever."""

    def __init__(
        self, hosts: Sequence[int], programs: Sequence[Sequence[Call]], capacity: int = 4, overdue_s: float = 0.0
    ) -> None:
        self.hosts, self._overdue_s = tuple(hosts), overdue_s
        self.settings = Settings(
            cycle_time_ms=0.0,
            cache_capacity=capacity,
            stall_check_s=0.0,
            fusion_buffer_bytes=4096,
            fusion_slot_bytes=512,
            shared_slot_bytes=256,
        )
        self.network = ThreadNetwork(len(hosts))
        self.sent: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.members: dict[int, tuple[int, ...]] = {0: tuple(range(len(hosts)))}
        self.operations: defaultdict[Any, list[Made]] = defaultdict(list)
        """By set, epoch, key, and how often that was called: the ranks' calls, which meet."""
        self.ran: defaultdict[int, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        """By set and rank: keys, in order."""
        self.caches: dict[tuple[int, int], Any] = {}
        self.refused: list[int] = []  # of calls that were: which rank had left
        self.story: list[str] = []
        self._now_s = time.monotonic()
        self._fences_left, self._at_fence = -1, 0
        blocks = [np.zeros(window_bytes(self.settings), np.uint8) for _ in hosts]
        self.ranks: list[Rank] = []
        for number, program in enumerate(programs):
            local = [blocks[each] for each, host in enumerate(hosts) if host == hosts[number]]
            self.ranks.append(Rank(self, number, Window(local, fence=self._fence), program))

    def _fence(self) -> None:
        """Any rank's, at which another may poll."""
        self._fences_left -= 1
        if self._fences_left == -1 and self._at_fence >= 0:
            self.ranks[self._at_fence].poll()

    def run(self, schedule: Sequence[Step]) -> None:
        """These steps, then all that are left; and what must hold."""
        for step in schedule:
            self._step(step)
        waited = False
        for _ in range(MOST_ROUNDS):
            moved = any([self._step(Step(what, each.number)) for each in self.ranks for what in ROUND])  # noqa: C419, all
            if all(each.ended for each in self.ranks):
                return self._check()
            if not moved and waited:
                self._give_up()
            waited = not moved and not waited
            for rank in self.ranks * 2 * waited:
                self._step(Step("late", rank.number))
        raise AssertionError("ranks are busy for ever")

    def _step(self, step: Step) -> bool:
        """True when anything happened."""
        rank = self.ranks[step.rank]
        if step.what == "call":
            return rank.call(step.which)
        if step.what == "arrive":
            return self._arrive(rank, step.which)
        if step.what == "late":
            self._now_s += LATE_S
            rank.late(self._now_s, self._overdue_s)
            return False
        self._fences_left, self._at_fence = step.fence, step.other if step.other != step.rank else -1
        moved = rank.poll()
        self._fences_left = -1
        return moved

    def _arrive(self, rank: Rank, which: int) -> bool:
        full = [source for source in self.ranks if self.sent[source.number, rank.number]]
        if not full or rank.ended:
            return False
        source = full[which % len(full)].number
        content = self.sent[source, rank.number].popleft()
        rank.wire.arrived.append(ControlMessage(source, content))
        self.story.append(f"  {type(decode(content)).__name__} arrives from {source} at {rank.number}")
        return True

    # What must hold

    def _give_up(self) -> None:
        """Nothing moves: whoever waits does so for a call that another rank has not made, and one of them leaves."""
        for (number, *_), calls in self.operations.items():
            members = [self.ranks[each] for each in self.members[number]]
            callers = [each.rank for each in calls]
            missing = [each for each in members if each.number not in callers and not each.has_joined(number)]
            is_over = not missing or any(each.leaving for each in members)
            for each in calls:
                assert each.handle.ended or not is_over, f"rank {each.rank} waits for ever in {each.call} of {callers}"
        stuck = [rank for rank in self.ranks if not rank.leaving]
        assert stuck, f"{[rank.number for rank in self.ranks if not rank.ended]} wait for ever in shutdown()"
        self.story.append(f"rank {stuck[0].number} gives up")
        stuck[0].left = [Call("leave_now")]

    def _check(self) -> None:
        """At the end."""
        assert not any(self.sent.values()), "a message would reach the next engine of this process"
        assert not any(rank.wire.arrived for rank in self.ranks), "a message would reach the next engine"
        assert all(self.ranks[each].leaving for each in self.refused), "only sets that a rank has left refuse calls"
        for number, by_rank in self.ran.items():
            assert len({tuple(by_rank[each]) for each in self.members[number]}) == 1, (
                f"orders in set {number}: {by_rank}"
            )
        for group, calls in self.operations.items():
            self._check_operation(group, calls)

    def _check_operation(self, group: Any, calls: Sequence[Made]) -> None:
        """It ended alike on all ranks that have called it, as it should, and with the right result."""
        number, epoch, *_ = group
        members = [self.ranks[each] for each in self.members[number]]
        alike = len({(each.call.kind, each.call.length) for each in calls}) == 1
        allowed = {"done" if alike else "mismatch"}
        if any(each[0].value == number for each in self.operations.values() if each[0].call.kind == "remove"):
            allowed.add(f"process set {number} was removed")
        if (number, epoch, "join.join", 1) in self.operations and calls[0].call.kind != "sum":
            allowed.add("joined")
        callers = {each.rank for each in calls}
        allowed |= {f"rank {each.number} left" for each in members if each.hasty or callers.isdisjoint({each.number})}
        outcomes = {each.rank: each.outcome for each in calls}
        assert len(set(outcomes.values())) == 1, f"{group}: {outcomes}"
        assert allowed.issuperset(outcomes.values()), f"{group}: {outcomes}, but allowed are {allowed}"
        if outcomes[calls[0].rank] != "done":
            return
        total = sum(each.value for each in calls)
        for each in calls:
            assert each.handle.payload == calls[0].handle.payload, f"{group}: {each.handle.payload} on rank {each.rank}"
            if each.call.kind == "sum":
                assert each.array.tolist() == [total] * each.call.length, f"{group}: {each.array} on rank {each.rank}"
