"""What all ranks of a `model.fit` do together: they end it, whoever has set `model.stop_training`.

a batch ends    what was set is taken back, until all ranks know of it: one that left alone would leave the others
                waiting. They learn of it a batch later, where a callback of any rank may set it in a batch;
an epoch ends   else they learn of it here. And ranks whose learning rates differ, or whose callbacks look at
                metrics that differ, are warned of; and those that train a model each, as nothing is reduced.

Where ranks begin with unequal numbers of batches or epochs, they are warned of it, and each decides for itself.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.objects import allgather_object
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.reduce import allreduce, allreduce_async
from ringreduce.api.world import rank
from ringreduce.collectives.ops import Max
from ringreduce.execution.signature import ranks_text
from ringreduce.execution.submission import Handle
from ringreduce.keras.either import CalledByEither, is_optimizer, of_either, rate_of, reduction_of
from ringreduce.keras.parts import compare_buffers
from ringreduce.runtime import is_initialized
from ringreduce.settings.log import JOB

HOOKS = "on_train_batch_end", "on_batch_end", "on_train_batch_begin", "on_batch_begin"
CURE = "put hvd.callbacks.MetricAverageCallback() before it, or let it use a value that is equal on all ranks"
WAIT = "ranks that end first leave the others waiting"
ALONE = (
    "nothing reduces the gradients: each rank trains its own model; compile the model with "
    "hvd.DistributedOptimizer(optimizer)"
)
KERAS = "keras.", "tf_keras."
CLOSE = 1e-6  # relative; values that are closer differ by rounding


class TakesAllRanks(CalledByEither):
    """A callback that communicates: all ranks have it, and train together."""

    averages_metrics = shares_weights = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A callback, which makes ranks decide together."""
        decide_together()
        return super().__new__(cls)


