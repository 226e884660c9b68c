"""torch.compile over the backend "ring", in every order with DDP and FSDP2: each form runs over gloo, too.

Each is compiled by Dynamo alone, the backend "eager", and with two ranks by inductor, too.
"""

import functools
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from ringreduce.torch.distributed.uncompiled import uncompiled
from tests.ranks.torch import test_distributed_training as training
from tests.ranks.torch.test_distributed_training import STEPS, as_over_gloo, batches, new_model, train
from tests.support.tiers import adapters, extended, parted

COMPILERS = ("eager", "inductor")
FRAMES = {}  # that Dynamo has compiled, by backend


def trained(model, rank, **options):
    return train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), rank, **options)


def compiled_itself(model, compiler):
    model.compile(backend=compiler)
    return model


def around(rank, size, compiler, options=None, **of_ddp):
    model = torch.compile(DistributedDataParallel(new_model(), **of_ddp), backend=compiler)
    return trained(model, rank, options=options or (lambda number: {}))


def before(rank, size, compiler, options=None, **of_ddp):
    model = DistributedDataParallel(torch.compile(new_model(), backend=compiler), **of_ddp)
    return trained(model, rank, options=options or (lambda number: {}))


def within(rank, size, compiler):
    return trained(DistributedDataParallel(compiled_itself(new_model(), compiler)), rank)


def around_itself(rank, size, compiler):
    return trained(compiled_itself(DistributedDataParallel(new_model()), compiler), rank)


def unused(form):
    """Each second step of a rank leaves parameters out."""

    def program(rank, size, compiler):
        options = lambda number: {"rare": number % 2 == rank % 2}  # noqa: E731
        return form(rank, size, compiler, options, find_unused_parameters=True)

    return program


def uneven_inputs(rank, size, compiler):
    model = DistributedDataParallel(new_model())
    with model.join():
        return trained(torch.compile(model, backend=compiler), rank, steps=STEPS - rank)


def loss(rank, size, compiler):
    """The function that a script compiles contains the model, its DDP and the loss."""
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    of_step = torch.compile(lambda x, target: nn.functional.mse_loss(model(x), target), backend=compiler)
    for x, target in batches(rank):
        optimizer.zero_grad()
        of_step(x, target).backward()
        optimizer.step()
    return model


def reducer_in_python(rank, size, compiler):
    """Backward is compiled, too, and the all-reduces are a part of its graph."""
    compile_backward = functools.partial(torch.compile, backend=compiler)
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        torch._inductor.config.patch(_fuse_ddp_communication=False),
        torch._dynamo.compiled_autograd._enable(compile_backward),
    ):
        model = around(rank, size, compiler)
    torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")  # DDP has added it
    torch._dynamo.trace_rules.get_legacy_mod_inlinelist.cache_clear()
    return model


def one_graph(rank, size, compiler):
    with torch._dynamo.config.patch(optimize_ddp="no_optimization"):
        return around(rank, size, compiler)


def sharded(rank, size, compiler, order):
    """FSDP2; `layers` is what PyTorch recommends."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = new_model(), dist.init_device_mesh("cpu", (size,))
    model.norm = nn.Identity()
    for each in (model.first, model.second, model.rare, model):
        if (order == "layers" and each is not model) or (order == "before" and each is model):
            each.compile(backend=compiler)
        fully_shard(each, mesh=mesh)
    run = torch.compile(model, backend=compiler) if order == "around" else model
    train(run, torch.optim.Adam(model.parameters(), lr=0.01), rank)
    return [each.full_tensor() for each in model.parameters()]


def of_all(tensors):
    """All ranks' tensors, on each."""
    gathered = [each.new_empty(dist.get_world_size() * each.numel()) for each in tensors]
    for every, each in zip(gathered, tensors, strict=True):
        dist.all_gather_into_tensor(every, each)
    return gathered


