"""Wrapping a torch optimizer keeps what somebody has assigned to the user's object, and passes on what step() gets."""

import functools
import types

import numpy as np
import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.settings import Settings
from tests.support import training
from tests.support.on_threads import each_rank_of

WRAPPERS = {
    "Average": hvd.DistributedOptimizer,
    "Adasum": functools.partial(hvd.DistributedOptimizer, op=hvd.Adasum),
    "Sharded": hvd.ShardedOptimizer,
    "LocalSGD": functools.partial(hvd.LocalSGD, sync_every=1),
}


def counted(optimizer, name, calls):
    """As AMP and warm-up libraries do: a closure around the bound method."""
    original = getattr(optimizer, name)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    setattr(optimizer, name, patched)


def method(optimizer, name, calls):
    """types.MethodType around the class's function, as apex does."""

    def patched(self, *args, **kwargs):
        calls.append(name)
        return getattr(type(optimizer), name)(self, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(patched, optimizer))


def partial(optimizer, name, calls):
    setattr(
        optimizer,
        name,
        functools.partial(lambda f, *a, **k: (calls.append(name), f(*a, **k))[1], getattr(optimizer, name)),
    )


@each_rank_of(2, settings=Settings(dynamic_process_sets=True))
def test_it_tells_horovods_options_as_attributes():
    model = training.make_model()
    inner = functools.partial(torch.optim.SGD, [*model.parameters()], lr=0.1)
    own = hvd.add_process_set([hvd.size() - 1])
    options = {"op": hvd.Average, "gradient_predivide_factor": 4.0, "sparse_as_dense": True, "process_set": own}
    optimizer = hvd.DistributedOptimizer(inner(), **options)
    assert {name: getattr(optimizer, name) for name in options} == options
    defaults = {"gradient_predivide_factor": 1.0, "sparse_as_dense": False, "process_set": hvd.global_process_set}
    for wrapper in ("Average", "Adasum", "Sharded"):
        optimizer = WRAPPERS[wrapper](inner(), model.named_parameters())
        assert {name: getattr(optimizer, name) for name in defaults} == defaults
        assert optimizer.op is (hvd.Adasum if wrapper == "Adasum" else hvd.Average)


@pytest.mark.parametrize("patch", [counted, method, partial])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@each_rank_of(2)
def test_what_is_assigned_before_wrapping_is_called_on_both(wrapper, patch):
    model, extra, calls = training.make_model(), torch.nn.Parameter(torch.zeros(2).double()), []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        patch(inner, name, calls)
    assigned = inner.step
    optimizer = WRAPPERS[wrapper](inner, model.named_parameters())
    calls.clear()
    parameters = training.trained(model, optimizer, 2)
    assert calls == ["zero_grad", "step"] * 2, "each once"
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [extra]})
    assert calls[4:] == ["state_dict", "load_state_dict", "add_param_group"]
    assert inner.step == assigned
    inner.step()
    assert calls[-1] == "step"
    return parameters


@pytest.mark.parametrize("wrapper", WRAPPERS)
@each_rank_of(2)
def test_what_is_assigned_after_wrapping_is_around_it(wrapper):
    """And can be taken away again, as accelerate does; another wrapper of the user's object has nothing of it."""
    model, calls = training.make_model(), []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    counted(inner, "step", calls)
    optimizer = WRAPPERS[wrapper](inner, model.named_parameters())
    reducing = optimizer.step
    counted(optimizer, "step", outer := [])
    training.trained(model, optimizer, 2)
    del optimizer.step
    assert optimizer.step == reducing
    training.trained(model, optimizer, 1)
    assert (len(calls), len(outer)) == (3, 2)
    return training.parameters(model)


class Imitation:
    """Around an optimizer, and of its class, as in Lightning and Fabric."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Imitation" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self._optimizer, name)

    def step(self, closure=None):
        return self._optimizer.step(closure)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@each_rank_of(2)
def test_its_class_can_be_imitated(wrapper):
    trained = []
    for imitating in (Imitation, lambda optimizer: optimizer):
        model = training.make_model()
        optimizer = WRAPPERS[wrapper](torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        trained.append(training.trained(model, imitating(optimizer), 2))
    np.testing.assert_array_equal(*trained)
    return trained[0]


class Scaled(torch.optim.SGD):
    """A user's class, whose methods take more, or less, than torch's."""

    def step(self, closure=None, scale=1.0, *, shift=0.0):
        loss = closure() if closure is not None else None
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data -= 0.1 * scale * parameter.grad + shift
        return loss

    def zero_grad(self):
        super().zero_grad()


class NoClosure(Scaled):
    """Its first argument is no closure."""

    def step(self, scale, shift=0.0):
        return super().step(None, scale, shift=shift)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("how", ["keyword", "positional", "closure", "no closure"])
@each_rank_of(2)
def test_what_step_is_given_reaches_the_users_class(wrapper, how):
    model = training.make_model()
    kind = NoClosure if how == "no closure" else Scaled
    optimizer = WRAPPERS[wrapper](kind(model.parameters(), lr=0.1), model.named_parameters())
    optimizer.zero_grad()
    before = training.parameters(model)

    def closure():
        optimizer.zero_grad()
        loss = training.loss_of(model, training.batch(0))
        loss.backward()
        return loss

    if how != "closure":
        closure()
    arguments = {"keyword": (), "positional": (None, 2.0), "closure": (closure, 2.0), "no closure": (2.0,)}[how]
    named = {"scale": 2.0} if how == "keyword" else {}
    loss = optimizer.step(*arguments, shift=0.5, **named)
    assert (loss is None) == (how != "closure")
    alone = training.make_model()
    training.loss_of(alone, training.batch(0)).backward()
    expected = before - 0.2 * torch.cat([each.grad.reshape(-1) for each in alone.parameters()]) - 0.5
    training.close(training.parameters(model), expected)
    return training.parameters(model)
