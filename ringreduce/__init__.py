"""Data-parallel training for any array library, over a ring all-reduce on MPI.

    import ringreduce as rr

    rr.init()
    optimizer = rr.DistributedOptimizer(optimizer)
    rr.broadcast_parameters(params, root_rank=0)

Importing this package starts nothing: `init()` starts MPI. It loads little, too: a module of the API is imported when a
name of it is first used, so a process that never calls `init()`, such as a data loader's worker, does not pay for it.
"""

from importlib import import_module as _import_module

from ringreduce.frameworks.horovod import no_attribute as _no_attribute

__version__ = "0.1.0"
"""A literal, so that setup.cfg and ringrun can read it without importing the package."""

with open(f"{__path__[0]}/__init__.pyi") as _stub:
    _module_of = {line.split()[-1]: line.split()[1] for line in _stub if line.startswith("from ")}
__all__ = [name for name, module in _module_of.items() if module != __name__]


def __getattr__(name: str) -> object:
    """Import what stands behind a name of the API; from then on the name is an attribute like any other."""
    if name not in _module_of:
        raise _no_attribute(__name__, name)
    module = _module_of[name]
    value = _import_module(f"{module}.{name}") if module == __name__ else getattr(_import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_module_of})
