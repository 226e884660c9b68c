"""Who began with NaN: every rank looks at what it is about to send, so that it is named before it is in the sum.

To look at finished chunks would cost less, but every algorithm has its own, and what is reduced in place has lost its
inputs then. What a rank sends is read once, at the speed of memory (scan.py). The same look says whether it is so large
that the sum may overflow: only then the result is looked at, too.

Then ranks agree on what was found (agreement.py), so that all act in the same step, and one of them says who began:

    an operation  that begins where it ends, which is well on all ranks or on none; they may wait in any order
    torch         once for all that a DistributedOptimizer, or torch.distributed's "ring", has added up, as an optimizer
                  steps. If none does, since a GradScaler has found an infinity, all is well: the same gradient comes
                  again while what was found in it is still there. That is only counted. Where nothing is to be done but
                  to report, a rank whose others do not step goes on, and agrees later.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.arrays import scan
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import ElementType
from ringreduce.arrays.gpu_buffer import any_on_gpu
from ringreduce.checks.agreement import Agreement, Finding
from ringreduce.collectives.ops import Adasum, Average, Sum
from ringreduce.errors import CollectiveError, NanError, PeerLostError, StalledError
from ringreduce.execution.submission import Submission
from ringreduce.monitor import launcher_link
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.settings.log import JOB, LOGGER

ADDED = frozenset(each.value for each in (Sum, Average, Adasum))  # a minimum may well be of infinities
REPORT_S = 1.0  # for others in a step, where nothing depends on it
MOST_COUNTED = 4096  # operations of which is known how often they were submitted

Key = tuple[Any, ...]  # equal for an operation of this step and that of the next one


@dataclasses.dataclass
class Seen:
    """What was seen in a submission."""

    factor: float  # by which its largest element may grow
    unread: list[tuple[int, ElementType, Callable[[], int]]]  # tensors whose largest elements a GPU is to find
    problem: str = ""  # NaN or infinity
    number: int = 0  # of the tensor that has it
    is_large: bool = False  # the sum may overflow
    step: int = 0
    finding: Finding | None = None
    agreement: Agreement | Exception | None = None
    is_settled: bool = False

    def read(self) -> None:
        """Look at the largest elements; waits for the GPU where they are there."""
        for number, element, largest in self.unread:
            bits = largest()
            if problem := scan.problem(bits, element):
                self.problem, self.number = problem, number
                break
            self.is_large |= bits > scan.summable(element, self.factor)
        self.unread = []


class Nan:
    """The check on one rank."""

    def __init__(self, own: runtime.Runtime, action: str) -> None:
        """action: report, raise or zero."""
        self._own, self._action = own, action
        self._counts: dict[Key, int] = {}  # of submissions that are of no torch optimizer
        self._steps = 0  # of the torch optimizer that stepped first
        self._stepped: Callable[[], Any] = lambda: None
        self._sets: dict[int, None] = {}  # process sets that have added something up for the next step of torch
        self._found: tuple[Finding, Key, float] | None = None
        """The first for that step, in what, in which backward pass."""
        self._agreements: weakref.WeakValueDictionary[tuple[int, str], Agreement] = weakref.WeakValueDictionary()
        """The last of each operation: a program may submit it again before it waits."""
        self._late: Agreement | None = None  # for which other ranks have not come
        self._reported = self._skipped = 0
        self._first = ""  # that was reported

    def look(
        self, _: int, __: object, ___: object, details: Sequence[tuple[str, Any]], inputs: Sequence[Buffer]
    ) -> Seen | None:
        """What is in arrays that are about to be sent; None: they are not to be added up."""
        known = dict(details)
        if known.get("op") not in ADDED:
            return None
        factor = float(self._own.world.size)
        for name in ("prescale_factor", "postscale_factor"):
            factor *= max(1.0, abs(known[name]))
        seen = Seen(factor, [(at, each.element, scan.largest(each)) for at, each in _floats(inputs)])
        if not any_on_gpu(inputs, ()):
            seen.read()
        return seen

    def begin(self, made: Submission, seen: Seen, of_step: bool) -> None:
        """The engine is about to get the submission.  of_step: it is of a torch optimizer, which steps later."""
        kind, name, tensors, *_ = made.signature.unnumbered
        key = (kind, made.process_set, name, len(tensors), tensors[:1])
        if of_step:
            _hook_into_torch()
            seen.step, self._sets[made.process_set] = self._steps, None
            if self._found is not None and self._found[1] == key and self._found[2] != _backward():
                self._found = None  # no optimizer has stepped since
                self._skip()
            if seen.problem:
                self._note(made, seen, key)
            elif seen.is_large or seen.unread:
                made.finish = functools.partial(self._finish_of_step, made.finish, seen, key)
            return
        seen.step = self._counts.pop(key, 0)
        self._counts[key] = seen.step + 1
        if len(self._counts) > MOST_COUNTED:
            del self._counts[next(iter(self._counts))]
        if made.process_set >= GLOBAL:  # operations of others are in the order of the program
            made.add_then(functools.partial(self._agree, made, seen))
        made.finish = functools.partial(self._finish, made.finish, seen)

    def _find(self, made: Submission, seen: Seen) -> Finding | None:
        """What is to be named: of what was submitted, or in the sum of what is over."""
        seen.read()
        problem, number, in_sum = seen.problem, seen.number, not seen.problem
        if in_sum and seen.is_large:
            problems = [(at, scan.problem(scan.largest(each)(), each.element)) for at, each in _floats(made.outputs)]
            number, problem = next((each for each in problems if each[1]), (0, ""))
        if problem:
            world, tensors = self._own.world, made.signature.tensors
            what = f"{made.rank}, {made.signature.text_of(number)} ({made.line})"
            where = "in the sum of finite values" if in_sum else "in its own values, before the sum"
            when_us = int(1e6 * (made.submitted_s - self._own.clock_ahead_s))
            text = f"{what}, step {seen.step}: {problem} {where} ({tensors[number].dtype})"
            seen.finding = Finding(in_sum, when_us, world.rank, text)
        return seen.finding

    def _note(self, made: Submission, seen: Seen, key: Key) -> None:
        """Keep the first finding until an optimizer steps."""
        if self._found is None and (finding := self._find(made, seen)) is not None:
            self._found = finding, key, _backward()

    # When a submission is over

    def _finish_of_step(self, finish: Any, seen: Seen, key: Key, made: Submission) -> Any:
        self._note(made, seen, key)
        return finish(made)

    def _agree(self, made: Submission, seen: Seen, error: BaseException | None) -> None:
        """See `Submission.then`."""
        if error is None:
            try:
                made.follow()
                found = self._find(made, seen)
                on, name = made.process_set, f"check.nan.{made.key}"
                seen.agreement = Agreement(self._own.engine, name, on, found, self._agreements.get((on, name)))
                self._agreements[on, name] = seen.agreement
            except Exception as exc:  # which the thread that waits raises
                seen.agreement = exc

    def _finish(self, finish: Any, seen: Seen, made: Submission) -> Any:
        """As the submission's own, after what is done about findings. Raises NanError, each time."""
        if isinstance(seen.agreement, Exception):
            raise seen.agreement
        agreed = self._find(made, seen) if seen.agreement is None else seen.agreement.wait()
        if agreed is not None and not seen.is_settled:
            seen.is_settled = self._action != "raise"
            self._act(agreed, [each.zero for each in made.outputs])
        return finish(made)

    def before_step(self, optimizer: Any) -> None:
        """A torch optimizer is about to step. Raises NanError."""
        sets, self._sets = list(self._sets), {}
        if not sets:
            return
        if self._stepped() in (None, optimizer):
            self._stepped = weakref.ref(optimizer)
            self._steps += 1
        try:
            agreed = self._agreed(sets)
        except StalledError:
            return
        except CollectiveError as error:
            self._late = None  # it has failed for good; the next steps may be in a new process group, or world
            if self._action == "report" and isinstance(error, PeerLostError):
                return  # it has left, or is lost, which the next operation says
            raise
        if agreed is not None and getattr(optimizer, "found_inf", None):
            self._skip()  # as fused optimizers do, to which GradScaler leaves it
        elif agreed is not None:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            if min(sets) < GLOBAL:  # a bucket of DDP names no parameters
                agreed = agreed._replace(text=agreed.text + _first_bad(parameters))
            self._act(agreed, [each.grad.zero_ for each in parameters if each.grad is not None])

    def _agreed(self, sets: Sequence[int]) -> Finding | None:
        """What all ranks of a step name. Raises StalledError where some do not come; the next call waits for them."""
        patience_s, found = REPORT_S if self._action == "report" else -1, None
        if self._late is not None:
            found = self._late.wait(patience_s)
            self._found = self._found and (self._found[0], (), math.nan)  # for the next call: that step is made
        else:
            kept, self._found = self._found, None
            found = kept and kept[0]
            for number in sets:
                name = "check" if number >= GLOBAL else None
                self._late = Agreement(self._own.engine, name, number, found)
                found = self._late.wait(patience_s)
        self._late = None
        return found

    # What is done

    def _act(self, agreed: Finding, zero: Sequence[Callable[[], object]]) -> None:
        """zero: each makes zeros of something that was reduced."""
        self._first = self._first or agreed.text
        self._reported += 1
        if agreed.rank == self._own.world.rank and self._reported == 1:
            launcher_link.report(self._own.settings.error_file, finding=agreed.text)
        if self._action == "raise":
            raise NanError(agreed.text, agreed.rank)
        for each in zero if self._action == "zero" else ():
            each()
        if agreed.rank == self._own.world.rank:
            done = ", and everything reduced with it is zeroed" if self._action == "zero" else ""
            first = f"; the first was of {self._first.partition(': ')[0]}" if self._reported > 1 else ""
            JOB.log(_level(self._reported), f"check: {agreed.text}{done}; {self._reported} so far{first}")

    def _skip(self) -> None:
        self._skipped += 1
        LOGGER.debug(
            f"check: a step with infinities that no optimizer took, as GradScaler skips them; {self._skipped} so far"
        )


def _floats(buffers: Sequence[Buffer]) -> list[tuple[int, Buffer]]:
    """Those that may have a NaN, with their numbers."""
    return [(at, each) for at, each in enumerate(buffers) if each.element.kind in "fc" and each.count]


def _first_bad(parameters: Sequence[Any]) -> str:
    """Which of torch's parameters has a gradient that is not finite, after the sum."""
    for number, each in enumerate(parameters):
        if each.grad is not None and not each.grad.isfinite().all():
            return f"; it is in the gradient of the optimizer's parameter {number}, of shape {list(each.shape)}"
    return ""


def _level(count: int) -> int:
    """The first one is a warning, and the tenth, hundredth and so on."""
    return logging.WARNING if math.log10(count).is_integer() else logging.DEBUG


def _backward() -> float:
    """The number of the backward pass of torch that this thread runs; outside of one what equals nothing."""
    number: int = sys.modules["torch"]._C._current_graph_task_id()
    return math.nan if number < 0 else number


@functools.cache  # once
def _hook_into_torch() -> None:
    """Call `before_step` of the check of the thread's rank, if there is one."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before_step(optimizer: Any, *_: Any) -> None:
        if runtime.is_initialized() and (watch := runtime.current("check").watch) is not None:
            watch.before_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
