"""What a rank has between `init()` and `shutdown()`: one Runtime per process; `current()` returns it.

lifecycle    init() and shutdown(): startup/ makes what an engine needs
recovery/    the next world of an elastic job, after a loss
submit       hands an operation to the engine; arguments checks op and scales
own_channel  operations on a channel of a process group's own, without negotiation
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays import device_selection
from ringreduce.arrays.view import host_array, see_changed
from ringreduce.engine.engine import Engine
from ringreduce.engine.submitting import Inspector
from ringreduce.errors import CollectiveError, NotInitializedError, StalledError
from ringreduce.execution.host import HostResources
from ringreduce.execution.submission import Handle
from ringreduce.monitor import launcher_link, stall_report
from ringreduce.monitor.launcher_link import StatusServer
from ringreduce.settings import Checks, Settings
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.threads import ThreadTransport
from ringreduce.transport.world import World

ProcessSets = Sequence[Sequence[int] | str]
"""The members of all process sets but the first, in the order of their numbers; or why a set has ended."""


class Setup(NamedTuple):
    """What an engine is made for: a world, on one of its ranks."""

    world: World
    transport: MessageTransport | ThreadTransport
    host: HostResources
    clock_offsets_us: Sequence[float] = ()  # by rank, how far its clock is ahead of rank 0's; by default 0
    process_sets: ProcessSets = ()


CHECKS = "ringreduce.checks.switch"  # which is loaded when one of them is asked for: they use the API above this
RECOVERY_S = 20.0  # how long a rank waits after a loss: for its GPU, and for the launcher's list of who is left
GPU_SLEEP_S = 100e-6  # between two looks at the GPU


class Runtime:
    """A world, its transport, the settings, and the engine, which it starts.

    What elastic.run asks is answered here for jobs that are not elastic; recovery/elastic_runtime.py has the others.
    """

    is_elastic = False
    root: int | None = None  # the rank that had the most commits when this world was formed; None: by init()
    has_state = True  # False on a spare until it has taken that of the others

    def __init__(
        self,
        setup: Setup,
        settings: Settings,
        gpu: device_selection.Choice = device_selection.NOT_ASKED,
        status_server: StatusServer | None = None,
    ) -> None:
        self.gpu, self.settings = gpu, settings
        self.checks = Checks.parse(settings.check)  # `check` replaces them, on all ranks
        self.watch: Any = None  # checks.nan.Nan, where the check for NaN is on
        self.inspectors: Sequence[Inspector] = ()  # every check that looks at submissions
        self._has_warned = False  # that ranks hang in shutdown()
        self.enter(setup)
        self._status_server = status_server or StatusServer(settings.error_file, str)
        self._status_server.waiting_for = lambda: self.engine.stalls.waiting_for()
        self._status_server.record = lambda for_s: self.engine.report(for_s)

    def enter(self, setup: Setup) -> None:
        """Start the engine of a world."""
        self.world, self.transport, host, offsets_us, sets = setup
        self.clock_ahead_s = offsets_us[self.world.rank] / 1e6 if offsets_us else 0.0  # of rank 0's
        self.engine = Engine(self.world, self.transport, self.settings, host, offsets_us, sets)
        self.engine.gpu.default_index = self.gpu.index or 0

    def start_checks(self) -> None:
        """Begin with the checks that are asked for; in a later world anew: they keep handles, and counts, of one."""
        if str(self.checks) or self.settings.twice:
            importlib.import_module(CHECKS).start(self)

    def membership_changed(self) -> bool:
        """True when ranks are lost or have joined, so that the next collective raises PeerLostError."""
        return False

    def is_whole(self) -> bool:
        """True while no error has ended this world, and no other list of its ranks is known."""
        return self.engine.ending.error is None and not self.membership_changed()

    def hosts_came(self) -> str:
        """The hosts that have come, with which the launcher is about to start this job again; empty: none."""
        return ""

    def was_restarted(self) -> bool:
        """True in an elastic job that ringrun has started again."""
        return self.is_elastic and self.settings.restart_count > 0

    def reform(self, commits: int) -> bool:
        """Give up the world, after a CollectiveError other than MismatchError, and form another, in an elastic job.

        commits: how often this rank has committed its state.
        Returns: True when all ranks have as often.
        Raises:  the error that ended the world, where no other can be formed.
        """
        none_lost = f"no rank of {self.world.size} is lost, as far as this one knows"
        raise self.engine.ending.error or CollectiveError(none_lost)

    def await_gpu(self, after_loss: bool = False) -> Exception | None:
        """Wait until this rank's GPU has done what collectives have queued; then it changes no array any more.

        Returns: None when the results are right; the error that has ended the world, with which they may be anything.
        Raises:  CollectiveError when the GPU is not done RECOVERY_S after a loss.
        """
        engine, until_s = self.engine, math.inf
        queued = engine.gpu.queued()
        while not all(each.done() for each in queued):
            if until_s == math.inf and (after_loss or engine.ending.error):
                until_s = time.monotonic() + RECOVERY_S
            if time.monotonic() > until_s:
                raise CollectiveError(
                    f"{RECOVERY_S:g} s after a loss this rank's GPU has not finished what was queued before it; "
                    "`ringrun --elastic --restarts N` would start the job again"
                )
            time.sleep(GPU_SLEEP_S)
        return engine.ending.error if queued else None

    def leave(self, why: str, interrupted: Callable[[], bool]) -> bool:
        """Leave the world: True when all ranks have, and what init() has made is freed.

        Raises: StalledError when a rank that this one waits for has been stopped for `stall_abort_s`.
        """
        launcher_link.report(self.settings.error_file, left=why)
        failed_before = self.engine.ending.error
        if self.engine.leave(why, interrupted):
            self._free()
            return True
        error = self.engine.ending.error
        if isinstance(error, StalledError) and not failed_before:
            raise error
        return False

    def _free(self) -> None:
        """Free GPU memory and communicators; every rank calls it. Raises StalledError: see `_check_wait`."""
        try:
            self.engine.gpu.close()
            self.world.meet(self._check_wait)  # other ranks may have mapped this GPU memory
            self.engine.gpu.free()
            self.world.free()
        finally:
            self._status_server.close()

    def _check_wait(self, waited_s: float) -> None:
        """Report ranks that said that they leave, but do not, after `stall_check_s`; raise after `stall_abort_s`."""
        check_s, abort_s = self.settings.stall_check_s, self.settings.stall_abort_s
        is_over = 0 < abort_s <= waited_s
        if not (is_over or 0 < check_s <= waited_s):
            return
        stopped = "a rank that has called it, too, is stopped, or in C code that holds the GIL"
        text = f"rank {self.world.rank} has waited in shutdown() for {waited_s:.0f} s; {stopped}"
        if not self._has_warned:
            self._has_warned = True
            stall_report.warn(self.settings, text)
        if is_over:
            raise StalledError(text)


class _Process:
    """What this process is."""

    def __init__(self) -> None:
        self.runtime: Runtime | None = None  # a rank's, between init() and shutdown()
        self.parents_world: World | None = None  # of a forked child of a rank


process = _Process()
_bound_runtime: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar("ringreduce_runtime", default=None)


def is_initialized() -> bool:
    """True between `init()` and `shutdown()`."""
    return (_bound_runtime.get() or process.runtime) is not None


def current(function: str) -> Runtime:
    """The runtime of the calling thread's rank; raises NotInitializedError, which names `function`."""
    runtime = _bound_runtime.get() or process.runtime
    if runtime is None:
        parent = process.parents_world and forked_from(process.parents_world)
        raise NotInitializedError(
            f"{function}(): ringreduce has not been initialized; {parent or 'use ringreduce.init()'}"
        )
    return runtime


