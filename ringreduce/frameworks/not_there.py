"""Optimizers of frameworks that have no adapter: the errors say what to use instead."""

from typing import Any

_NO_ADAPTER = {
    "flax": "flax's optimizers are made from optax's: wrap those, such as nnx.Optimizer(model, "
    "ringreduce.jax.DistributedOptimizer(optax.adam(1e-3)), wrt=nnx.Param)",
    "keras": "for an optimizer of Keras 3 use ringreduce.keras.DistributedOptimizer; if this is an older one, "
    "pip install --upgrade keras",
}


def check_adapter(optimizer: Any) -> None:
    """Raise TypeError for an optimizer of a framework that has no adapter yet."""
    libraries = [base.__module__.partition(".")[0] for base in type(optimizer).__mro__]
    for library in libraries:
        if library in _NO_ADAPTER:
            raise TypeError(f"DistributedOptimizer: {_NO_ADAPTER[library]}")
