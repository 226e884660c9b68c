"""A communication hook for DistributedDataParallel, for jobs that keep gloo or NCCL as their backend."""

import functools
from typing import Any

import torch
import torch.distributed as dist

import ringreduce as rr
from ringreduce import runtime
from ringreduce.compression import Quantized
from ringreduce.errors import InputError
from ringreduce.torch.distributed.group import RingProcessGroup

TIMEOUT_S = 1800.0  # torch's own default


def ddp_hook(compression: Quantized | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """`model.register_comm_hook(None, ringreduce.torch.ddp_hook)`: average DDP's buckets with ringreduce.

    In place of None: `Compression.int8` or `.int4`. Calls ringreduce.init() if nobody has. Gradients are in host
    memory.
    Raises: InputError for another compression, and for complex gradients with one; MismatchError, PeerLostError, at the
            end of backward.
    """
    if compression is not None and not isinstance(compression, Quantized):
        raise InputError(f"ddp_hook: state={compression!r}; expected Compression.int8, .int4, or None")
    if not rr.is_initialized():
        rr.init()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
    reduced = _group(runtime.current("ddp_hook").engine).allreduce([bucket.buffer()], options, compression)
    return reduced.get_future().then(lambda future: future.value()[0])


@functools.lru_cache(maxsize=1)
def _group(_: Any) -> RingProcessGroup:
    """All ranks, once an engine."""
    return RingProcessGroup(range(rr.size()), "of ddp_hook", TIMEOUT_S)
