"""The names that every framework's module has, and those that Horovod has."""

import contextlib
import importlib
import sys
from types import ModuleType

from ringreduce import errors
from ringreduce.elastic import common as elastic
from ringreduce.frameworks import common
from ringreduce.frameworks.horovod import MODULES, instead
from ringrun.environment import HOROVOD_DIRECTORY

OURS = {*errors.__all__, "DistributedSampler", "info", "mark_step", "ordered", "run", "stats"}
ELASTIC = {"ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"}


def assert_has_them(framework):
    """The module, and its elastic one where there is one, list all of them; those of ours are ringreduce's own."""
    names = {name for name, value in vars(common).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert names >= OURS
    assert set(framework.__all__) >= names
    assert all(getattr(framework, name) is getattr(common, name) for name in OURS)
    assert set(elastic.__all__) == ELASTIC
    if hasattr(framework, "elastic"):
        assert set(framework.elastic.__all__) > ELASTIC
        assert all(hasattr(framework.elastic, name) for name in framework.elastic.__all__)


def unexplained(prefix):
    """Horovod's public names that are neither there nor told what to use instead, of its modules of this prefix.

    `import horovod` must find the launcher's, as in `standing_in`.
    """
    missing = []
    for module in [each for each in MODULES if f"{each}.".startswith(f"{prefix}.")]:
        stands = importlib.import_module(module)
        for name in MODULES[module].names.split():
            try:
                getattr(stands, name)
            except AttributeError as error:
                if not str(error).endswith(f"module {module!r} has no attribute {name!r}: {instead().get(name)}"):
                    missing.append(f"{module}.{name}")
    return missing


@contextlib.contextmanager
def standing_in():
    """Within it, and in no other test, `import horovod` is ringreduce's in this process."""
    sys.path.insert(0, HOROVOD_DIRECTORY)
    finders = [*sys.meta_path]
    try:
        yield
    finally:
        sys.path.remove(HOROVOD_DIRECTORY)
        sys.meta_path[:] = finders
        for name in [each for each in sys.modules if f"{each}.".startswith("horovod.")]:
            del sys.modules[name]
