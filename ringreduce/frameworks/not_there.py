"""Horovod's names that ringreduce does not have, or has elsewhere: the errors say what to use instead."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

MXNET = (
    "MXNet was archived in 2023, and its last release, 1.9.1 of 2022, needs a NumPy older than 1.24; its arrays work "
    "as NumPy arrays: ringreduce.allreduce(array.asnumpy())"
)
_RINGRUN = "it is not supported yet; start your script with `ringrun -np N python train.py`"
_OF_TF1 = "it is of TensorFlow 1; use broadcast_variables(variables, root_rank)"
_INSTEAD = {
    "elastic": "use ringreduce.keras.elastic, whose KerasState keeps a model and its optimizer, or ringreduce.elastic",
    "run_elastic": "it is not supported yet; start an elastic script with `ringrun --elastic -np N python train.py`",
    "spark": _RINGRUN,
    "ray": _RINGRUN,
    "callbacks": "they are for Keras, in ringreduce.keras.callbacks",
    "keras": "use import ringreduce.keras",
    "tensorflow": "use import ringreduce.tensorflow",
    "mxnet": MXNET,
    "broadcast_global_variables": _OF_TF1,
    "BroadcastGlobalVariablesHook": _OF_TF1,
}
_NO_ADAPTER = {
    "flax": "flax's optimizers are made from optax's: wrap those, such as nnx.Optimizer(model, "
    "ringreduce.jax.DistributedOptimizer(optax.adam(1e-3)), wrt=nnx.Param)",
    "keras": "for an optimizer of Keras 3 use ringreduce.keras.DistributedOptimizer; if this is an older one, "
    "pip install --upgrade keras",
    "tf_keras": "this is an optimizer of Keras 2; use those of Keras 3, keras.optimizers, with ringreduce.keras",
}


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module lacks."""
    instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{instead}", name=name)


def end_of(module: dict[str, Any]) -> tuple[list[str], Callable[[str], NoReturn]]:
    """The `__all__` of a framework's module, all its public names but modules, and its `__getattr__`."""

    def missing(name: str) -> NoReturn:
        raise no_attribute(module["__name__"], name)

    return [name for name, it in module.items() if name[0] != "_" and not isinstance(it, ModuleType)], missing


def check_adapter(optimizer: Any) -> None:
    """Raise TypeError for an optimizer of a framework that has no adapter yet."""
    libraries = [base.__module__.partition(".")[0] for base in type(optimizer).__mro__]
    for library in libraries:
        if library in _NO_ADAPTER:
            raise TypeError(f"DistributedOptimizer: {_NO_ADAPTER[library]}")
