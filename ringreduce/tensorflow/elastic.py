"""hvd.elastic for TensorFlow: states of a Keras model, or of variables, in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.elastic import common
from ringreduce.elastic.common import *  # noqa: F403
from ringreduce.elastic.state import ObjectState
from ringreduce.errors import InputError
from ringreduce.keras.elastic import KerasState

__all__ = ["TensorFlowKerasState", "TensorFlowState"]
__all__ += common.__all__

TensorFlowKerasState = KerasState


class TensorFlowState(ObjectState):
    """A state of TensorFlow's or Keras' variables, and any other attributes; see `ringreduce.elastic.ObjectState`.

        state = hvd.elastic.TensorFlowState([weights, *optimizer.variables], batch=0)

    variables: the same on each rank, in the same order; they are restored in place.
    session:   Horovod's, without effect.

    Cost of a commit: as ObjectState's, and one more copy, out of the framework.
    Raises: InputError without variables, as TensorFlow 2 has no collection of all of them; in restore() and sync()
            where a variable has another shape than in the commit.
    Source: Horovod's TensorFlowState.
    """

    variables: Any

    def __init__(
        self,
        variables: Iterable[Any] | None = None,
        session: Any = None,
        *,
        local: Iterable[str] = (),
        **attributes: Any,
    ) -> None:
        own = _Variables(variables or ())
        if not own:
            raise InputError("TensorFlowState: no variables; pass them: TensorFlowState(model.variables, …)")
        super().__init__(None, None, local=local, variables=own, **attributes)


class _Variables(list[Any]):
    """Variables as an attribute of a state, by their places."""

    def state_dict(self) -> dict[int, Any]:
        """Copies of their values."""
        return {number: np.array(tf.convert_to_tensor(each)) for number, each in enumerate(self)}

    def load_state_dict(self, values: Mapping[int, Any]) -> None:
        """Assign these."""
        shapes = [tuple(each.shape) for each in values.values()]
        if shapes != (own := [tuple(each.shape) for each in self]):
            raise InputError(f"TensorFlowState: variables of the shapes {own}, but the last commit has {shapes}")
        for variable, value in zip(self, values.values(), strict=True):
            variable.assign(value)