class Fit:
    """One, on this rank."""

    def __init__(self, callbacks: Any, process_set: ProcessSet) -> None:
        self._model, self._callbacks, self._set = callbacks.model, callbacks.callbacks, process_set
        self._wants = False
        self._batches, self._looks = 0, not any(getattr(each, "shares_weights", False) for each in self._callbacks)
        self._looks &= _reducing(self._model) is None
        self._pending: Handle | None = None  # the question that was asked after the batch before
        self._logs: dict[str, float] = {}
        self._has_warned_of: set[str] = set()  # alike on all ranks
        params = callbacks.params or {}
        self._epochs, self._steps = params.get("epochs") or 0, params.get("steps") or 0  # 0: not known
        decides = any(map(_may_stop_in_a_batch, self._callbacks))
        asks, *lengths = self._highest("its callbacks", [decides, *_both(self._epochs, self._steps)])
        self._asks_in_batches, self.is_together = bool(asks), not any(map(_differ, lengths[::2], lengths[1::2]))
        if not self.is_together:
            own = f"{self._epochs} epochs of {self._steps or 'an unknown number of'} batches"
            self._warn(f"it has {self._by_rank(own)}; {WAIT}: give all ranks the same number")

    def epoch_begins(self) -> None:
        """All ranks' models have come as far as this: compare what no optimizer has, if check=divergence is on."""
        if self._steps:
            compare_buffers(self._model, self._set, self._steps)

    def batch_ended(self) -> None:
        """Ask the others, and stop where one of them has wanted to in the batch before."""
        self._batches += 1
        if self._looks and self._batches == 1:  # what is broadcast has been
            _submitting().owed = _elements(self._model)
        if self._model.stop_training:
            self._wants, self._model.stop_training = True, False
        if not self._asks_in_batches:
            return
        if self._wanted_before():
            self._model.stop_training = True
            return
        asked = np.array([self._wants, not self._wants], np.int8)
        self._pending = allreduce_async(asked, name="model.fit, a batch", op=Max, process_set=self._set)

    def epoch_ends(self, logs: Mapping[str, Any] | None) -> None:
        """Callbacks are about to get these logs."""
        if self._looks and self._batches > 1:
            self._looks, submitting = False, _submitting()
            if submitting.has_shared_little(_elements(self._model), self._batches):
                self._warn(ALONE)
            submitting.owed = 0
        self._wants |= self._wanted_before()
        self._logs = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}

    def epoch_ended(self, epoch: int) -> None:
        """Ask the others."""
        if epoch + 1 == self._epochs and not self._steps:
            return  # it ends anyway, and others that have more data may not have come so far
        self._wants |= self._model.stop_training
        rate, steering = _rate(self._model), _steering(self._callbacks)
        asked = [self._wants, not self._wants, bool(steering), *_both(epoch, rate)]
        *wanted, steers, last, first, highest, lowest = self._highest("an epoch", asked)
        self._model.stop_training = self._all_stop(wanted)
        if _differ(last, first):
            self.is_together = False
            epochs = self._by_rank(f"epoch {epoch + 1}")
            self._warn(f"ranks have ended {epochs}; {WAIT}: begin with the same initial_epoch")
        if _differ(highest, lowest) and "rates" not in self._has_warned_of:
            self._warn_of_rates(epoch, rate)
        if steers and "metrics" not in self._has_warned_of:
            self._compare_metrics(epoch, steering)

    def _wanted_before(self) -> bool:
        pending, self._pending = self._pending, None
        return pending is not None and self._all_stop(pending.wait())

    def _all_stop(self, wanted: Sequence[float]) -> bool:
        """wanted: does a rank want to stop, and does one not?"""
        one_does, one_does_not = wanted
        if one_does and one_does_not and self._wants:
            JOB.warning(f"model.fit: rank {rank()} sets model.stop_training, so all ranks stop with it")
        return bool(one_does)

    def _highest(self, what: str, values: Sequence[float]) -> list[float]:
        asked = np.array(values, np.float64)
        answer: list[float] = allreduce(asked, name=f"model.fit, {what}", op=Max, process_set=self._set).tolist()
        return answer

    def _warn_of_rates(self, epoch: int, rate: float) -> None:
        self._has_warned_of.add("rates")
        setters = sorted(set().union(*allgather_object(_setters(self._callbacks), process_set=self._set)))
        self._warn(
            f"after epoch {epoch + 1} the learning rate is {self._by_rank(f'{rate:g}')}, so weights drift apart. If it "
            f"is {', '.join(setters) or 'what sets it'}: {CURE}"
        )

    def _compare_metrics(self, epoch: int, steering: Mapping[str, str]) -> None:
        records = allgather_object((rank(), self._logs, steering), process_set=self._set)
        for name, callback in {name: each for *_, its in records for name, each in its.items()}.items():
            values = {each: logs[name] for each, logs, _ in records if name in logs}
            if not np.allclose(list(values.values()), next(iter(values.values()), 0.0), CLOSE, 0.0, equal_nan=True):
                self._has_warned_of.add("metrics")
                found = _by_value({each: f"{value:g}" for each, value in values.items()})
                self._warn(f"{callback} decides based on {name!r}, which after epoch {epoch + 1} is {found}: {CURE}")

    def _by_rank(self, value: str) -> str:
        """What each rank has."""
        return _by_value(dict(allgather_object((rank(), value), process_set=self._set)))

    def _warn(self, text: str) -> None:
        if self._set.rank() == 0:
            JOB.warning(f"model.fit: {text}")


def _both(*values: float) -> list[float]:
    """Each and its negative, whose maxima over the ranks are the highest and, negative, the lowest."""
    return [each for value in values for each in (value, -value)]


def _differ(highest: float, lowest: float) -> bool:
    return highest + lowest > CLOSE * abs(highest)


def _by_value(values: Mapping[int, str]) -> str:
    """Such as `0.1 on ranks 0,2, 0.05 on rank 1`."""
    ranks = defaultdict(list)
    for each, value in values.items():
        ranks[value].append(each)
    return ", ".join(f"{value} on {ranks_text(those)}" for value, those in ranks.items())


def _may_stop_in_a_batch(callback: Any) -> bool:
    """Of Keras' own callbacks only these may; one's own may if they are called in a batch at all."""
    deciding = of_either("callbacks.TerminateOnNaN", "callbacks.LambdaCallback")
    if type(callback).__module__.startswith((*KERAS, "ringreduce.")) and not isinstance(callback, deciding):
        return False
    hooks = [getattr(callback, name) for name in HOOKS]
    defaults = [getattr(kind, name) for kind in of_either("callbacks.Callback") for name in HOOKS]
    return any(getattr(each, "__func__", each) not in defaults for each in hooks)


