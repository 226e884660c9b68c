"""Data-parallel training for any array library, over a ring all-reduce on MPI.

    import ringreduce as rr

    rr.init()
    optimizer = rr.DistributedOptimizer(optimizer)
    rr.broadcast_parameters(params, root_rank=0)

Importing this package starts nothing: `init()` starts MPI. The public API is the `__all__` of the modules below.
"""
# ruff: noqa: F403

from types import ModuleType as _ModuleType

from ringreduce import elastic as elastic
from ringreduce import ps as ps
from ringreduce import sweeps as sweeps
from ringreduce._version import __version__ as __version__
from ringreduce.api.broadcast import *
from ringreduce.api.control import *
from ringreduce.api.gather import *
from ringreduce.api.info import Info as Info
from ringreduce.api.info import info as info
from ringreduce.api.objects import *
from ringreduce.api.ordered import *
from ringreduce.api.process_sets import *
from ringreduce.api.reduce import *
from ringreduce.api.world import *
from ringreduce.compression import Compression as Compression
from ringreduce.errors import *
from ringreduce.execution.submission import Handle as Handle
from ringreduce.not_there import no_attribute as _no_attribute
from ringreduce.ops import *
from ringreduce.optimizer import DistributedOptimizer as DistributedOptimizer
from ringreduce.run import run as run
from ringreduce.runtime import is_initialized as is_initialized
from ringreduce.runtime import shutdown as shutdown
from ringreduce.sampler import DistributedSampler as DistributedSampler
from ringreduce.sweeps import sweep as sweep

_values = list(globals().items())
__all__ = ["__version__", *(name for name, it in _values if name[0] != "_" and not isinstance(it, _ModuleType))]


def __getattr__(name: str) -> object:
    raise _no_attribute(__name__, name)
