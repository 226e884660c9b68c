"""Groups of torch.distributed that are made anew after a loss, or are not."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import ringreduce.torch as hvd

folder, makes_anew = sys.argv[1], sys.argv[2] == "anew"
hvd.init()
me = hvd.rank()


def join():
    if dist.is_initialized():
        dist.destroy_process_group()
    store = f"file://{folder}/{hvd.size()}"
    dist.init_process_group("ring", init_method=store, rank=hvd.rank(), world_size=hvd.size())


@hvd.elastic.run
def train(state):
    if makes_anew and dist.get_world_size() != hvd.size():
        join()
    while state.step < 6:
        if state.step == 3 and me == 0 and hvd.size() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.ones(3) * (me + 1)
        dist.all_reduce(value)
        state.value = value.tolist()
        state.step += 1
        state.commit()
    dist.barrier(dist.new_group())
    return state.value, hvd.rank(), hvd.size()


join()
print("made", me, train(hvd.elastic.TorchState(step=0, value=None)))
dist.destroy_process_group()
