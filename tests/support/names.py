"""The names that every framework's module has."""

from types import ModuleType

from ringreduce import errors
from ringreduce.elastic import common as elastic
from ringreduce.frameworks import common

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
