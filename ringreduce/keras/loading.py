"""Models that are loaded: their optimizers are wrapped as they were when they were saved."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from ringreduce.api.world import rank, size
from ringreduce.compression import AnyCompressor
from ringreduce.errors import InputError
from ringreduce.keras import saved
from ringreduce.keras.either import inner_of, is_legacy, is_of_keras_2, of_either
from ringreduce.keras.optimizer import DistributedOptimizer
from ringreduce.runtime import is_initialized
from ringreduce.settings.log import JOB

__all__ = ["load_model"]


class _Plain:
    """Stands for the `_clip_gradients` of an optimizer that was one of ours, and that Keras loaded or copied.

    One of Keras 2 calls it, too.
    """

    def __init__(self, optimizer: Any, options: dict[str, Any]) -> None:
        self._optimizer, self.options = optimizer, options

    def __call__(self, gradients: Sequence[Any]) -> Any:
        """The gradients, clipped; the first time it says that they are not reduced."""
        optimizer = self._optimizer
        if vars(optimizer).pop("_clip_gradients") and is_initialized() and size() > 1:
            JOB.warning(
                f"rank {rank()} of {size()} trains alone: its {type(optimizer).__name__} was a DistributedOptimizer, "
                "but the optimizer that Keras loaded or copied is a plain one; use hvd.load_model(path), or wrap it"
            )
        return type(optimizer)._clip_gradients(optimizer, gradients)


def _writing(kept: dict[str, Any]) -> Callable[[str], None]:
    return functools.partial(saved.write, kept)


def _load_assets(self: Any, folder: str | None) -> None:
    kept = saved.read(folder)
    if kept is not None:
        vars(self).update(_clip_gradients=_Plain(self, kept), save_assets=_writing(kept))


def read_options() -> None:
    """Let optimizers be given what their files have, also of tf_keras where that is imported.

    Keras calls load_assets for each object that a file has assets of.
    """
    for kind in of_either("optimizers.Optimizer"):
        if not hasattr(kind, "load_assets"):
            kind.load_assets = _load_assets  # type: ignore[attr-defined]


read_options()
_OPTIONS = inspect.signature(DistributedOptimizer).parameters.keys() - {"optimizer"}


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: AnyCompressor | None = None,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a saved model with its optimizer and the optimizer's state, and wrap the optimizer as before.

    A file in Keras' format (.keras) has the options of its DistributedOptimizer, all but a class of one's own for
    compression, and a process set that does not exist here. One in HDF5 (.h5), or of an optimizer that was not wrapped,
    has none: the defaults of DistributedOptimizer hold. So it is of Keras 2, but for a `legacy` optimizer, of which
    Keras does not keep the state either.

    filepath: what keras.models.load_model takes; every rank reads it.
    custom_optimizers: classes of optimizers that Keras does not know; custom_objects: other objects, by name.
    compression, options: of `DistributedOptimizer`, in place of what the file has; further options are those of
        keras.models.load_model.
    legacy_opts: Horovod's, without effect: the file says which optimizer it has.

    Raises: InputError for what the file does not have and must be passed: the compression or process set above; and
            backward_passes_per_step, where the optimizer accumulates.
    Source: Horovod's load_model.
    """
    return loaded(keras.models.load_model, filepath, custom_optimizers, custom_objects, compression, options)


def loaded(
    load: Callable[..., Any],
    filepath: Any,
    custom_optimizers: Sequence[type] | None,
    custom_objects: dict[str, Any] | None,
    compression: AnyCompressor | None,
    options: dict[str, Any],
) -> Any:
    """What `load_model` returns.  load: the function of this name of Keras 3, or of Keras 2."""
    given = {name: options.pop(name) for name in _OPTIONS & options.keys()}
    given |= {} if compression is None else {"compression": compression}
    read_options()
    known = {**(custom_objects or {}), **{each.__name__: each for each in custom_optimizers or ()}}
    model = load(filepath, custom_objects=known, **options)
    if getattr(model, "optimizer", None) is not None:
        given = _options_of(model.optimizer, given, filepath)
        own = given.pop("local_variables", ())
        DistributedOptimizer(model.optimizer, **given)
        for number in own:
            model.optimizer.register_local_var(model.trainable_variables[number])
    return model


def _options_of(optimizer: Any, given: dict[str, Any], path: Any) -> dict[str, Any]:
    """The arguments by which an optimizer that was loaded is wrapped."""
    inner = inner_of(optimizer)
    plain, passes = vars(inner).get("_clip_gradients"), getattr(inner, "gradient_accumulation_steps", None)
    if isinstance(plain, _Plain):
        return saved.arguments(plain.options, given)
    if passes and "backward_passes_per_step" not in given:
        raise InputError(
            f"load_model: {path} does not say who accumulates {passes} gradients; pass "
            f"backward_passes_per_step={passes} if DistributedOptimizer did, with average_aggregated_gradients if it "
            "averaged them; or backward_passes_per_step=1 if the optimizer's own gradient_accumulation_steps did"
        )
    if (format_ := _without_options(inner, str(path))) and not given and rank() == 0:
        cure = "" if is_legacy(inner) else ", or save in Keras' own format, .keras"
        JOB.warning(
            f"load_model: {path}: {format_} does not keep the options of DistributedOptimizer, so the defaults are "
            f"used, op=Average among them; pass those that you set{cure}"
        )
    return given


def _without_options(optimizer: Any, path: str) -> str:
    """What format it is that has none; empty for Keras' own."""
    if path.endswith((".h5", ".hdf5")):
        return "HDF5"
    if is_of_keras_2(optimizer) and not path.endswith(".keras"):
        return "SavedModel"
    return "for a `legacy` optimizer Keras 2" if is_legacy(optimizer) else ""
