"""Horovod's callbacks for `model.fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from ringreduce.api.objects import allgather_object
from ringreduce.api.process_sets import global_process_set
from ringreduce.api.reduce import grouped_allreduce
from ringreduce.api.world import rank, size
from ringreduce.errors import InputError
from ringreduce.keras.either import CalledByEither, built, finalize, inner_of, of_either, rate_of, variables_of
from ringreduce.keras.local import DiLoCoCallback, LocalSGDCallback
from ringreduce.keras.ops import broadcast_variables
from ringreduce.keras.own import OwnVariables
from ringreduce.keras.together import TakesAllRanks

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "DiLoCoCallback", "LearningRateScheduleCallback"]
__all__ += ["LearningRateWarmupCallback", "LocalSGDCallback", "MetricAverageCallback"]


class BroadcastGlobalVariablesCallback(TakesAllRanks, keras.callbacks.Callback):  # type: ignore[misc]
    """Give all ranks the root's weights, and its optimizer's variables, before the first step.

    Where the first step makes some, as of a model that is not built yet, it is done after that step, as in Horovod.
    Random seeds stay each rank's own: dropout should differ.

    root_rank:       the rank whose variables all get.
    device:          Horovod's, without effect.
    local_variables: variables that stay each rank's own, with what the optimizer keeps of them, such as a momentum.
    Source: Horovod's callback of this name.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._local = [local_variables] if hasattr(local_variables, "assign") else list(local_variables or ())
        self._done, self._count = False, 0  # variables that were broadcast

    def register_local_var(self, variable: Any) -> None:
        """Let another variable stay each rank's own."""
        self._local.append(variable)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if all ranks have as many variables."""
        self._done, self._count, model = False, 0, self.model
        if model.optimizer is not None and all(each.built for each in model._flatten_layers()):
            built(model.optimizer, model.trainable_variables)
        counts = allgather_object(len(self._variables()) if model.built else 0)
        if 0 < min(counts) == max(counts):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if the first step has made variables, whatever a model or an optimizer has said of itself."""
        if not self._done and len(self._variables()) > self._count:
            self._broadcast()
        self._done = True

    def _broadcast(self) -> None:
        variables = self._variables()
        broadcast_variables(variables, self._root_rank)
        finalize(self.model)
        self._count = len(variables)

    def _variables(self) -> list[Any]:
        """Those that ranks share."""
        model = self.model
        variables, own = list(model.weights), OwnVariables(global_process_set)
        if model.optimizer is not None:
            variables += variables_of(model.optimizer)
        for each in self._local:
            own.add(each)
        kept = own.slots(variables)
        return [each for each in variables if each not in own and id(each) not in kept]


