"""When each gradient is reduced, and with which others: buckets of some MiB, in the order in which backward has them.

    backward: hook ── begin ──> PendingGradient in .grad ── step(), or first access ──> reduced gradient in .grad

Every rank submits each of its gradients once a step, in any order; the engine matches them by name. A rank is free to
choose when. In the first CAUTIOUS_STEPS steps it submits none before step() or the first access. Later it submits them
during backward, if no gradient was computed twice or cleared so far, as a GAN's discriminator's are: gradients that are
not submitted can be added to, or discarded, without the other ranks. Where the ranks use all cores of the only host,
moving data would take them from backward, and takes longer than after it: then they are submitted at its end.

The first step reduces each gradient, or group of the user's, by its own name. Then ranks agree on the order, once, and
fill buckets, each one submission. A rank that must reduce only some of a bucket, because another backward may follow,
refuses the bucket: it fails on all ranks, and its gradients go by their own names from then on.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ringreduce import runtime
from ringreduce.errors import BackwardError, MismatchError
from ringreduce.execution.signature import calling_line
from ringreduce.torch.buckets import Bucket, fill
from ringreduce.torch.gradient import Gradient, Reducer
from ringreduce.torch.gradient_transport import DENSE, UNKNOWN, GradientTransport
from ringreduce.torch.hooks import too_often

CAUTIOUS_STEPS = 8
POSITION = operator.attrgetter("position")
LAST = 2**31 - 1  # the position of a gradient that some rank does not compute
_backward_number = torch._C._current_graph_task_id
_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


class GradientReducer(Reducer):
    """Reduces the gradients of parameters as hooks report them ready."""

    def __init__(self, passes: int, reduction: GradientTransport, wait_in_backward: bool) -> None:
        super().__init__(passes, reduction)
        self._waits = wait_in_backward
        self._in_flight: dict[Bucket, None] = {}
        self._backward = -1
        self._line = ""  # that called backward(): finding it is slow, and it is the same for all hooks of a pass
        self._computed: deque[Gradient] = deque()  # reported by hooks, and not counted yet
        self._positions = 0
        self._eager = False  # submit buckets as they fill
        self._known_since: tuple[Any, ...] = ()
        self._clean_steps: float = 0  # in which every gradient was computed once; -inf: not all were
        self._lock = threading.RLock()  # backward on several GPUs has a thread for each
        self._look_at_the_world()
        _reducers.add(self)

    def join(self, parameters: Sequence[Any]) -> None:
        """Reduce these parameters together."""
        self._put([self._gradients[id(parameter)] for parameter in parameters])

    def _put(self, members: list[Gradient], splits: bool = False) -> None:
        """Put gradients into one bucket."""
        bucket = Bucket(members, splits)
        for member in members:
            member.bucket, member.is_loose = bucket, False

    @property
    def _buckets(self) -> list[Bucket]:
        """All, in the order in which they are filled."""
        return list(dict.fromkeys([each.bucket for each in sorted(self._gradients.values(), key=POSITION)]))

    @property
    def pending(self) -> bool:
        """True while a gradient is being reduced that nobody has waited for."""
        return bool(self._in_flight)

    def on_gradient(self, gradient: Gradient) -> None:
        """Note that backward has added to it; raises BackwardError when it is being reduced."""
        if gradient.bucket.parts:
            raise BackwardError(too_often(gradient.name, gradient.seen + 1, self.passes))
        if gradient.is_untouched:
            gradient.detach_pending(gradient.local)
        if self.paused:
            return
        if self._backward != _backward_number():
            self._watch_the_end()
        self._computed.append(gradient)
        if self._eager:
            bucket = gradient.bucket
            bucket.missing -= 1  # only a hint: threads of several GPUs may miscount
            if bucket.missing <= 0:
                with self._lock:
                    self._count()
                    self._begin_complete([bucket])

    def _watch_the_end(self) -> None:
        """A backward begins: have autograd call `_at_the_end` when it is done."""
        self._count()
        self._backward = _backward_number()
        self._line = calling_line()
        self._look_at_the_world()
        on_gpu = any(each.parameter.is_cuda for each in self._gradients.values())  # cores have nothing to do
        self._eager = self._clean_steps >= CAUTIOUS_STEPS and (self._overlaps or on_gpu)
        if self._eager:
            for bucket in self._buckets:
                bucket.missing = sum(max(0, self.passes - each.seen) for each in bucket.trained)
        reducer = weakref.ref(self)

        def at_the_end() -> None:
            alive = reducer()
            if alive is not None:
                alive._at_the_end()

        torch.autograd.Variable._execution_engine.queue_callback(at_the_end)

    def _count(self) -> None:
        """Count what the hooks have noted."""
        with self._lock:
            while self._computed:
                gradient = self._computed.popleft()
                if gradient.seen >= self.passes:  # added to, or cleared
                    self._clean_steps = -math.inf
                gradient.count()
                if gradient.is_loose:
                    gradient.position = self._positions
                    self._positions += 1
                bucket = gradient.bucket
                if bucket.begun and bucket.splits:  # the others of it are reduced already
                    self._split(bucket)
                gradient.bucket.begun = False

    def _at_the_end(self) -> None:
        """Other ranks may have gradients that this rank did not compute: reading .grad must return them too."""
        self._count()
        gradients = self._gradients.values()
        if not any(each.seen >= self.passes for each in gradients):
            return
        self._hooks.refresh()
        if self._waits:
            self.synchronize()
        elif self._clean_steps >= CAUTIOUS_STEPS:
            self._begin_complete(self._buckets)
        elif self._clean_steps >= 0:
            self._beware_of_equal_names()
        for gradient in gradients:
            gradient.is_untouched = False
            if gradient.bucket.begun:
                continue
            attached = gradient.pending is not None and gradient.parameter.grad is gradient.pending
            if not attached and gradient.trains:
                local = gradient.local
                if local is not None:
                    gradient.attach(local)
                else:
                    gradient.show_placeholder()

    def _beware_of_equal_names(self) -> None:
        """Gradients of two optimizers that have one name can only be reduced one after the other, at step()."""
        names = {each.name for each in self._gradients.values() if each.seen}
        for other in _reducers:
            if other is self or other._known_since != self._known_since:
                continue
            if any(each.seen and each.name in names for each in other._gradients.values()):
                self._clean_steps = other._clean_steps = -math.inf

    def begin(self, gradient: Gradient) -> None:
        """Begin to reduce a gradient, and those of its bucket, if nobody has."""
        with self._lock:
            self._count()
            if not gradient.bucket.begun:
                self._look_at_the_world()
                if gradient.bucket.splits and gradient.bucket.lacks(1):
                    self._split(gradient.bucket)
                self._begin([gradient.bucket])

    def _begin_complete(self, buckets: Sequence[Bucket]) -> None:
        """Begin to reduce those that backward has computed."""
        self._begin([each for each in buckets if not each.begun and each.trained and not each.lacks(self.passes)])

    def _split(self, bucket: Bucket, refuses: bool = True) -> None:
        """Let its gradients be reduced by their own names, also in later steps.

        refuses: the other ranks do not know; those that have sent the bucket will.
        """
        if refuses:
            self.reduction.refuse(bucket.name)
        for member in bucket.members:
            member.leave_bucket()

    def wait(self, gradient: Gradient) -> None:
        """Wait until it has arrived; on failure give up the whole step, so that no rank waits for this one."""
        try:
            while gradient.bucket.parts:  # twice when the bucket is split
                self._finish(gradient.bucket)
        except Exception:
            self.synchronize(quiet=True)
            raise

    def _finish(self, bucket: Bucket) -> None:
        self._in_flight.pop(bucket, None)
        try:
            bucket.finish()
        except MismatchError:
            if not bucket.splits:
                raise
            bucket.begun = False
            self._split(bucket, refuses=False)  # if tensors differ, the next error names one
            self._begin([each.bucket for each in bucket.trained])

    def _begin(self, taken: list[Bucket]) -> None:
        """Begin to reduce buckets; waits only for layouts that this rank does not know."""
        unknown = [each for bucket in taken for each in bucket.trained if each.layout == UNKNOWN]
        for gradient in unknown:
            gradient.ask_layout(self.reduction)
        # last those whose layout this rank must wait for
        waiting = {each.bucket for each in unknown if each.layout == UNKNOWN and each.local is None}
        errors: list[Exception] = []
        for bucket in sorted(taken, key=waiting.__contains__):
            with _noting(errors):
                bucket.begin(self.reduction, self._line)
                self._in_flight[bucket] = None
        if errors:
            raise errors[0]

    def _look_at_the_world(self) -> None:
        """The world may have changed. After a join() all ranks ask again: one that joined early knows less."""
        engine = runtime.current("DistributedOptimizer").engine
        now = (engine.world, engine.negotiation.joins)
        if now != self._known_since:
            self._known_since = now
            for bucket in list(self._in_flight):  # begun before
                self._finish(bucket)
            self._overlaps = engine.host.overlaps
            self.reduction.settle()
            self._forget()

    def _forget(self) -> None:
        for gradient in self._gradients.values():
            gradient.layout = UNKNOWN
            if gradient.bucket.splits or len(gradient.bucket.members) == 1:
                gradient.leave_bucket()
                gradient.is_loose = True

    def _fill_buckets(self) -> None:
        """Put the gradients that have no bucket yet into some; the same on all ranks."""
        loose = [each for each in self._gradients.values() if each.is_loose and each.layout == DENSE and each.trains]
        if not loose or self.reduction.size == 1:
            return
        loose.sort(key=operator.attrgetter("name"))
        positions = [each.position if each.position >= 0 else LAST for each in loose]
        agreed = self.reduction.begin_maximum(f"{loose[0].name}.position", positions).wait()
        for gradient, position in zip(loose, agreed, strict=True):
            gradient.position = int(position)
        loose.sort(key=POSITION)
        parameters = [each.parameter for each in loose]
        for members in fill([(each.nbytes, (each.dtype, each.device)) for each in parameters]):
            self._put([loose[number] for number in members], splits=len(members) > 1)

    def synchronize(self, quiet: bool = False) -> None:
        """Reduce what backward left out; on return every gradient is reduced.

        Raises the first error after waiting for all. quiet: raises nothing.
        """
        errors: list[Exception] = []
        with _noting(errors):
            self._count()
            self._look_at_the_world()
            self._begin([each for each in self._buckets if not each.begun and each.trained])
        while self._in_flight:
            with _noting(errors):
                # the last one first: a thread that wakes for each takes the core from the engine
                self._finish(next(reversed(self._in_flight)))
        self._hooks.refresh()
        if errors:
            self.reset()
            self._forget()  # only some ranks know about what failed
            if not quiet:
                raise errors[0]

    def stepped(self) -> None:
        """Begin a new step after a step."""
        self._clean_steps += 1
        self._fill_buckets()
        self.reset()

    def clear(self) -> None:
        """Begin a new step without the current gradients; raises BackwardError while some are being reduced."""
        if self._in_flight:
            raise BackwardError(
                "zero_grad() after backward() and before step() would clear gradients that are being reduced; call it "
                "before backward() or after step(); or put a backward() whose gradients are not wanted into `with "
                "optimizer.no_sync():`; or, to give up this step, call synchronize() first, on all ranks"
            )
        self._count()
        if any(each.seen >= self.passes for each in self._gradients.values()):
            self._clean_steps = -math.inf
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self._hooks.refresh()
        self._computed.clear()
        for gradient in self._gradients.values():
            gradient.seen, gradient.layout_handle = 0, None
            gradient.bucket.begun, gradient.bucket.parts = False, []
            if gradient.pending is not None:
                gradient.detach_pending(gradient.local)


@contextlib.contextmanager
def _noting(errors: list[Exception]) -> Iterator[None]:
    """Errors that are raised when all is done."""
    try:
        yield
    except Exception as exc:
        errors.append(exc)