def _steering(callbacks: Iterable[Any]) -> dict[str, str]:
    """The names of metrics that callbacks decide by which see this rank's own, with those callbacks'."""
    found = {}
    for each in callbacks:
        if getattr(each, "averages_metrics", False):
            break
        if isinstance(name := getattr(each, "monitor", None), str) and getattr(each, "save_best_only", True):
            found[name] = type(each).__name__
    return found


def _setters(callbacks: Iterable[Any]) -> list[str]:
    """The callbacks that may set learning rates."""
    keras_own = of_either("callbacks.LearningRateScheduler", "callbacks.ReduceLROnPlateau")
    return [
        type(each).__name__
        for each in callbacks
        if isinstance(each, keras_own) or not type(each).__module__.startswith((*KERAS, "ringreduce."))
    ]


def _elements(model: Any) -> int:
    """Of its weights; count_params() of Keras refuses a model that is never called, such as one that trains others."""
    return sum(math.prod(each.shape) for each in model.weights)


def _rate(model: Any) -> float:
    """The learning rate; 0 for an optimizer without one."""
    optimizer = getattr(model, "optimizer", None)
    return rate_of(optimizer) if hasattr(optimizer, "learning_rate") else 0.0


def _reducing(model: Any) -> ProcessSet | None:
    """The ranks of an optimizer of the model that reduces."""
    for value in (getattr(model, "optimizer", None), *vars(model).values()):
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for each in several:
            if is_optimizer(each) and (reduction := reduction_of(each)) is not None:
                found: ProcessSet = reduction.process_set
                return found
    return None


def _submitting() -> Any:
    return runtime.current("model.fit").engine.submitting


def _process_set(callbacks: Any) -> ProcessSet | None:
    """Of an optimizer of the model that reduces, or all ranks where a callback takes them."""
    if (found := _reducing(callbacks.model)) is not None:
        return found
    return global_process_set if any(isinstance(each, TakesAllRanks) for each in callbacks.callbacks) else None


def together(callbacks: Any) -> Fit | None:
    """What all ranks decide together in a fit with this list of callbacks; None where this rank decides by itself."""
    process_set = _process_set(callbacks) if is_initialized() else None
    if process_set is None or not process_set.included() or (process_set.size() or 1) == 1:
        return None
    fit = Fit(callbacks, process_set)
    return fit if fit.is_together else None


def decide_together() -> None:
    """Let ranks decide together in every `model.fit` from now on.

    Anyone may set `model.stop_training`, Keras' own callbacks and those of a script, so it is Keras' list of them that
    changes; a fit in which ranks do not train together works as before.
    """
    for kind in of_either("callbacks.CallbackList"):
        _let_decide_together(kind)


def _let_decide_together(kind: Any) -> None:
    begins, epoch_begins = kind.on_train_begin, kind.on_epoch_begin
    batch_ends, epoch_ends = kind.on_train_batch_end, kind.on_epoch_end
    if hasattr(begins, "decides_together"):
        return

    def on_train_begin(self: Any, logs: Any = None) -> None:
        begins(self, logs)
        caller = sys._getframe(1)  # a loop of one's own may have such a list on some ranks only
        is_fit = caller.f_code.co_name == "fit" and caller.f_globals["__name__"].startswith(KERAS)
        self.fit_of_all_ranks = together(self) if is_fit else None

    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        epoch_begins(self, epoch, logs)
        if fit := getattr(self, "fit_of_all_ranks", None):
            fit.epoch_begins()

    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        batch_ends(self, batch, logs)
        if fit := getattr(self, "fit_of_all_ranks", None):
            fit.batch_ended()

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        fit = getattr(self, "fit_of_all_ranks", None)
        if fit:
            fit.epoch_ends(logs)
        epoch_ends(self, epoch, logs)
        if fit:
            fit.epoch_ended(epoch)
            self.fit_of_all_ranks = fit if fit.is_together else None

    on_train_begin.decides_together = True  # type: ignore[attr-defined]
    kind.on_train_begin, kind.on_epoch_begin = on_train_begin, on_epoch_begin
    kind.on_train_batch_end, kind.on_epoch_end = on_train_batch_end, on_epoch_end
