"""Training over the backend "ring": each program runs over gloo, too, where nothing but the backend's name differs."""

import contextlib
import copy
import functools
import os
import tempfile
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.tiers import extended, parted
from tests.support.torch_groups import groups_outlive_models

STEPS = 6


class Model(nn.Module):
    """The tutorial's ToyModel, with a layer that not every input uses, and a norm that has buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(10, 12), nn.Linear(12, 5), nn.Linear(12, 5)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x, rare=True):
        hidden = torch.relu(self.norm(self.first(x)))
        return self.second(hidden) + (self.rare(hidden) if rare else 0)


def new_model():
    torch.manual_seed(0)
    return Model()


def batches(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        yield torch.randn(8, 10, generator=generator), torch.randn(8, 5, generator=generator)


def train(model, optimizer, rank, options=lambda number: {}, steps=STEPS):
    for number, (x, target) in enumerate(list(batches(rank))[:steps]):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x, **options(number)), target).backward()
        optimizer.step()
    return model


def ddp(rank, size, hook=None, **options):
    model = DistributedDataParallel(new_model(), **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), rank)


def hook_of_ringreduce(rank, size):
    import ringreduce.torch

    return ddp(rank, size, (None, ringreduce.torch.ddp_hook) if dist.get_backend() == "gloo" else None)


def large_buckets(rank, size):
    """Which the backend "ring" moves into memory that all ranks have mapped, and reduces in place; but one."""
    torch.manual_seed(0)
    layers = [nn.Linear(600, 600) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS + 4):
        model(torch.randn(8, 600, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step == 1:
            kept = [layers[0].weight.grad.numpy()]  # which must stay that gradient's memory
    moved = {each.weight.grad.untyped_storage().is_shared() for each in layers}
    assert moved == ({True, False} if dist.get_backend() == "ring" else {False})
    assert kept[0].ctypes.data == layers[0].weight.grad.data_ptr()
    return model


def unused_parameters(rank, size):
    model = DistributedDataParallel(new_model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return train(model, optimizer, rank, lambda number: {"rare": number % 2 == rank % 2})


def no_sync(rank, size, compile=lambda model: model):
    model = compile(DistributedDataParallel(new_model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, (x, target) in enumerate(batches(rank)):
        with contextlib.nullcontext() if number % 2 else model.no_sync():
            nn.functional.mse_loss(model(x), target).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


def zero(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(new_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    train(model, optimizer, rank)
    optimizer.consolidate_state_dict(0)
    return model


def hooks(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    ddp(rank, size, (None, default_hooks.fp16_compress_hook))
    ddp(rank, size, (dist.group.WORLD, default_hooks.allreduce_hook))
    torch.manual_seed(0)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return ddp(rank, size, (state, powerSGD_hook.powerSGD_hook))


def uneven_inputs(rank, size, **options):
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(**options):
        return train(model, optimizer, rank, steps=STEPS - rank)


def fsdp(rank, size):
    from torch.distributed.fsdp import fully_shard

    model = new_model()
    model.norm = nn.Identity()
    for each in (model.first, model.second, model):
        fully_shard(each, mesh=dist.init_device_mesh("cpu", (size,)))
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), rank)
    return [each.full_tensor() for each in model.parameters()]


def fsdp_of_flat_parameters(rank, size):
    """FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = new_model()
    model.norm = nn.Identity()
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    model.first = wrap(model.first)
    model = wrap(model)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return [each.detach().clone() for each in model.parameters()]


def tensor_parallel(rank, size, compile=lambda model: model):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 5))
    torch.manual_seed(0)
    for each in model.parameters():
        nn.init.normal_(each)
    mesh = dist.init_device_mesh("cpu", (size,))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(compile(model), torch.optim.SGD(model.parameters(), lr=0.01), 0)
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]


def tensors_of_several_ranks(rank, size):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    a, b = (distribute_tensor(torch.randn(size * 3, size * 3), mesh, [Shard(k)]) for k in (0, 1))
    product = a @ b.redistribute(mesh, [Shard(0)])
    return [product.redistribute(mesh, [Replicate()]).to_local(), b.redistribute(mesh, [Shard(0)]).full_tensor()]


def checkpoint(rank, size, asynchronous=False):
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    model = ddp(rank, size)
    if asynchronous:
        dcp.async_save({"model": model.module.state_dict()}, checkpoint_id=folder[0]).result()
    else:
        dcp.save({"model": model.module.state_dict()}, checkpoint_id=folder[0])
    loaded = {"model": new_model().state_dict()}
    dcp.load(loaded, checkpoint_id=folder[0])
    return list(loaded["model"].values())


QUICK = [ddp, hooks, hook_of_ringreduce, large_buckets]
OTHERS = [unused_parameters, no_sync, zero, uneven_inputs, tensor_parallel, tensors_of_several_ranks, checkpoint]
PROGRAMS = {each.__name__: each for each in [*QUICK, *OTHERS, fsdp, fsdp_of_flat_parameters]} | {
    "many_buckets": functools.partial(ddp, bucket_cap_mb=0.0001),
    "bucket_views": functools.partial(ddp, gradient_as_bucket_view=True),
    "static_graph": functools.partial(ddp, static_graph=True),
    "uneven_inputs_of_those_left": functools.partial(uneven_inputs, divide_by_initial_world_size=False),
    "checkpoint_in_the_background": functools.partial(checkpoint, asynchronous=True),
}


def over_both(program, folder):
    """What the program makes over each backend, as arrays.  folder: an empty one, which all ranks see."""

    def run():
        import ringreduce.torch.distributed  # noqa: F401

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        with groups_outlive_models():
            return {backend: over(backend) for backend in ("gloo", "ring")}

    def over(backend):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, f"file://{folder}/{backend}", rank=rank, world_size=size)
        try:
            made = program(dist.get_rank(), dist.get_world_size())
            tensors = list(made.parameters()) if isinstance(made, nn.Module) else made
            arrays = [copy.deepcopy(each.detach()).numpy() for each in tensors]
            dist.barrier()
            return arrays
        finally:
            dist.destroy_process_group()

    return run


@pytest.mark.parametrize("name", parted(PROGRAMS, lambda name: PROGRAMS[name] in QUICK))
@pytest.mark.parametrize(("world", "size"), [("mpi", 2), pytest.param("mpi", 3, marks=extended)], indirect=["world"])
def test_as_over_gloo(world, size, name, tmp_path):
    as_over_gloo(world, size, PROGRAMS[name], tmp_path)


def as_over_gloo(world, size, program, folder):
    """Run it over both backends, which must make the same of it."""
    results = world(size).run(over_both(program, folder))
    for found in results:
        for ring, gloo, first in zip(found["ring"], found["gloo"], results[0]["ring"], strict=True):
            if size == 2:  # a sum of two has one order
                np.testing.assert_array_equal(ring, gloo)
            np.testing.assert_allclose(ring, gloo, rtol=0, atol=1e-6)
            np.testing.assert_array_equal(ring, first)