def collectives(rank, size, compiler):
    """In one graph: functional ones, those that Dynamo makes functional, and what a mesh says."""
    group, mesh = dist.group.WORLD, dist.init_device_mesh("cpu", (size,))

    def several(x):
        reduced, gathered = functional.all_reduce(x * 2, "sum", group), functional.all_gather_tensor(x + 1, 0, mesh)
        parts = functional.reduce_scatter_tensor(gathered, "avg", 0, group)
        exchanged = functional.all_to_all_single(gathered, None, None, group)
        in_place, every, part = x * 3, x.new_empty(size * x.numel()), torch.empty_like(x)
        dist.all_reduce(in_place)
        dist.all_gather_into_tensor(every, x.clone())
        dist.reduce_scatter_tensor(part, every)
        copied = functional.broadcast(x, size - 1, group)
        return reduced.sin(), parts + 1, exchanged * 2, in_place + 1, part, copied, x + mesh.get_local_rank()

    return of_all(torch.compile(several, backend=compiler, fullgraph=True)(torch.arange(6.0) * (rank + 1)))


def gradients_of_collectives(rank, size, compiler):
    def several(x):
        gathered = functional.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD)
        parts = functional.reduce_scatter_tensor_autograd(gathered, "sum", 0, dist.group.WORLD)
        return gathered.square().sum() + parts.sin().sum()

    x = (torch.arange(6.0) + rank).requires_grad_()
    torch.compile(several, backend=compiler)(x).backward()
    return of_all([x.grad])


def compiled(form):
    """A program of training's, with its model compiled."""
    return lambda rank, size, compiler: form(rank, size, functools.partial(torch.compile, backend=compiler))


def counted(rank, size):
    """Dynamo compiles nothing of ringreduce's."""
    counters, made = torch._dynamo.utils.counters, []
    torch._dynamo.reset()
    counters.clear()
    torch.compile(lambda x: (dist.reduce(x, 0), x + 1), backend="eager")(torch.ones(3))  # the group's first call
    for form in (around, before, within):
        made += form(rank, size, "eager").parameters()
    FRAMES[dist.get_backend()] = counters["frames"]["total"]
    # some 26; 188 where the engine is compiled, too
    assert dist.get_backend() == "gloo" or FRAMES["ring"] <= FRAMES["gloo"], FRAMES
    return made


FORMS = {each.__name__: each for each in (around, before, within, around_itself, uneven_inputs, loss)}
FORMS |= {each.__name__: each for each in (reducer_in_python, one_graph)}
FORMS |= {each.__name__: compiled(each) for each in (training.no_sync, training.tensor_parallel)}
FORMS |= {each.__name__: each for each in (collectives, gradients_of_collectives)}
FORMS |= {
    f"{form.__name__} {name}": changed
    for form in (around, before)
    for name, changed in {
        "static_graph": functools.partial(form, static_graph=True),
        "bucket_views": functools.partial(form, gradient_as_bucket_view=True),
        "find_unused_parameters": unused(form),
    }.items()
}
FORMS |= {f"sharded {order}": functools.partial(sharded, order=order) for order in ("layers", "before", "around")}


def by_each(form):
    """The form as a program, compiled by one compiler after the other."""

    def program(rank, size):
        made = []
        for compiler in COMPILERS if size == 2 else COMPILERS[:1]:
            torch._dynamo.reset()
            result = form(rank, size, compiler)
            made += result.parameters() if isinstance(result, nn.Module) else result
        return made

    return program


@pytest.mark.parametrize("name", [pytest.param("counted", marks=adapters), *parted(FORMS, lambda _: False)])
@pytest.mark.parametrize(("world", "size"), [("mpi", 2), pytest.param("mpi", 3, marks=extended)], indirect=["world"])
def test_a_compiled_form_as_over_gloo(world, size, name, tmp_path):
    as_over_gloo(world, size, counted if name == "counted" else by_each(FORMS[name]), tmp_path)


def test_a_method_can_be_called_while_another_thread_imports_dynamo(monkeypatch):
    class Group:
        @uncompiled
        def size(self):
            return 3

    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    assert Group().size() == 3
