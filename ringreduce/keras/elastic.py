"""hvd.elastic for Keras: a model and its optimizer that survive the death of ranks, and callbacks that commit them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from ringreduce.elastic import common
from ringreduce.elastic.commit import PutBack
from ringreduce.elastic.common import *  # noqa: F403
from ringreduce.elastic.state import ObjectState, State
from ringreduce.errors import InputError
from ringreduce.keras import committed
from ringreduce.keras.either import CalledByEither, built, is_layer, is_optimizer

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]
__all__ += common.__all__


class KerasState(ObjectState):
    """A state of a model, its optimizer, and any other attributes; see `ringreduce.elastic.ObjectState`.

        state = hvd.elastic.KerasState(model, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state):
            own = [hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)]
            model.fit(data, epochs=10 - state.epoch, callbacks=own)

    model:     a model that is built; all its variables are kept, the states of random seeds too.
    optimizer: by default the one that the model is compiled with, also when it has been compiled anew.
    backend:   Horovod's, without effect.
    Any attribute may be a model, a layer or an optimizer of Keras. For dropout that differs between ranks, and comes
    again after a loss: KerasState(model, dropout=model.get_layer("dropout"), local=("dropout",)).
    Between commits layers may be frozen or unfrozen, and the model compiled anew with an optimizer of the same class: a
    state that goes back trains what it trained then.

    Cost of a commit: as ObjectState's, and one more copy, out of the framework.
    Raises: InputError for a model that is not built; in restore() and sync() where the model has variables of other
            names or shapes than the commit, or the optimizer is of another class.
    Source: Horovod's KerasState.
    """

    model: Any

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, *, local: Iterable[str] = (), **attributes: Any
    ) -> None:
        if not model.built:
            raise InputError("KerasState: the model has no weights yet; build it first: model.build(input_shape)")
        self._is_models = optimizer is None
        optimizer = _built(_optimizer_of(model) if optimizer is None else optimizer, model)
        super().__init__(None, None, local=local, model=model, optimizer=optimizer, **attributes)

    def restore(self) -> None:
        """See `ObjectState.restore`; what was frozen at the commit is frozen again, and nothing else."""
        self._follow()
        super().restore()

    def _tree(self, own: bool = False) -> dict[str, Any]:
        self._follow()
        return super()._tree(own)

    def _follow(self) -> None:
        """Where the model has been compiled anew its optimizer is another one."""
        if self._is_models:
            self.optimizer = _built(_optimizer_of(self.model), self.model)

    @property
    def _models(self) -> list[Any]:
        values = (getattr(self, name, None) for name in self._names)
        return [each for each in values if is_layer(each)]

    def _taken(self, value: Any) -> Any:
        return committed.taken(value, self._models) if _has_variables(value) else super()._taken(value)

    def _put_back(self, value: Any, saved: Any, put_back: PutBack) -> Any:
        if not _has_variables(value):
            return super()._put_back(value, saved, put_back)
        committed.put_back(value, saved, self._models)
        return value


def _optimizer_of(model: Any) -> Any:
    """None where the model is not compiled, as in a training loop of the user's own."""
    return getattr(model, "optimizer", None)


def _built(optimizer: Any, model: Any) -> Any:
    """The optimizer, with the variables that it needs for the model's."""
    return optimizer and built(optimizer, model.trainable_variables)


def _has_variables(value: Any) -> bool:
    return is_layer(value) or is_optimizer(value)


class CommitStateCallback(CalledByEither, keras.callbacks.Callback):  # type: ignore[misc]
    """Commit a state every `batches_per_commit` batches of `model.fit`, and after each epoch.

    Put it behind the callbacks that update the state, so that the commit has what they set.
    Source: Horovod's callback of this name.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Count anew, so that all ranks commit after the same batches."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if this is the time."""
        self._batches += 1
        if self._batches == self._batches_per_commit:
            self._batches = 0
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._state.commit()


class UpdateEpochStateCallback(CalledByEither, keras.callbacks.Callback):  # type: ignore[misc]
    """Keep in `state.epoch` how many epochs are done, including those before a loss.

    `model.fit` may count from 0, as in epochs=10 - state.epoch, or go on, as in initial_epoch=state.epoch, epochs=10.
    Source: Horovod's callback of this name.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self._state.epoch += 1


class UpdateBatchStateCallback(CalledByEither, keras.callbacks.Callback):  # type: ignore[misc]
    """Keep in `state.batch` how many batches of the epoch are done: the next `model.fit` may leave them out.

    Those before a loss count, too, as in model.fit(data.skip(state.batch), …), for the first epoch alone.
    Source: Horovod's callback of this name, which has the number of the last batch.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._before = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on with the epoch in which the state is."""
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count; with steps_per_execution `batch` is the last of several."""
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with its first batch."""
        self._state.batch = self._before = 0
