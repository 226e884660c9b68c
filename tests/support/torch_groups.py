"""What scripts of torch.distributed need to run one after the other in a process, which torch's own end with."""

import contextlib
import os

import torch.distributed as dist

import ringreduce as rr
from ringrun.agent.master_port import free_port


@contextlib.contextmanager
def groups_outlive_models():
    """In it what init_process_group() makes lives on, so that no model's destructor ends it.

    That holds the GIL, and waits for gloo's worker, which waits for the GIL when it drops its last operation.
    """
    groups, init = [], dist.init_process_group

    def kept(*args, **kwargs):
        init(*args, **kwargs)
        groups.append(dist.group.WORLD)

    dist.init_process_group = kept
    try:
        yield
    finally:
        dist.init_process_group = init
        groups.clear()  # without the GIL


def new_store():
    """Let env:// find a store of its own: at the port of the last one that might answer, with old addresses."""
    os.environ["MASTER_PORT"] = str(rr.broadcast_object(free_port(), 0))
