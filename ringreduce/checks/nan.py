"""Who began with NaN: every rank looks at what it is about to send, so that it is named before it is in the sum.

To look at finished chunks would cost less, but every algorithm has its own, and what is reduced in place has lost its
inputs then. What a rank sends is read once, at the speed of memory (scan.py). The same look says whether it is so large
that the sum may overflow: only then the result is looked at, too.

An allgather of what was found follows, so that all ranks act in the same step, and one of them says who began:

    an operation  it begins where that ends, which is well on all ranks or on none; they may wait in any order
    torch         one for all that a DistributedOptimizer, or torch.distributed's "ring", has added up, as an optimizer
                  steps. If none does, since a GradScaler has found an infinity, all is well: the same gradient comes
                  again while what was found in it is still there. That is only counted.
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
from ringreduce.api.objects import begin_allgather
from ringreduce.arrays.buffer import Buffer
from ringreduce.checks import scan
from ringreduce.errors import InputError, NanError
from ringreduce.execution.submission import Handle, Submission
from ringreduce.log import LOGGER
from ringreduce.monitor import launcher_link
from ringreduce.negotiation.negotiation import GLOBAL
from ringreduce.ops import Adasum, Average, Sum

ADDED = frozenset(each.value for each in (Sum, Average, Adasum))  # a minimum may well be of infinities
MOST_COUNTED = 4096  # operations of which is known how often they were submitted

Key = tuple[Any, ...]  # equal for an operation of this step and that of the next one
Finding = tuple[bool, float, int, str]
"""Whether only the sum has it, when it was submitted, the rank, and the text: the least of several is the one to name.
By time, since a NaN may have come to other ranks within the step, as by PowerSGD's first factor in the second one."""


@dataclasses.dataclass
class Seen:
    """What was seen in a submission."""

    problem: str = ""  # NaN or infinity
    number: int = 0  # of the tensor that has it
    is_large: bool = False  # the sum may overflow
    step: int = 0
    finding: Finding | None = None
    agreement: Handle | Exception | None = None
    is_settled: bool = False