class MetricAverageCallback(TakesAllRanks, keras.callbacks.Callback):  # type: ignore[misc]
    """Average an epoch's metrics, including those of validation, over all ranks.

    Put it before callbacks that use metrics, such as ReduceLROnPlateau, EarlyStopping, ModelCheckpoint or TensorBoard:
    all ranks then see the same, and decide alike.

    device: Horovod's, without effect.
    Source: Horovod's callback of this name.
    """

    averages_metrics = True

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the averages to `logs`, which later callbacks, and the history, get."""
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if logs is None or not names:
            return
        values = [np.float64(logs[name]) for name in names]
        averages = grouped_allreduce(values, name="MetricAverageCallback", names=names)
        logs.update(zip(names, map(float, averages), strict=True))


class BestModelCheckpoint(TakesAllRanks, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Save the model whenever it is the best so far: rank 0 does, on behalf of all.

    filepath, monitor, verbose, save_weights_only, mode, save_freq: as of keras.callbacks.ModelCheckpoint, with
        save_best_only=True. Put MetricAverageCallback before it, so that it is the best for all ranks.
    Raises: InputError without a path: in Horovod its estimators for Spark set it.
    Source: Horovod's callback of this name.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        *,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        if filepath is None:
            raise InputError("BestModelCheckpoint: no path to save to; pass it: filepath='best.keras'")
        super().__init__(filepath, monitor, verbose, True, save_weights_only, mode, save_freq)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, with save_freq=N."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)


class LearningRateScheduleCallback(CalledByEither, keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to initial_lr * multiplier(epoch), from `start_epoch` to before `end_epoch`.

    initial_lr: the learning rate at the start of the training.
    multiplier: a function of the epoch; or a number, for multiplier ** (epoch - start_epoch).
    staircase: True: the rate changes with each epoch, a whole number. False: with each batch, and the epoch is
        epoch + batch / steps_per_epoch.
    momentum_correction: when the rate changes, the velocities of SGD and RMSprop with momentum change in proportion, as
        in Goyal et al., "Accurate, Large Minibatch SGD", 2017.
    steps_per_epoch: by default what each `model.fit` knows.
    Raises: InputError where that is not known and needed.
    Source: Horovod's callback of this name, which changes the momentum for one step instead: compiled steps, those of
        JAX and TensorFlow, would not see that.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InputError(f"{type(self).__name__}: initial_lr=None; expected the learning rate at the start")
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._staircase = staircase
        self._epochs = start_epoch, float("inf") if end_epoch is None else end_epoch
        self._corrects_momentum = momentum_correction
        self._given_steps = self._steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many steps an epoch has."""
        if self._staircase or self._given_steps:
            return
        self._steps_per_epoch = (self.params or {}).get("steps")  # another fit may have others
        if not self._steps_per_epoch:
            raise InputError(f"{type(self).__name__}: it is unknown how many steps an epoch has; pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, if this is the time."""
        start, end = self._epochs
        if not start <= self._epoch < end:
            return
        if not self._staircase:
            self._set_rate(self._epoch + batch / self._steps_per_epoch)  # type: ignore[operator]
        elif batch == 0:
            self._set_rate(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the learning rate as `lr`."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return rate_of(self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        before, rate = self._rate(), float(self._initial_lr * self._multiplier(epoch))
        if np.float32(rate) == np.float32(before):  # an optimizer keeps no more digits
            return
        optimizer = self.model.optimizer
        optimizer.learning_rate = rate
        if self._corrects_momentum and before:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (rate / before))


def _velocities(optimizer: Any) -> list[Any]:
    """The variables that hold sums of updates, to which the learning rate of their time was applied."""
    optimizer = inner_of(optimizer)
    if hasattr(optimizer, "_slots"):  # of a `legacy` one
        return [each["momentum"] for each in optimizer._slots.values() if "momentum" in each]
    if isinstance(optimizer, of_either("optimizers.SGD")):
        return list(getattr(optimizer, "momentums", ()))
    if isinstance(optimizer, of_either("optimizers.RMSprop")):
        return list(getattr(optimizer, "_momentums", ()))
    return []


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate evenly from initial_lr / size to initial_lr, batch by batch, in the first epochs.

    initial_lr: the learning rate for all ranks together, such as 0.1 * size().
    verbose:    1: rank 0 says when it is reached.
    The others: as of `LearningRateScheduleCallback`.
    Source: Horovod's callback of this name; Goyal et al., "Accurate, Large Minibatch SGD", 2017.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, self._factor, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose

    def _factor(self, epoch: float) -> float:  # a method: that of a copy looks at the copy
        epoch += 1 / self._steps_per_epoch  # type: ignore[operator]  # so that an epoch ends at a round number
        return (epoch * (size() - 1) / self._epochs[1] + 1) / size()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the learning rate; and the end of the warm-up."""
        ends = epoch == self._epochs[1] - 1
        if ends:  # as at its last batch: with steps_per_execution Keras tells of the first of several only
            self._set_rate(self._epochs[1] - 1 / self._steps_per_epoch)  # type: ignore[operator]
        super().on_epoch_end(epoch, logs)
        if self._verbose and ends and rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")
