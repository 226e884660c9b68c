"""What the elastic module of every framework exports as it is."""

from ringreduce.elastic.loop import run as run
from ringreduce.elastic.sampler import ElasticSampler as ElasticSampler
from ringreduce.elastic.state import ObjectState as ObjectState
from ringreduce.elastic.state import State as State
from ringreduce.errors import HorovodInternalError as HorovodInternalError
from ringreduce.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"]
