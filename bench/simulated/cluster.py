"""Ranks in virtual time, on one thread: what hundreds of hosts do, computed by the code that will run.

    cluster = Cluster([0, 0, 1, 1], Costs(latency_us=20, gbits=100))
    reduction = cluster.reduction(Sum, TABLE["float32"], 4)
    cluster.run(lambda rank: ring.allreduce(arrays[rank], cluster.transport(rank), reduction))
    print(cluster.seconds)

Every rank runs the real generator. It has a clock, which messages and kernels advance, and yields what it waits for; a
queue of events resumes it when that is done. Equal costs and seeds give equal times, to the last bit.

    a message     message_us of its sender's time, and as much of its receiver's; then
                  sender's wire  ->  latency_us  ->  link, if it is slower  ->  receiver's wire
    a wire        each way on its own, shared equally by the flows of its host; a flow is two ranks' messages, in order
    a kernel      reads and writes bytes at twice copy_gbs, as a copy does: sums, and copies to shared memory

Inside a host memory is shared as in reality: `region` is the real one, but its flags are seen when they are set.

Not modelled: losses, switches, a host's limits beside its wire, MPI's handshakes and copies, scaling and conversion. A
send is done when it has left the host.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import heapq
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.arrays import buffer
from ringreduce.collectives.ops import Reduction
from ringreduce.errors import CollectiveError
from ringreduce.transport.base import ControlMessage, Steps, Work
from ringreduce.transport.window import FLAGS_BYTES, SLOTS

from .memory import Leaf, SimulatedRegion
from .wire import Wire

OUT, IN = "out", "in"  # the ways of a host's wire
Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Costs:
    """What takes how long. 1 GB/s is 1000 bytes per µs, 8 Gbit/s."""

    latency_us: float = 20.0  # between hosts
    gbits: float = 100.0  # of a host's wire, each way
    link_gbits: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)  # slower: from host, to host
    local_us: float = 1.0  # between two ranks of a host
    local_gbs: float = 10.0
    message_us: float = 5.0  # of a rank's time, to send one message or to receive it
    copy_gbs: float = 20.0  # of a rank, while all ranks of its host copy
    jitter_us: float = 0.0  # mean of a random delay of each message between hosts


class _Message(Leaf):
    __slots__ = ("array", "arrived_us", "at_most", "key", "last_us", "match", "nbytes")

    def __init__(self, cluster: Cluster, rank: int, peer: int, array: Any, key: tuple[int, int, int]) -> None:
        super().__init__(cluster, rank, peer)
        self.array, self.nbytes, self.key = array, int(array.nbytes), key
        self.arrived_us: float | None = None  # a send's
        self.last_us = 0.0  # when its last byte can be there at the earliest
        self.match: _Message | None = None  # a send's receive
        self.at_most = False  # a receive's


class Cluster:
    """Simulated ranks; rank r is on host hosts[r]. `seconds`: when the last one has ended."""

    def __init__(
        self,
        hosts: Sequence[int],
        costs: Costs = Costs(),
        *,
        seed: int = 0,
        carries: bool = True,
        mirrors: int = 1,
        alike: bool = False,
    ) -> None:
        """carries: messages and kernels move data; False: they only take time, and memory need not be real.
        mirrors: each rank stands for so many of its host, which do the same at the same time.
        alike:   rank 0 stands for all: each does the same at the same time, counted from itself, as around a ring. So
                 what it sends first is like what it receives first, and arrives there. Needs carries=False.
        """
        self.hosts, self.costs, self.size, self.carries, self.mirrors = hosts, costs, len(hosts), carries, mirrors
        self.alike, self._simulated = alike, range(1 if alike else self.size)
        self.clocks_us = [0.0] * self.size
        self.now_us = 0.0  # up to here all events have happened
        self.current = 0  # the rank that runs; its clock may be ahead, until it yields
        self.sent: Counter[tuple[int, int]] = Counter()  # messages, by source and destination
        self.sent_bytes: Counter[tuple[int, int]] = Counter()  # between hosts, by these
        self.controls = [0] * self.size  # control messages that each rank has sent
        self.handled = [0] * self.size  # and those that it has received
        self._random = random.Random(seed)  # noqa: S311
        self._members: defaultdict[int, list[int]] = defaultdict(list)
        for rank, host in enumerate(hosts):
            self._members[host].append(rank)
        rates = {(host, way): costs.gbits for host in set(hosts) for way in (OUT, IN)} | dict(costs.link_gbits)
        self._wires = {wire: Wire(gbits * 125, self._later) for wire, gbits in rates.items()}
        self._sends: defaultdict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int, int], deque[_Message]] = defaultdict(deque)
        self._boards: dict[int, tuple[list[Any], dict[Any, list[Any]]]] = {}  # by host: memory, and flags
        self._inboxes: list[deque[tuple[float, ControlMessage]]] = [deque() for _ in hosts]
        self._mail: list[Leaf | None] = [None] * self.size
        self._events: list[Event] = []
        self._number = itertools.count()
        self._turn = [0] * self.size
        self._steps: list[Steps[Any]] = []
        self._waits: list[Work | None] = [None] * self.size
        self._results: dict[int, Any] = {}

    @property
    def seconds(self) -> float:
        """The virtual time that has passed."""
        return max(self.clocks_us) / 1e6

    def run(self, program: Callable[[int], Steps[Any]]) -> list[Any]:
        """Run program(rank) on all ranks; returns the results. Raises CollectiveError for ranks that wait for ever."""
        self._steps, self._results = [program(rank) for rank in self._simulated], {}
        for rank in self._simulated:
            self._waits[rank] = None
            self._later(self.clocks_us[rank], self._resume, rank, self._turn[rank])
        gc.disable()  # a million objects live, none of them in cycles
        try:
            events, first = self._events, heapq.heappop
            while events:
                now_us, _, function, arguments = first(events)
                self.now_us = now_us
                function(now_us, *arguments)
        finally:
            gc.enable()
        stuck = [rank for rank in self._simulated if rank not in self._results]
        if stuck:
            waits = "; ".join(f"rank {rank} waits for rank {_peer(self._waits[rank])}" for rank in stuck[:8])
            raise CollectiveError(f"deadlock of {len(stuck)} of {self.size} simulated ranks: {waits}")
        return [self._results[rank] for rank in self._simulated]

    def transport(self, rank: int) -> SimulatedTransport:
        """The transport of one rank."""
        return SimulatedTransport(self, rank)

    def region(self, rank: int, slot_bytes: int) -> SimulatedRegion:
        """One rank's view of the memory that its host's ranks share."""
        members, host = self._members[self.hosts[rank]], self.hosts[rank]
        if host not in self._boards:
            count = len(members) * self.mirrors
            memory = [np.zeros(FLAGS_BYTES + SLOTS * slot_bytes, np.uint8) for _ in range(count if self.carries else 1)]
            self._boards[host] = (memory if self.carries else memory * count), {}
        return SimulatedRegion(self, rank, members, slot_bytes, *self._boards[host])

    def reduction(self, *fields: Any) -> Reduction:
        """A `Reduction` whose kernels take the time of the rank that runs."""
        cluster = self

        class Charged(Reduction):
            def combine(self, target: Any, *sources: Any) -> None:
                cluster.charge(1.5 * target.nbytes * len(sources))
                if cluster.carries:
                    super().combine(target, *sources)

            def reduce_parts(self, parts: Sequence[Any], out: Any) -> None:
                cluster.charge((sum(part.nbytes for part in parts) + out.nbytes) / 2)
                if cluster.carries:
                    super().reduce_parts(parts, out)

            def reduce_to_two(self, parts: Sequence[Any], out: Any, copy: Any) -> None:
                self.reduce_parts(parts, out)
                cluster.charge(copy.nbytes)
                if cluster.carries:
                    copy[...] = out

        return Charged(*fields)

    def charge(self, nbytes: float) -> None:
        """Let the rank that runs copy so many bytes."""
        self.clocks_us[self.current] += nbytes / (1e3 * self.costs.copy_gbs)

    # Events

    def _later(self, at_us: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at_us, next(self._number), function, arguments))

    def _resume(self, now_us: float, rank: int, turn: int) -> None:
        """Run a rank until it has to wait, unless it has run since this was planned."""
        if turn != self._turn[rank]:
            return
        self._turn[rank] = turn = turn + 1
        self.current = rank
        if self.clocks_us[rank] < now_us:
            self.clocks_us[rank] = now_us
        work, steps = self._waits[rank], self._steps[rank]
        try:
            while work is None or work.done():
                work = next(steps)
        except StopIteration as stop:
            self._results[rank], self._waits[rank] = stop.value, None
            return
        self._waits[rank] = work
        known = []
        for leaf in _leaves(work):
            if leaf.at_us is None:
                leaf.waiter = turn
            else:
                known.append(leaf.at_us)
        if known:
            self._later(max(min(known), self.clocks_us[rank]), self._resume, rank, turn)

    def finish(self, leaf: Leaf, at_us: float) -> None:
        """It is now known when this is done."""
        leaf.at_us = at_us
        if leaf.waiter is not None:
            self._later(max(at_us, self.clocks_us[leaf.rank]), self._resume, leaf.rank, leaf.waiter)

    # Messages

    def send(self, rank: int, array: Any, peer: int, tag: int) -> _Message:
        """See `Transport.send`."""
        self.clocks_us[rank] += self.costs.message_us
        self.sent[rank, peer] += 1
        memory = buffer.message_bytes(array)
        message = _Message(self, rank, peer, memory.copy() if self.carries else memory, self._key(rank, peer, tag))
        receives = self._receives[message.key]
        if receives:
            message.match = receives.popleft()
        else:
            self._sends[message.key].append(message)
        self._leave(message)
        return message

    def receive(self, rank: int, array: Any, peer: int, tag: int, at_most: bool = False) -> _Message:
        """See `Transport.receive`."""
        self.clocks_us[rank] += self.costs.message_us
        message = _Message(self, rank, peer, buffer.message_bytes(array), self._key(peer, rank, tag))
        message.at_most = at_most
        sends = self._sends[message.key]
        if not sends:
            self._receives[message.key].append(message)
            return message
        send = sends.popleft()
        send.match = message
        if send.arrived_us is not None:
            self._deliver(send)
        return message

    def _key(self, source: int, destination: int, tag: int) -> tuple[int, int, int]:
        return (0, 0, tag) if self.alike else (source, destination, tag)

    def _leave(self, message: _Message) -> None:
        at_us, host = self.clocks_us[message.rank], self.hosts[message.rank]
        if len(self._members[host]) == 1:  # nobody else's message can come between
            self._transmit(at_us, message)
        else:
            self._later(at_us, self._transmit, message)

    def _transmit(self, now_us: float, message: _Message) -> None:
        """The message leaves its host."""
        costs, rank, peer = self.costs, message.rank, message.peer
        here, there = self.hosts[rank], self.hosts[peer]
        if here == there:
            self.finish(message, now_us)
            self._arrived(message, now_us + costs.local_us + message.nbytes / (1e3 * costs.local_gbs))
            return
        nbytes, flow = message.nbytes * self.mirrors, (rank, peer)
        self.sent_bytes[here, there] += nbytes
        delay_us = costs.latency_us
        if costs.jitter_us:
            delay_us += self._random.expovariate(1 / costs.jitter_us)
        link = self._wires.get((here, there))

        def left(at_us: float) -> None:
            self.finish(message, at_us)
            if link is None:
                message.last_us = at_us + delay_us
            else:
                link.enter(at_us, flow, nbytes, crossed)

        def crossed(at_us: float) -> None:
            self._later(at_us + delay_us, enter)

        def enter(at_us: float) -> None:
            self._wires[here if self.alike else there, IN].enter(
                at_us, flow, nbytes, lambda now_us: self._arrived(message, now_us)
            )

        self._wires[here, OUT].enter(now_us, flow, nbytes, left)
        if link is None:
            self._later(now_us + delay_us, enter)  # its first byte

    def _arrived(self, message: _Message, at_us: float) -> None:
        message.arrived_us = at_us = max(at_us, message.last_us)
        if message.match is not None:
            self._deliver(message)
        elif message.key[2] < 0:
            self._deliver_control(message)

    def _deliver(self, send: _Message) -> None:
        receive = send.match
        assert receive is not None
        assert send.arrived_us is not None
        fits = send.nbytes <= receive.nbytes if receive.at_most else send.nbytes == receive.nbytes
        if not fits and not self.alike:  # its chunks may differ by an element
            raise CollectiveError(
                f"rank {send.rank} sent {send.nbytes} bytes, but rank {receive.rank} expected {receive.nbytes}"
            )
        if self.carries:
            receive.array[: send.nbytes] = send.array
        self.finish(receive, send.arrived_us)

    # Control messages

    def send_control(self, rank: int, content: bytes, peer: int) -> None:
        """See `EngineTransport.send_control`."""
        self.clocks_us[rank] += self.costs.message_us
        self.controls[rank] += 1
        self._leave(_Message(self, rank, peer, np.frombuffer(content, np.uint8), (rank, peer, -1)))

    def _deliver_control(self, message: _Message) -> None:
        assert message.arrived_us is not None
        arrived = message.arrived_us, ControlMessage(message.rank, message.array.tobytes())
        self._inboxes[message.peer].append(arrived)
        mail = self._mail[message.peer]
        if mail is not None and mail.at_us is None:
            self.finish(mail, message.arrived_us)

    def recv_control(self, rank: int) -> list[ControlMessage]:
        """See `EngineTransport.recv_control`."""
        inbox, found = self._inboxes[rank], []
        while inbox and inbox[0][0] <= self.clocks_us[rank]:
            found.append(inbox.popleft()[1])
        self.handled[rank] += len(found)
        self.clocks_us[rank] += len(found) * self.costs.message_us
        return found

    def mail(self, rank: int) -> Work:
        """A `Work` that is done when a control message is there, or another rank has called `wake`."""
        mail = self._mail[rank] = Leaf(self, rank, rank)
        if self._inboxes[rank]:
            mail.at_us = self._inboxes[rank][0][0]
        return mail

    def wake(self, rank: int) -> None:
        """End the wait of a rank of this host for its mail: shared memory has changed."""
        mail = self._mail[rank]
        if mail is not None:
            at_us = self.clocks_us[self.current]
            if mail.at_us is None or mail.at_us > at_us:
                self.finish(mail, at_us)


class SimulatedTransport:
    """See `EngineTransport`; without sleep, since a simulated rank's generator waits for `Cluster.mail`."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.rank, self.size = rank, cluster.size
        self.send = functools.partial(cluster.send, rank)
        self.receive = functools.partial(cluster.receive, rank)
        self.send_control = functools.partial(cluster.send_control, rank)
        self.recv_control = functools.partial(cluster.recv_control, rank)


def _leaves(work: Work) -> list[Leaf]:
    found, works = [], [work]
    for each in works:  # which grows
        if isinstance(each, Leaf):
            found.append(each)
        else:
            works += [task.work for task in getattr(each, "tasks", ()) if task.work is not None]
    return found


def _peer(work: Work | None) -> object:
    return getattr(work, "peer", None)
