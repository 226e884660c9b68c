"""LocalSGD and DiLoCo for `model.fit`: callbacks that average a model's parameters; see `ringreduce.optim.local`."""

from __future__ import annotations

from typing import Any, NoReturn

import keras
import numpy as np

from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.keras.together import TakesAllRanks
from ringreduce.optim.local.options import Options, Outer
from ringreduce.optim.local.steps import HasLocalSteps, LocalSteps, Parameters


class _LocalStepsCallback(TakesAllRanks, HasLocalSteps, keras.callbacks.Callback):  # type: ignore[misc]
    shares_weights = True

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._state: dict[str, Any] = {}
        self._local = LocalSteps(options, self._variables, self.state_dict)  # methods: those of a copy are the copy's

    def on_train_begin(self, logs: Any = None) -> None:
        """Remember where all ranks begin."""
        if not self.model.built:
            raise InputError(f"{type(self).__name__}: the model has no weights yet; build it first: model.build(shape)")
        self._local.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a step, and average if it is time."""
        if hasattr(self.model, "jax_state_sync"):  # during an epoch only Keras' loop over its batches has them
            self.model.jax_state_sync()
        self._local.begin()
        self._local.end()

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have alike: an elastic state commits it."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what `state_dict` returned; parameters become the anchors."""
        self._state = state_dict
        self.begin_from_anchors()

    def _variables(self) -> Parameters:
        """Numbered, as the names that Keras gives layers differ between ranks; a frozen layer's have numbers, too."""
        if self.model is None:
            return {}
        trains = {id(each) for each in self.model.trainable_variables}
        return {f"variable.{n}": _Flat(each) for n, each in enumerate(self.model.weights) if id(each) in trains}


class LocalSGDCallback(_LocalStepsCallback):
    """Every rank trains on its own, and the parameters are averaged every `sync_every` batches.

    As `DiLoCoCallback` with all parameters at once, the plain mean, and no delay.
    """

    def __init__(
        self, sync_every: int, *, warmup_steps: int = 0, compression: AnyCompressor = Compression.none
    ) -> None:
        super().__init__(Options("LocalSGDCallback", sync_every, warmup_steps, compression=compression))


class DiLoCoCallback(_LocalStepsCallback):
    """Every rank trains on its own, and the trainable parameters are averaged in turn; the options are `DiLoCo`'s.

    Put it before other callbacks that look at the weights, and after BroadcastGlobalVariablesCallback, on all ranks,
    with a model that is built. A step is a call of on_train_batch_end. After model.fit, and for an evaluation of its
    own, `with callback.averaged():` has the mean of all ranks' parameters. In an elastic job it is an attribute of the
    state: KerasState(model, averaging=callback).

    Cost:   as `DiLoCo`, and two copies of a fragment, out of the framework and into it.
    Raises: InputError for wrong options, and a model that is not built.
    Source: see `ringreduce.optim.local`.
    """

    def __init__(
        self,
        sync_every: int,
        *,
        outer: Outer | None = None,
        fragments: int = 1,
        delay: int = 0,
        compression: AnyCompressor = Compression.none,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(Options("DiLoCoCallback", sync_every, warmup_steps, fragments, delay, outer, compression))


class _Flat:
    """A variable as a row of numbers, by copies on the host: of a single one, too, arithmetic makes an array then."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.shape = (int(np.prod(variable.shape)),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(keras.ops.convert_to_numpy(self.variable), dtype).reshape(-1)

    def __setitem__(self, _: Any, values: Any) -> None:
        """Assign a copy, as JAX keeps such memory for its own."""
        self.variable.assign(np.array(values).reshape(self.variable.shape))


def wrapped(optimizer: Any, parameters: Any, options: Options) -> NoReturn:
    """Raises TypeError: Keras' optimizers take local steps by a callback."""
    raise TypeError(
        f"{options.function}: for an optimizer of Keras pass ringreduce.keras.callbacks.{options.function}Callback "
        "to model.fit(callbacks=[…])"
    )
