"""The fake machine: streams are queues, and what is queued runs later, in an order that CUDA allows and nobody wants.

    lazy     nothing runs before somebody asks for it, and then only what that needs
    eager    everything runs as soon as it may
    random   some of it runs at every call, anywhere

Ranks are threads of one process here: the thread's name says which process of the real job it stands for (`process`).
Each has default streams of its own, and knows of the GPUs' work only what it has waited for itself. `one_process`: they
are what they are, threads that share all; other processes are real ones (processes.py), and have machines of their own,
which run as late. Races are looked for inside each.
"""

import collections
import contextlib
import itertools
import random
import re
import threading
import time

from tests.support.fake_cupy.memory import Allocation, Memory
from tests.support.fake_cupy.processes import POLL_S, Driver

WAIT_S = 20.0
WAIT_FOR_PROCESSES_S = 120.0
_handles = itertools.count()


class CUDARuntimeError(RuntimeError):
    """What the runtime raises; `status` is CUDA's number."""

    NAMES = {  # noqa: RUF012
        1: "cudaErrorInvalidValue: invalid argument",
        2: "cudaErrorMemoryAllocation: out of memory",
        100: "cudaErrorNoDevice: no CUDA-capable device is detected",
        101: "cudaErrorInvalidDevice: invalid device ordinal",
        201: "cudaErrorDeviceUninitialized: invalid device context",
        217: "cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices",
        400: "cudaErrorInvalidResourceHandle: invalid resource handle",
        600: "cudaErrorNotReady: device not ready",
        700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
        801: "cudaErrorNotSupported: operation not supported",
    }

    def __init__(self, status):
        super().__init__(self.NAMES.get(status, f"cudaError {status}"))
        self.status = status


class Operation:
    """Something queued on a stream. `after`: the operations of other streams that must be done before."""

    def __init__(self, stream, name, work, ranges, after, ready, known):
        self.stream, self.name, self.work, self.ranges = stream, name, work, ranges
        self.after, self.ready, self.known = after, ready, known
        self.number = stream.queued = stream.queued + 1
        self.done, self.clock, self.polls, self.ran_s = False, None, 0, None

    def __str__(self):
        return f"{self.name} (number {self.number} on {self.stream})"


class Stream:
    def __init__(self, pointer, number, device, process, blocking):
        self.pointer, self.number, self.device, self.process, self.blocking = pointer, number, device, process, blocking
        self.queue = collections.deque()
        self.queued = 0
        self.last = None  # the operation that was queued last
        self.clock = {}

    def __str__(self):
        name = {0: "the default stream", 2: f"default stream {self.number} of a thread"}.get(
            self.pointer, f"stream {self.number}"
        )
        return f"{name} of {self.process}, GPU {self.device}"


class Event:
    def __init__(self, flags, device, counters=None):
        self.flags, self.device = flags, device
        self.counters = counters  # for other processes, if they are real ones
        self.record = None  # the operation that was recorded last


