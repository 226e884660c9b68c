"""What Horovod has and ringreduce does not have yet: the errors say what to use instead."""

from typing import Any

_RINGRUN = "start your script with `ringrun -np N python train.py`"
_NOT_THERE = {
    "run_elastic": "start an elastic script with `ringrun --elastic -np N python train.py`",
    "spark": _RINGRUN,
    "ray": _RINGRUN,
    "callbacks": "they are for Keras, which has no adapter yet; call ringreduce's functions in your own training loop",
    "keras": "in your own training loop apply the result of ringreduce.grouped_allreduce(gradients)",
    "tensorflow": "pass arrays that support DLPack to ringreduce's functions",
}
_NO_ADAPTER = {
    "flax": "flax's optimizers are made from optax's: wrap those, such as nnx.Optimizer(model, "
    "ringreduce.jax.DistributedOptimizer(optax.adam(1e-3)), wrt=nnx.Param)",
    "keras": "Keras has no adapter yet, and model.fit would train each rank alone; in your own loop apply the "
    "result of ringreduce.grouped_allreduce(gradients)",
}


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module lacks."""
    instead = f": it is not supported yet; {_NOT_THERE[name]}" if name in _NOT_THERE else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{instead}", name=name)


def check_adapter(optimizer: Any) -> None:
    """Raise TypeError for an optimizer of a framework that has no adapter yet."""
    libraries = [base.__module__.partition(".")[0] for base in type(optimizer).__mro__]
    for library in libraries:
        if library in _NO_ADAPTER:
            raise TypeError(f"DistributedOptimizer: {_NO_ADAPTER[library]}")
