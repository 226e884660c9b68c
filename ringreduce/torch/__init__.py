"""ringreduce for PyTorch: what `horovod.torch` has, by the same names, for tensors on the CPU or a GPU.

    import ringreduce.torch as hvd

Autograd goes through the collectives that return new tensors (ops.py); the others are those of `ringreduce`.
"""
# ruff: noqa: F403

from ringreduce.errors import MissingExtraError as _MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ImportError as exc:
    raise _MissingExtraError.of("ringreduce.torch needs PyTorch", "torch", exc) from exc

from ringreduce.api.broadcast import *
from ringreduce.api.control import *
from ringreduce.api.gather import *
from ringreduce.api.reduce import *
from ringreduce.api.sampler import gather_for_metrics as gather_for_metrics
from ringreduce.frameworks.common import *
from ringreduce.frameworks.horovod import end_of as _end_of
from ringreduce.numpy.local import DiLoCo as DiLoCo
from ringreduce.numpy.local import LocalSGD as LocalSGD
from ringreduce.optim.local.options import Nesterov as Nesterov
from ringreduce.optim.powersgd import PowerSGD as PowerSGD
from ringreduce.torch import elastic as elastic
from ringreduce.torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from ringreduce.torch.ops import *  # in place of those without autograd
from ringreduce.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from ringreduce.torch.ps import ps_rule as ps_rule
from ringreduce.torch.sharded import ShardedOptimizer as ShardedOptimizer
from ringreduce.torch.sparse import sparse_allreduce_async as sparse_allreduce_async
from ringreduce.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

__all__, _missing = _end_of(globals())


def __getattr__(name: str) -> object:
    if name == "ddp_hook":  # its package imports all of torch.distributed
        from ringreduce.torch.bucket_hook import ddp_hook

        return ddp_hook
    return _missing(name)
