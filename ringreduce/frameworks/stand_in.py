"""What `import horovod` gives in jobs of `ringrun --horovod`: the modules that Horovod has, with what is here.

The launcher's folder horovod/ is on the path of those ranks, and of what they start. It holds a package `horovod`,
which calls `stand_in`, and its metadata: libraries that look for Horovod, whether by import, importlib.util.find_spec
or importlib.metadata, find it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ringreduce.frameworks.horovod import MODULES, VERSION, WITHOUT, no_attribute


def stand_in(horovod: ModuleType) -> None:
    """Let a module, imported as `horovod`, and what is imported from below it, have what Horovod has."""
    sys.meta_path.append(_Finder())
    _fill(horovod)
    horovod.__dict__["__version__"] = VERSION


class _Finder:
    """Finds and makes the modules below `horovod`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """See importlib."""
        if name in MODULES or _without(name):
            is_package = any(each.startswith(f"{name}.") for each in (*MODULES, *WITHOUT)) or name in WITHOUT
            return importlib.machinery.ModuleSpec(name, self, origin=__file__, is_package=is_package)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> None:
        """Raise ImportError for a module of which nothing is here."""
        if text := _without(spec.name):
            raise ImportError(f"there is no {spec.name} in ringreduce: {text}", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Fill it."""
        _fill(module)

    def get_code(self, name: str) -> Any:
        """For `python -m`: the code of the module here."""
        here = MODULES[name].here.split()[0]
        return importlib.util.find_spec(here).loader.get_code(here)  # type: ignore[union-attr]


def _without(name: str) -> str:
    """Why there is no such module, and what to use; empty where there is one, or where Horovod has none."""
    parent, _, last = name.rpartition(".")
    is_other_name = parent in MODULES and last in MODULES[parent].names.split()  # of which its parent tells
    above = () if name in MODULES or is_other_name else WITHOUT
    return next((WITHOUT[each] for each in above if f"{name}.".startswith(f"{each}.")), "")


def _fill(module: ModuleType) -> None:
    """Give a module Horovod's names; when asked, what else there is here, and errors for the rest."""
    own = MODULES[module.__name__]
    here = [importlib.import_module(each) for each in own.here.split()]
    names = [name for name in own.names.split() if f"{module.__name__}.{name}" not in MODULES]
    found = {name: getattr(each, name) for name in names for each in reversed(here) if hasattr(each, name)}
    module.__dict__.update(found, __getattr__=functools.partial(_attribute, module.__name__, here), __all__=[*found])
    module.__doc__ = f"{module.__name__} of Horovod, replaced by {own.here}."


def _attribute(module: str, here: Sequence[ModuleType], name: str) -> Any:
    if f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    for each in here:
        if name[:2] != "__" and hasattr(each, name):
            return getattr(each, name)
    raise no_attribute(module, name, sys._getframe(1))
