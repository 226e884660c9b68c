"""What a simulated job runs on: the plan of what happens to it, a clock, messages under way, and one thread at a time.

Each rank is a thread, and whoever waits looks for what happens next. Equal plans give equal runs.
"""

import heapq
import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

STEPS = 2  # of the training
TICK_S = 1e-3  # how long a message takes
STALL_S = 30.0
LONGEST_S = 400.0  # of virtual time
SOON = 30  # ticks: messages that are not later than others by more come together
FAILS = {"kill": -9, "exit0": 0, "exit7": 7, "raise": 1, "blame": 1}
"""How a rank may end by itself, and its exit code."""
CUTS = ("agent", "cut", "host")
"""Its agent is gone; the agent's link is, so that the rank ends a little later; all agents of its host are."""
HANGS = ("stop", "woken", "killed", "exit0")
"""It keeps others waiting: "stop" becomes "woken" or "killed" by what ringrun does about it."""
GONE = {*FAILS, *CUTS, "killed"}
FAILED = GONE - {"exit0"}


class Fault(NamedTuple):
    """What happens to a rank when it does something for the `when`th time."""

    rank: int
    when: int
    how: str


class Plan(NamedTuple):
    """A job, and what happens to it."""

    np: int = 3
    spares: int = 0
    faults: Sequence[Fault] = ()
    arrival: int | None = None  # after so many events hosts come
    hosts: Sequence[int] = ()  # by rank; by default one
    min_np: int = 1
    max_failures: int | None = None
    delays: Sequence[int] = ()  # of messages, in the order in which they are sent, in ticks; then 0
    step_s: float = 0.0  # how long all ranks compute in each step
    report_s: float = 5 * TICK_S  # from a death to the report of what the rank wrote

    @property
    def size(self) -> int:
        """How many ranks are started."""
        return self.np + self.spares

    @property
    def host_of(self) -> Sequence[int]:
        """By rank."""
        return tuple(self.hosts) or (0,) * self.size


def held_lock() -> threading.Lock:
    """Whoever acquires it waits for his turn; releasing it hands over."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Network:
    """The clock, and who runs; its `look` is what ringrun does when its wait is over, which ends at `until_s`."""

    def __init__(self, delays: Sequence[int]) -> None:
        self.now_s = 0.0
        self.until_s = math.inf
        self.sent = 0  # messages
        self.turns = 0  # how often a rank has waited
        self.ready: list[Any] = []  # ranks that have something to do
        self.is_over = False
        self.broken: BaseException | None = None
        self.main = held_lock()  # of the thread that began the job
        self._heap: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._delays = deque(delays)
        self._last_s: Counter[Any] = Counter()  # by link: when its last message arrives

    def delay(self) -> float:
        """Of the next message."""
        return TICK_S * (1 + (self._delays.popleft() if self._delays else 0))

    def later(self, after_s: float, function: Callable[..., Any], *arguments: Any) -> None:
        """Call it then."""
        heapq.heappush(self._heap, (self.now_s + after_s, next(self._numbers), function, arguments))

    def send(self, link: Any, function: Callable[..., Any], *arguments: Any, extra_s: float = 0.0) -> None:
        """Call it when a message has arrived; those of a link keep their order."""
        self.sent += 1
        at_s = self._last_s[link] = max(self._last_s[link], self.now_s + self.delay() + extra_s)
        heapq.heappush(self._heap, (at_s, next(self._numbers), function, arguments))

    def hand_over(self, mine: threading.Lock) -> None:
        """Let others run, until it is this one's turn."""
        self.turns += 1
        if (after := self.next_turn()) is not mine:
            after.release()
            mine.acquire()

    def next_turn(self) -> threading.Lock:
        """Whose turn it is: what happens meanwhile happens here."""
        try:
            while not self.is_over:
                if self.ready:
                    rank = self.ready.pop(0)
                    if rank.runs and not rank.stopped:
                        return rank.turn
                elif not self._pass_time():
                    break
        except BaseException as error:
            self.fail(error)
        return self.main

    def fail(self, error: BaseException) -> None:
        """Let the job end by this error, if it is the first."""
        self.broken = self.broken or error
        self.is_over = True

    def _pass_time(self) -> bool:
        """Do what comes next; False when nothing does."""
        at_s = min(self._heap[0][0] if self._heap else math.inf, self.until_s)
        if at_s > LONGEST_S:
            return False
        self.now_s = max(self.now_s, at_s)
        if self._heap and self._heap[0][0] <= at_s:
            _, _, function, arguments = heapq.heappop(self._heap)
            function(*arguments)
        else:
            self.look()
        return True
