"""When each gradient is reduced, and with which others: buckets of some MiB, in the order in which gradients come.

Every rank submits each of its gradients once a step, in any order; the engine matches them by name. A rank is free to
choose when: an adapter says so, by `_begin_complete` as they come, or by `begin` and `synchronize` at the end.

The first step reduces each gradient, or group of the user's, by its own name. Then ranks agree on the order, once, and
fill buckets, each one submission. optim/__init__.py says what becomes of a bucket that a rank must split.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.checks.comparison import Comparison
from ringreduce.checks.divergence import Divergence, Part
from ringreduce.checks.learning_rates import LearningRates
from ringreduce.errors import MismatchError
from ringreduce.optim.buckets import DENSE, UNKNOWN, Gradient, GradientBucket, fill
from ringreduce.optim.exchange import Exchange, is_disagreement
from ringreduce.settings.log import JOB

LAYOUTS_S = 0.01  # how often a rank that waits for the layouts of several buckets looks which have come
POSITION, _UNKNOWN, _BUCKET = (operator.attrgetter(name) for name in ("position", "unknown", "bucket"))
CAUTIOUS_STEPS, RECOVERY_STEPS = 8, 100
"""Steps in which every gradient must be computed once before one is submitted during backward: at first, and after a
step in which one was not. Many, as a script that does so now and then would get a BackwardError the next time. But as
few as at first after one whose gradients were only cleared, as of a bad batch: the next time that is possible while
they are on their way, too. Twice as many after each further one."""
LOOK_S = 0.25  # how often a rank that waits for a bucket looks whether another one has failed
LAST = 2**31 - 1  # the position of a gradient that some rank does not compute


class Reducer:
    """Reduces the gradients of an optimizer as they come.

    passes: how many backward passes of a gradient are summed before it is reduced.
    """

    def __init__(self, passes: int, exchange: Exchange) -> None:
        self.passes = passes
        self.exchange = exchange
        self.paused = False  # gradients only add up
        self._gradients: dict[int, Any] = {}  # by id of the parameter, whose hash may take long
        self._in_flight: dict[GradientBucket, None] = {}
        self._line = ""  # of the user's script, which began the backward pass
        self._computed: deque[Gradient] = deque()  # reported, and not counted yet
        self._positions = 0
        self._known_since: tuple[Any, ...] = ()
        self._clean_steps = 0  # since one in which a gradient was computed twice, or cleared
        self._unclean = ""  # why the last of those was none
        self._clears, self._recovery = 0, CAUTIOUS_STEPS  # how often gradients were cleared; the clean steps it takes
        self._lock = threading.RLock()  # several threads may report gradients
        self._comparison: Comparison | None = None
        self._has_wires = False  # the ranks are on several hosts
        self._look_at_the_world()

    def join(self, parameters: Sequence[Any]) -> None:
        """Reduce the gradients of these parameters together."""
        self._put([self._gradients[id(parameter)] for parameter in parameters])

    def _put(self, members: list[Gradient], splits: bool = False, begun: bool = False) -> None:
        """Put gradients into one bucket."""
        bucket = GradientBucket(members, splits)
        bucket.begun = begun
        for member in members:
            member.bucket, member.is_loose = bucket, False

    def say(self, what: str, text: str) -> None:
        """Wait until all ranks have said the same; none of them has a gradient on its way.

        Raises: MismatchError on all ranks, also on one that goes on to its next gradients, when these have failed.
        """
        bucket = self._next_bucket()
        try:
            self._say(bucket, what, text)
        except MismatchError:
            self._go_along(bucket)
            self.abandon()
            raise

    def _say(self, bucket: GradientBucket, what: str, text: str) -> None:
        """In place of the next operation on this bucket."""
        self.exchange.say(bucket.name, what, text)

    def _next_bucket(self) -> GradientBucket:
        """One that every rank submits next, and the same on all ranks; dense if there is one."""
        trained = [each for each in self._buckets if each.trained] or self._buckets
        if not trained:
            return GradientBucket([Gradient("no parameters")])
        return min(trained, key=lambda each: (any(one.layout != DENSE for one in each.trained), each.name))

    def _go_along(self, bucket: GradientBucket) -> None:
        """Take part in what another rank has begun beside this bucket, and waits for; the step has failed on all."""
        self.reset()
        bucket.begun = True
        self.synchronize(quiet=True)

    def _regroup(self, gone: Sequence[Gradient]) -> None:
        """Fill the buckets anew, but for the user's groups, where those of equal names take the places of these."""
        named = {each.name: each for each in self._gradients.values()}
        for bucket in dict.fromkeys(each.bucket for each in [*self._gradients.values(), *gone]):
            staying = [named.get(each.name) if each in gone else each for each in bucket.members]
            members = [each for each in staying if each is not None]
            if bucket.splits:
                for each in members:
                    each.leave_bucket()
                    each.is_loose = True
            elif members != bucket.members and len(bucket.members) > 1:
                self._put(members, begun=bucket.begun)

    @property
    def _buckets(self) -> list[GradientBucket]:
        """All, in the order in which they are filled."""
        return list(dict.fromkeys(map(_BUCKET, sorted(self._gradients.values(), key=POSITION))))

    @property
    def pending(self) -> bool:
        """True while a gradient is being reduced that nobody has waited for."""
        return bool(self._in_flight)

    def _count(self) -> None:
        """Count the gradients that were reported."""
        with self._lock:
            while self._computed:
                gradient = self._computed.popleft()
                if gradient.seen >= self.passes:  # added to, or cleared
                    self._distrust(f"the gradient of {gradient.name!r} was computed again before step() ({self._line})")
                gradient.count()
                if gradient.is_loose:
                    gradient.position = self._positions
                    self._positions += 1
                bucket = gradient.bucket
                if bucket.begun and bucket.splits:  # the others of it are reduced already
                    self._split(bucket)
                gradient.bucket.begun = False

    def _distrust(self, why: str, was_cleared: bool = False) -> None:
        """Not every gradient of this step was computed once: those of the next ones may change after backward, too.

        Only for this rank: others may have seen something else, and submit the same gradients earlier or later.
        """
        self._clears += was_cleared
        least = 0 if self.trusts else self._recovery
        again = min(RECOVERY_STEPS, CAUTIOUS_STEPS << self._clears - 1) if was_cleared else RECOVERY_STEPS
        self._recovery = max(least, again)
        if not self._unclean and self.exchange.size > 1 and self.overlaps:
            then = "all ranks must do it together" if was_cleared else "doing it again raises BackwardError"
            JOB.warning(
                f"DistributedOptimizer: {why}; so gradients are reduced at step(), not during backward(), until "
                f"{self._recovery} steps have passed without it. From then on {then}: put a backward() "
                "whose gradients are not wanted into `with optimizer.no_sync():`, or raise backward_passes_per_step"
            )
        self._clean_steps, self._unclean = -1, why

    @property
    def overlaps(self) -> bool:
        """True where reducing gradients during backward is faster than at its end."""
        return runtime.current("DistributedOptimizer").engine.host.overlaps

    @property
    def trusts(self) -> bool:
        """True when a gradient that backward has computed may be submitted: a step computes each once."""
        return self._clean_steps >= (self._recovery if self._unclean else CAUTIOUS_STEPS)

    @property
    def no_overlap(self) -> str:
        """Why gradients are not reduced during backward; empty: they are, where that is faster."""
        return self._unclean if not self.trusts else ""

    def begin(self, gradient: Gradient) -> None:
        """Begin to reduce a gradient, and those of its bucket, if nobody has."""
        with self._lock:
            self._count()
            if not gradient.bucket.begun:
                self._look_at_the_world()
                if gradient.bucket.splits and gradient.bucket.lacks(1):
                    self._split(gradient.bucket)
                self._begin([gradient.bucket])

    def _begin_complete(self, buckets: Sequence[GradientBucket]) -> None:
        """Begin to reduce those that are computed."""
        self._begin([each for each in buckets if not each.begun and each.trained and not each.lacks(self.passes)])

    def _split(self, bucket: GradientBucket, refuses: bool = True) -> None:
        """Let its gradients be reduced by their own names, also in later steps.

        refuses: the other ranks do not know; those that have sent the bucket will.
        """
        if refuses:
            self.exchange.refuse(bucket.name)
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

    def _finish(self, bucket: GradientBucket) -> None:
        self._in_flight.pop(bucket, None)
        try:
            bucket.finish()
            if self._comparison is not None:
                self._comparison.reduced([each.name for each in bucket.members])
        except MismatchError as error:
            if not bucket.splits or is_disagreement(error):
                raise
            bucket.begun = False
            self._split(bucket, refuses=False)  # if tensors differ, the next error names one
            self._begin([each.bucket for each in bucket.members])

    def _begin(self, taken: list[GradientBucket]) -> None:
        """Begin to reduce buckets; waits only for layouts that this rank does not know."""
        if self._comparison is not None and not self._comparison.has_begun:
            self._comparison.begin(each.name for each in self._gradients.values())
        order: Iterable[GradientBucket] = taken
        if unknown := list(itertools.chain.from_iterable(map(_UNKNOWN, taken))):
            for gradient in unknown:
                gradient.ask_layout(self.exchange)
            # last those whose layout this rank must wait for
            waiting = {each.bucket for each in unknown if each.layout == UNKNOWN == each.local_layout}
            known = [each for each in taken if each not in waiting]
            order = itertools.chain(known, _as_agreed([each for each in taken if each in waiting]))
        errors: list[Exception] = []
        for bucket in order:
            try:
                bucket.begin(self.exchange, self._line)
                self._in_flight[bucket] = None
            except Exception as exc:  # raised when all have begun
                errors.append(exc)
        if errors:
            raise errors[0]

    def parts(self) -> list[Part]:
        """What all ranks should have alike: the parameters, and what else is known of their model."""
        raise NotImplementedError

    def learning_rates(self) -> list[Any]:
        """Those of the optimizer's groups of parameters, which all ranks should have alike, too."""
        raise NotImplementedError

    def _look_at_the_world(self) -> None:
        """The world may have changed. After a join() all ranks ask again: one that joined early knows less."""
        current = runtime.current("DistributedOptimizer")
        engine, every = current.engine, current.checks.divergence
        number = getattr(self.exchange.process_set, "process_set_id", None)  # what is no set is refused below
        state = None if number is None else engine.states.get(number)
        now = (engine.world, state.joins if state else 0, every)
        if now != self._known_since:
            self._known_since = now
            for bucket in list(self._in_flight):  # begun before
                self._finish(bucket)
            self.exchange.check_world()
            self._has_wires = len(set(engine.world.hosts)) > 1
            engine.host.reducers.add(self)
            self._comparison = self._comparison_of(every) if self.exchange.size > 1 else None
            self._forget()

    def _comparison_of(self, every: int) -> Comparison:
        process_set, own = self.exchange.process_set, weakref.proxy(self)  # no cycle would keep parameters
        if every:
            return Divergence(every, process_set, lambda: own.parts())
        return LearningRates(process_set, lambda: own.learning_rates())

    def _forget(self) -> None:
        for bucket in self._buckets:
            bucket.has_told = False
        for gradient in self._gradients.values():
            gradient.layout = UNKNOWN
            if gradient.bucket.splits or len(gradient.bucket.members) == 1:
                gradient.leave_bucket()
                gradient.is_loose = True

    def _fill_buckets(self) -> None:
        """Put the gradients that have no bucket yet into some; the same on all ranks."""
        loose = [each for each in self._gradients.values() if each.is_loose and each.layout == DENSE and each.trains]
        if not loose or self.exchange.size == 1:
            return
        loose.sort(key=operator.attrgetter("name"))
        positions = [each.position if each.position >= 0 else LAST for each in loose]
        agreed = self.exchange.begin_maximum(f"{loose[0].name}.position", positions).wait()
        for gradient, position in zip(loose, agreed, strict=True):
            gradient.position = int(position)
        loose.sort(key=POSITION)
        for members in fill([each.size_and_kind for each in loose]):
            self._put([loose[number] for number in members], splits=len(members) > 1)

    def synchronize(self, quiet: bool = False) -> None:
        """Reduce what is left; on return every gradient is reduced.

        Raises the first error after waiting for all. quiet: raises nothing.
        """
        errors: list[Exception] = []
        try:
            self._count()
            self._look_at_the_world()
            self._begin([each for each in self._buckets if not each.begun and (each.trained or not each.has_told)])
        except Exception as exc:
            errors.append(exc)
        while self._in_flight:
            try:
                self._finish(self._last())
            except Exception as exc:
                errors.append(exc)
        if errors:
            self.reset()
            self._forget()  # only some ranks know about what failed
            if not quiet:
                raise errors[0]

    def _last(self) -> GradientBucket:
        """The last one, when it is over: a thread that wakes for each takes the core from the engine.

        Or one that has failed: where a rank has split it and waits for a gradient of it, the last one is over only when
        this rank has split it, too.
        """
        last = next(reversed(self._in_flight))
        for handle in last.handles:
            while not handle.ended_within(LOOK_S):
                for bucket in self._in_flight:
                    if any(each.failed for each in bucket.handles):
                        return bucket
        return last

    def stepped(self) -> None:
        """Begin a new step after a step."""
        if self._comparison is not None:
            self._comparison.stepped()
        self._clean_steps += 1
        self._fill_buckets()
        self.reset()
        runtime.stepped(id(self))

    def abandon(self) -> None:
        """Begin a new step in a world that is lost: what was being reduced has failed, or will, on all ranks."""
        self._in_flight.clear()
        self.reset()
        self._forget()  # only some ranks know about what failed

    def reset(self) -> None:
        """Begin a new step."""
        self._computed.clear()
        for gradient in self._gradients.values():
            bucket = gradient.bucket
            bucket.begun = False
            if bucket.parts:
                bucket.parts = []
            if gradient.seen or gradient.pending is not None or gradient.layout_handle is not None:
                gradient.give_up()


def _as_agreed(buckets: Sequence[GradientBucket]) -> Iterator[GradientBucket]:
    """Those first whose layouts ranks have agreed on: one that reads a gradient may ask for no other before."""
    left = list(buckets)
    while left:
        handles = [[each.layout_handle for each in bucket.trained if each.layout_handle is not None] for bucket in left]
        ended = [all(handle.ended for handle in several) for several in handles]
        if any(ended):
            yield left.pop(ended.index(True))
        else:
            handles[0][0].ended_within(LAYOUTS_S)