def forked_from(world: World) -> str:
    """Why a forked child of a rank of this world can do nothing."""
    return f"this process was forked from rank {world.rank}, and is not a rank itself"


def at_once(
    kind: str,
    name: str | None,
    array: Any,
    target: Any,
    arguments: dict[str, Any],
    process_set: Any,
    begin: Callable[..., Handle],
    **options: Any,
) -> Any:
    """The result of an operation that the caller waits for: by the express, if one like it went the usual way before.

    array:  None where there is none; the express takes those of NumPy, and torch's on the CPU.
    target: the array itself where it works in place; None: a new one.
    begin:  the usual way, called with all of them, and the options.
    """
    is_numpy = array is None or type(array) is np.ndarray
    source = array if is_numpy else host_array(array)
    into = source if target is array else target if is_numpy or target is None else host_array(target)
    is_usual, call = (source is None) != (array is None) or (into is None) != (target is None), None
    number = getattr(process_set, "process_set_id", None)
    if not is_usual and number is not None:  # from here on each line counts
        express = (_bound_runtime.get() or process.runtime or current(kind)).engine.express
        given = arguments.values()
        what = (kind, name, number) if source is None else (kind, name, number, source.dtype, source.shape)
        call = *what, *given, *map(type, given)  # 1 and 1.0 are equal, but not both a rank
        try:
            program = express.programs.find(call)
        except TypeError:  # an argument that cannot be hashed, nor be right
            program = call = None
        if program is not None and (result := express.run(program, source, into)) is not None:
            if is_numpy:
                return result
            if target is None:
                return sys.modules["torch"].from_numpy(result)
            see_changed(target)
            return target
    handle = begin(array, name=name, process_set=process_set, **arguments, **options, waits=True)
    result = handle.wait()
    if call is not None:
        express.programs.learn(call, handle)
    return result


def stepped(who: object) -> None:
    """An optimizer has stepped; see `StepRecorder.stepped`."""
    runtime = _bound_runtime.get() or process.runtime
    if runtime is not None:
        runtime.engine.recorder.stepped(who)


def current_world(function: str) -> World:
    """The world of `current`; in a forked child, such as a data loader's worker, the parent's, for reading only."""
    forked = None if is_initialized() else process.parents_world
    return forked or current(function).world


@contextlib.contextmanager
def bound(runtime: Runtime) -> Iterator[None]:
    """Make `runtime` the calling thread's own, so that in ringreduce.testing every thread is a rank."""
    token = _bound_runtime.set(runtime)
    try:
        yield
    finally:
        _bound_runtime.reset(token)


def unbind() -> Runtime | None:
    """The calling thread's own runtime, which from now on it has no more; None: it had none."""
    runtime = _bound_runtime.get()
    _bound_runtime.set(None)
    return runtime
