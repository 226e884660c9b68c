"""ringreduce for JAX: collectives on arrays and trees of them, eagerly and inside `jax.jit`; optimizers of optax.

    import ringreduce.jax as hvd

host          what runs a collective on the host
primitive     the JAX primitive of all collectives: jit, grad and vmap go through it
xla           how XLA calls the host, with its own memory
ops           the public functions, on trees
compiled      jit, for small steps
parts         what check=divergence compares
steering      what an optimizer looks at beside its gradients, alike on all ranks
optimizer     DistributedOptimizer, value_and_grad, broadcast_parameters
local         diloco
"""
# ruff: noqa: F403

from ringreduce.errors import MissingExtraError as _MissingExtraError

try:
    import jax as _jax  # noqa: F401
except ImportError as exc:
    raise _MissingExtraError.of("ringreduce.jax needs JAX", "jax", exc) from exc

from ringreduce.frameworks.common import *
from ringreduce.frameworks.horovod import end_of as _end_of
from ringreduce.jax import elastic as elastic
from ringreduce.jax.compiled import *
from ringreduce.jax.local import *
from ringreduce.jax.ops import *
from ringreduce.jax.optimizer import *
from ringreduce.optim.local.options import Nesterov as Nesterov

__all__, _missing = _end_of(globals())


def __getattr__(name: str) -> object:
    plain = name.removesuffix("_")
    if plain.endswith("_async"):
        why = (
            "JAX dispatches a jitted function, and the collectives in it, asynchronously itself; "
            f"ringreduce.{plain} takes JAX's arrays and returns NumPy's"
        )
    elif plain != name and plain in __all__:
        why = f"JAX's arrays cannot be changed in place; use {plain}, whose result is a new array"
    else:
        return _missing(name)
    raise AttributeError(f"module {__name__!r} has no {name}: {why}", name=name)