class Nan:
    """The check on one rank."""

    def __init__(self, own: runtime.Runtime, action: str) -> None:
        """action: report, raise or zero."""
        self._own, self._action = own, action
        self._counts: dict[Key, int] = {}  # of submissions that are of no torch optimizer
        self._steps = 0  # of the torch optimizer that stepped first
        self._stepped: Callable[[], Any] = lambda: None
        self._sets: dict[int, None] = {}  # process sets that have added something up for the next step of torch
        self._found: tuple[Finding, Key, float] | None = (
            None  # the first for that step, in what, in which backward pass
        )
        self._reported = self._skipped = 0

    def look(self, _: object, __: object, details: Sequence[tuple[str, Any]], inputs: Sequence[Buffer]) -> Seen | None:
        """What is in arrays that are about to be sent; None: they are not to be added up."""
        known, seen = dict(details), Seen()
        if known.get("op") not in ADDED:
            return None
        factor = float(self._own.world.size)
        for name in ("prescale_factor", "postscale_factor"):
            factor *= max(1.0, abs(known[name]))
        for number, each in enumerate(inputs):
            if each.on_gpu:
                raise InputError(
                    f"check=nan looks at host memory only, but an array is on {each.device}: call check('')"
                )
            if each.element.kind in "fc" and each.count:
                largest = scan.largest(each.flat, each.element)
                if problem := scan.problem(largest, each.element):
                    seen.problem, seen.number = problem, number
                    break
                seen.is_large |= largest > scan.summable(each.element, factor)
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
            elif seen.is_large:
                made.finish = functools.partial(self._finish_of_step, made.finish, seen, key)
            return
        seen.step = self._counts.pop(key, 0)
        self._counts[key] = seen.step + 1
        if len(self._counts) > MOST_COUNTED:
            del self._counts[next(iter(self._counts))]
        if made.process_set >= GLOBAL:  # operations of others are in the order of the program
            made.then = functools.partial(self._agree, made, seen, made.then)
        made.finish = functools.partial(self._finish, made.finish, seen)

    def _find(self, made: Submission, seen: Seen) -> Finding | None:
        """What is to be named: of what was submitted, or in the sum of what is over."""
        problem, number, in_sum = seen.problem, seen.number, not seen.problem
        if in_sum and seen.is_large:
            problems = [scan.problem(scan.largest(each.flat, each.element), each.element) for each in made.outputs]
            number, problem = next(((at, each) for at, each in enumerate(problems) if each), (0, ""))
        if problem:
            world, (kind, _, tensors, *_) = self._own.world, made.signature
            what = f"rank {world.rank} of {world.size}, {kind} {tensors[number].name!r} ({made.line}), step {seen.step}"
            where = "in the sum of finite values" if in_sum else "in this rank's own values, before the sum"
            when_s = made.submitted_s - self._own.clock_ahead_s
            seen.finding = in_sum, when_s, world.rank, f"{what}: {problem} {where} ({tensors[number].dtype})"
        return seen.finding

    def _note(self, made: Submission, seen: Seen, key: Key) -> None:
        """Keep the first finding until an optimizer steps."""
        if self._found is None and (finding := self._find(made, seen)) is not None:
            self._found = finding, key, _backward()

    # When a submission is over

    def _finish_of_step(self, finish: Any, seen: Seen, key: Key, made: Submission) -> Any:
        self._note(made, seen, key)
        return finish(made)

    def _agree(self, made: Submission, seen: Seen, then: Any, error: Exception | None) -> None:
        """See `Submission.then`."""
        if then is not None:
            then(error)
        if error is None:
            try:
                seen.agreement = self._begin_agreeing(f"{made.key}.check", made.process_set, self._find(made, seen))
            except Exception as exc:  # which the thread that waits raises
                seen.agreement = exc

    def _begin_agreeing(self, name: str | None, process_set: int, finding: Finding | None) -> Handle:
        return begin_allgather(self._own.engine, finding, name, process_set, "check")

    def _finish(self, finish: Any, seen: Seen, made: Submission) -> Any:
        """As the submission's own, after what is done about findings. Raises NanError, each time."""
        if isinstance(seen.agreement, Exception):
            raise seen.agreement
        agreed = self._find(made, seen) if seen.agreement is None else _first(seen.agreement.wait())
        if agreed is not None and not seen.is_settled:
            seen.is_settled = self._action != "raise"
            self._act(agreed, [each.flat for each in made.outputs])
        return finish(made)

    def before_step(self, optimizer: Any) -> None:
        """A torch optimizer is about to step. Raises NanError."""
        if not self._sets:
            return
        agreed, sets = self._found and self._found[0], list(self._sets)
        self._found, self._sets = None, {}
        if self._stepped() in (None, optimizer):
            self._stepped = weakref.ref(optimizer)
            self._steps += 1
        for number in sets:
            agreed = _first(self._begin_agreeing("check" if number >= GLOBAL else None, number, agreed).wait())
        if agreed is not None and getattr(
            optimizer, "found_inf", None
        ):  # GradScaler leaves it to fused ones to skip it
            self._skip()
        elif agreed is not None:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            if min(sets) < GLOBAL:  # of a bucket of DDP, which names no parameters
                agreed = (*agreed[:3], agreed[3] + _first_bad(parameters))
            self._act(agreed, [each.grad for each in parameters if each.grad is not None])

    # What is done

    def _act(self, agreed: Finding, arrays: Sequence[Any]) -> None:
        """arrays: of NumPy or torch."""
        _, _, rank, text = agreed
        if self._action == "raise":
            raise NanError(text)
        for each in arrays if self._action == "zero" else ():
            each[...] = 0
        self._reported += 1
        if rank == self._own.world.rank:
            done = ", and all that was reduced with it is zeroed" if self._action == "zero" else ""
            LOGGER.log(_level(self._reported), f"check: {text}{done}; {self._reported} so far")
            if self._reported == 1:
                launcher_link.report(self._own.settings.error_file, finding=text)

    def _skip(self) -> None:
        self._skipped += 1
        LOGGER.debug(
            f"check: a step with infinities that no optimizer made, as of a GradScaler; {self._skipped} so far"
        )


def _first(findings: Sequence[Finding | None]) -> Finding | None:
    return min((each for each in findings if each is not None), default=None)


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