class Machine:
    """GPUs, their memory, streams and events, and the threads' current devices."""

    def __init__(self, mode="lazy", seed=0, device_count=1, memory_bytes=8 << 30, one_process=False):
        if mode not in ("lazy", "eager", "random"):
            raise ValueError(mode)
        self.mode, self._random = mode, random.Random(seed)
        self.device_count, self.memory_bytes, self.one_process = device_count, memory_bytes, one_process
        self.changed = threading.Condition(threading.RLock())
        self.memory = Memory()
        self.streams, self.events, self.ipc = {}, {}, {}
        self.races = []
        self.exported = []  # the events that other processes may wait for, if they are real ones
        self.is_closed = False
        self._driver = None
        self._default_streams = {}
        self._known = {"main": {}}
        self._dropped = collections.deque()
        self._local = threading.local()

    # which process of the real job a thread stands for, and its current device

    @property
    def process(self):
        if self.one_process:
            return "main"
        process = getattr(self._local, "process", None)
        if process is None:
            thread = threading.current_thread()
            number = re.search(r"(?:rank|engine) (\d+)", thread.name)
            inherited = getattr(thread, "started_by", "main")
            process = self._local.process = f"rank {number[1]}" if number else inherited
        return process

    @property
    def process_number(self):
        """As getpid() would tell them apart."""
        return 1 if self.process == "main" else 1000 + int(self.process.split()[1])

    @contextlib.contextmanager
    def as_process(self, name):
        """This thread stands for another process."""
        before, self._local.process = self.process, name
        try:
            yield
        finally:
            self._local.process = before

    @property
    def device(self):
        return getattr(self._local, "device", 0)

    @device.setter
    def device(self, index):
        if not self.device_count:
            raise CUDARuntimeError(100)
        if not 0 <= index < self.device_count:
            raise CUDARuntimeError(101)
        self._local.device = index

    def new_handle(self):
        """Never one of before, of no other machine of this Python either."""
        return 0x7E0000000000 + 0x100 * next(_handles)

    # entering the machine: one thread at a time

    @contextlib.contextmanager
    def entered(self):
        with self.changed:
            is_outermost = not getattr(self._local, "is_inside", False)
            self._local.is_inside = True
            try:
                if is_outermost:
                    self._free_dropped()
                    self._meet()
                yield
                if is_outermost:
                    self._run_some()
            finally:
                self._local.is_inside = not is_outermost
                self.changed.notify_all()

    def _meet(self):
        """A process that comes later knows all that main has done; main, that outlives the others, all they know."""
        if self.process not in self._known:
            for stream in list(self.streams.values()):
                if stream.process == "main" and stream.last:
                    self._wait(stream.last)
            self._known[self.process] = dict(self._known["main"])
        if self.process == "main":
            for each in self._known.values():
                self.learn(each)

    @property
    def knowledge(self):
        """The clock of the calling process: what its host has waited for, or was told."""
        return self._known[self.process]

    def learn(self, clock):
        """The calling process is told what is done."""
        known = self._known[self.process] = dict(self._known[self.process])
        join(known, clock)

    # streams

    def new_stream(self, blocking):
        number = len(self.streams) + 1
        stream = Stream(self.new_handle(), number, self.device, self.process, blocking)
        self.streams[stream.pointer] = stream
        return stream

    def destroy_stream(self, pointer):
        """What is queued goes on; nothing can be queued any more."""
        self.streams["destroyed", pointer] = self.stream(pointer)
        del self.streams[pointer]

    def stream(self, pointer):
        """The stream of an address; 0 and 1 are the default stream of the thread's device, 2 is the thread's own."""
        if pointer not in (0, 1, 2):
            if pointer not in self.streams:
                raise CUDARuntimeError(400)
            return self.streams[pointer]
        key = self.process, self.device, threading.get_ident() if pointer == 2 else None
        if key not in self._default_streams:
            number = len(self.streams) + 1
            stream = self._default_streams[key] = Stream(pointer & 2, number, self.device, self.process, True)
            self.streams[key] = stream
        return self._default_streams[key]

    def queue(self, stream, name, work=None, ranges=lambda: ((), ()), after=(), ready=None, process=None):
        """Queue an operation; `ranges()`, asked when it runs, gives what it reads and what it writes."""
        after = after if isinstance(after, list) else [*after, *self._implied(stream)]
        operation = Operation(stream, name, work, ranges, after, ready, self._known[process or self.process])
        stream.queue.append(operation)
        stream.last = operation
        return operation

    def _implied(self, stream):
        """The legacy default stream waits for the blocking ones of its device, and they for it."""
        default = self._default_streams.get((stream.process, stream.device, None))
        if not stream.blocking or default is None:
            return []
        if stream is not default:
            return [default.last] if default.last else []
        own = [each for each in self.streams.values() if each.process == stream.process]
        return [each.last for each in own if each.device == stream.device and each.blocking and each.last]

    # running what is queued

    def _needed(self, operation):
        """What must run next so that an operation can, or None when other threads must call first."""
        while True:
            head = operation.stream.queue[0]
            missing = next((each for each in head.after if not each.done), None)
            if missing is None:
                return head if head.ready is None or head.ready() else None
            operation = missing

    def _run(self, operation):
        stream = operation.stream
        stream.queue.popleft()
        clock = dict(stream.clock)
        join(clock, operation.known)
        for each in operation.after:
            join(clock, each.clock)
        clock[stream.number] = operation.number
        operation.clock = stream.clock = clock
        operation.done, operation.after, operation.known = True, (), None
        reads, writes = operation.ranges()
        touched = [(each, False) for each in reads if each[1]] + [(each, True) for each in writes if each[1]]
        wrong = {each: why for each, _ in touched if (why := self.memory.what_is_wrong(operation, *each))}
        self.races += wrong.values()
        if not all(self.memory.is_in_a_pool(address) for address, _ in wrong):
            raise CUDARuntimeError(700)
        if wrong:
            return
        for each, is_written in touched:
            self.races += self.memory.use(operation, *each, is_written)
        if operation.work is not None:
            operation.work()
        operation.ran_s = time.perf_counter()

    def _run_some(self):
        if self.mode == "eager":
            self.run_all()
        if self.mode == "random":
            for _ in range(self._random.choice((0, 0, 1, 2, 5))):
                busy = [stream for stream in self.streams.values() if stream.queue]
                if busy:
                    operation = self._needed(self._random.choice(busy).queue[-1])
                    if operation:
                        self._run(operation)

    def run_all(self):
        """Run all that can run; returns what cannot."""
        progress = True
        while progress:
            progress = False
            for stream in list(self.streams.values()):
                while stream.queue:
                    operation = self._needed(stream.queue[-1])
                    if operation is None:
                        break
                    self._run(operation)
                    progress = True
        return [stream.queue[0] for stream in self.streams.values() if stream.queue]

    # what the host waits for

    def _wait(self, operation):
        deadline = time.monotonic() + WAIT_S
        while not operation.done:
            needed = self._needed(operation)
            if needed:
                self._run(needed)
            elif not self._wait_for_change(deadline):
                raise RuntimeError(f"deadlock: {operation} waits for calls that other ranks do not make")

    def _wait_for_change(self, deadline):
        if not self.one_process:
            return self.changed.wait(deadline - time.monotonic())
        self.changed.wait(POLL_S)  # what other processes do is no change that is told
        return time.monotonic() < deadline + WAIT_FOR_PROCESSES_S - WAIT_S

    def synchronize(self, operation):
        """Run what an operation needs, and it; the calling process knows then."""
        if operation is not None:
            self._wait(operation)
            self.learn(operation.clock)

    def query(self, operation):
        """True when an operation is done. In lazy mode it comes one step nearer each time, then four, then sixteen."""
        if operation is None:
            return True
        if not operation.done:
            steps = {"lazy": 4**operation.polls, "eager": 1 << 30, "random": self._random.randrange(4)}[self.mode]
            operation.polls += self.mode == "lazy" or self._random.random() < 0.5
            steps = steps if operation.polls < 8 else 1 << 30
            for _ in range(steps):
                needed = None if operation.done else self._needed(operation)
                if needed is None:
                    break
                self._run(needed)
            return False
        self.learn(operation.clock)
        return True

    # other processes, if they are real ones

    def export(self, event):
        """Let other processes wait for an event."""
        self.exported.append(event)
        if self._driver is None:
            self._driver = Driver(self)
            self._driver.start()

    def serve(self):
        """Run what other processes wait for; returns whether they do."""
        wanted = [each for each in list(self.exported) if each.counters.done < each.counters.wanted]
        if wanted or self.mode != "lazy":
            with self.entered():
                for each in wanted:
                    while each.counters.done < each.counters.wanted and (needed := self._needed(each.record)):
                        self._run(needed)
        return bool(wanted)

    # memory

    def allocate(self, nbytes, kind="device", pool=None, shared=None):
        used = self.memory.used_bytes.get(self.device, 0)
        if kind == "device" and used + nbytes > self.memory_bytes:
            raise CUDARuntimeError(2)
        return self.memory.add(Allocation(nbytes, kind, self.device, self.process, pool, shared))

    def drop(self, what):
        """The last reference to pooled memory or to a stream is gone; called by Python's collector, at any moment."""
        self._dropped.append(what)

    def _free_dropped(self):
        while self._dropped:
            allocation = self._dropped.popleft()
            if isinstance(allocation, int):
                self.destroy_stream(allocation)
            elif allocation.kind == "pinned":
                self.free_at_once(allocation, "the pool of pinned memory")
            else:  # the pool gives it to the next who asks in this stream: what that queues comes after this
                whole = (allocation.base, allocation.nbytes)
                self.queue(
                    allocation.pool,
                    "the reuse of memory whose array is gone",
                    lambda allocation=allocation: self.memory.free(allocation, "its pool, when its array was gone"),
                    lambda whole=whole: ((), [whole]),
                    process=allocation.process,
                )

    def knows(self, use):
        """True when the calling process has waited for the operation of a use."""
        return use.is_before(self._known[self.process])

    def free_at_once(self, allocation, by):
        """Free memory from the host, which must know that nobody uses it any more."""
        known = self._known[allocation.process]
        for use in allocation.uses:
            if not use.is_before(known):
                self.races.append(f"{allocation} is freed by {by}, and nobody has waited for: {use}")
        self.memory.free(allocation, by)


def join(clock, other):
    """Let `clock` cover `other` too."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
