"""The wrapped optimizer as an object: schedulers, states, copies, new parameters, wrapping again, errors in between."""

import copy
import functools
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringreduce
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from ringreduce.torch.gradient import Gradient
from tests.support import training
from tests.support.on_threads import each_rank_of

SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_made_before_and_after_wrapping(kind, before):
    """Warnings are errors here: a scheduler that missed step() would warn."""

    def program(data, wrapped):
        model = training.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[kind](optimizer) if before else None
        optimizer = wrapped(optimizer, model)
        scheduler = scheduler or SCHEDULERS[kind](optimizer)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            training.loss_of(model, data(step)).backward()
            optimizer.step()
            scheduler.step()
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
            if step == 2:
                optimizer.load_state_dict(pickle.loads(pickle.dumps(copy.deepcopy(optimizer.state_dict()))))
        return torch.cat([training.parameters(model), torch.tensor(seen, dtype=torch.float64).flatten()])

    training.trains_as_one_process(2, program)


@each_rank_of(2)
def test_it_shares_groups_and_state():
    model = training.make_model()
    inner = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(inner)
    assert optimizer.param_groups is inner.param_groups
    training.own_backward(model, 0)
    optimizer.step()
    assert optimizer.state is inner.state
    assert len(inner.state) == 4


@each_rank_of(2)
def test_step_hooks_run_once_and_see_reduced_gradients():
    model = training.make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    inner.register_step_pre_hook(lambda *_: calls.append(("pre", model[0].weight.grad.clone())))
    optimizer = hvd.DistributedOptimizer(inner)
    optimizer.register_step_post_hook(lambda *_: calls.append(("post", None)))
    training.own_backward(model, 0)
    optimizer.step()
    assert [name for name, _ in calls] == ["pre", "post"]
    return calls[0][1]


def test_parameters_that_are_added():
    def program(data, wrapped):
        model = training.make_model()
        optimizer = wrapped(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
            optimizer.zero_grad()
            training.loss_of(model, data(step)).backward()
            torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.5)
            optimizer.step()
            model[2].zero_grad()
        return training.parameters(model)

    training.trains_as_one_process(2, program)


@each_rank_of(1)
def test_torchs_own_names_are_used_and_must_differ():
    model = training.make_model()
    inner = torch.optim.SGD([("a", model[0].weight), ("b", model[0].bias)], lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner)
    with pytest.raises(ValueError, match="add_param_group: names must differ; other parameters have these: a"):
        optimizer.add_param_group({"params": [("a", model[2].weight)]})
    assert set(optimizer._parameter_names.values()) == {"a", "b"}


@each_rank_of(2)
def test_it_is_freed_with_its_hooks_and_can_be_made_again():
    model, optimizer = training.wrapped()
    reducer = weakref.ref(optimizer._reducer)
    training.own_backward(model, 0)
    optimizer.step()
    hooks = model[0].weight._post_accumulate_grad_hooks
    assert len(hooks) == 1
    del optimizer
    gc.collect()
    assert reducer() is None
    assert len(hooks) == 0
    optimizer = training.wrap(model)
    older = training.wrap(model)  # lives on, but is not heard any more
    optimizer = training.wrap(model)
    result = training.trained(model, optimizer, 2)
    assert not older._reducer.pending
    return result


@each_rank_of(2)
def test_nothing_is_kept_from_step_to_step():
    model, optimizer = training.wrapped()
    for step in range(12):
        training.own_backward(model, step)
        gradient = weakref.ref(model[0].weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gradient() is None
        assert not optimizer._reducer._in_flight
        assert model[0].weight.grad is None


@each_rank_of(2)
def test_an_exception_between_backward_and_step():
    model, optimizer = training.wrapped()
    for step in range(3):
        optimizer.zero_grad()
        try:
            training.own_backward(model, step)
            if step == 1:
                raise RuntimeError("in user code")
        except RuntimeError:
            with pytest.raises(AssertionError, match="to give up this step, call synchronize"):
                optimizer.zero_grad()
            optimizer.synchronize()
            continue
        optimizer.step()
    return training.parameters(model)


def test_an_exception_inside_backward():
    """A hook of the user's raises when half of the gradients are on their way."""

    def program():
        model, optimizer = training.wrapped()
        trouble = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            training.own_backward(model, 0)
        trouble.remove()
        optimizer.synchronize()
        return training.trained(model, optimizer, 1, before_step=training.clip)

    training.close(
        training.same_on_all(run_ranks(2, program)), training.alone(range(2), 2, before_step=training.clip, steps=1)
    )


@each_rank_of(2)
def test_state_that_is_loaded_gives_up_what_was_under_way():
    model, optimizer = training.wrapped()
    training.own_backward(model, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    return training.trained(model, optimizer, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Max}, "op=.*Max.*expected Average, Sum or Adasum"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0; expected a whole number of 1 or more"),
        ({"num_groups": -1}, "num_groups=-1; expected a whole number of 0 or more"),
        ({"num_groups": 1.5}, "num_groups=1.5; expected a whole number of 0 or more"),
        ({"groups": -1}, "groups=-1; expected a number of 0 or more, or lists of parameters"),
        ({"groups": [[torch.zeros(3)]]}, r"groups: a tensor of shape \(3,\) is not a parameter of the optimizer"),
        ({"process_set": [0]}, r"process_set=\[0\]; expected a ProcessSet"),
    ],
    ids=str,
)
@each_rank_of(1)
def test_wrong_arguments(options, message):
    with pytest.raises(ringreduce.errors.InputError, match=message):
        training.wrap(training.make_model(), **options)


@each_rank_of(1)
def test_wrong_parameters_and_names():
    model = training.make_model()
    with pytest.raises(ValueError, match="the optimizer is already wrapped"):
        hvd.DistributedOptimizer(training.wrap(model))
    with pytest.raises(ValueError, match=r"expected \(name, parameter\) pairs, such as model.named_parameters\(\)"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.parameters())


@each_rank_of(1)
def test_num_groups_is_the_older_name():
    with pytest.warns(DeprecationWarning, match="num_groups is deprecated; pass groups"):
        training.wrap(training.make_model(), num_groups=np.int64(2))


@each_rank_of(1)
def test_the_general_name_takes_the_options():
    model = training.make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ringreduce.DistributedOptimizer(inner, model.named_parameters(), groups=2, op=hvd.Sum)
    assert optimizer._parameter_names == {each: name for name, each in model.named_parameters()}
    with pytest.raises(ValueError, match=r"with .* these options have no effect: groups"):
        ringreduce.DistributedOptimizer(lambda grads: None, groups=2)


class OnGpu(torch.nn.Parameter):
    """A parameter that only says so."""

    is_cuda = True


@each_rank_of(2)
def test_each_gradient_of_a_gpu_notes_its_stream_before_its_bucket_is_sent():
    model, optimizer = training.wrapped()
    events = []

    def note(gradient, event, stream):
        events.append((gradient.name, event))
        gradient._stream = stream

    for each in optimizer._reducer._gradients.values():
        each.parameter.__class__ = OnGpu
        each.note_stream = functools.partial(note, each, "noted", "a stream")
        each._follow_stream = functools.partial(note, each, "sent", None)
    training.own_backward(model, 0)
    optimizer.step()
    for name in optimizer._parameter_names.values():
        assert [event for of, event in events if of == name] == ["noted", "sent"]


def test_a_gradient_of_another_stream_is_waited_for_before_its_bucket_is_sent(monkeypatch):
    """By tensors of torch's that have a device but no elements."""
    waited = []

    class Stream:
        def wait_stream(self, other):
            waited.append((self, other))

    side, main = Stream(), Stream()
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.ones(3, device="cuda:0")) for _ in range(2)]
        listener = type("Listener", (), {"sparse_as_dense": False})()
        gradients = [Gradient(name, each, listener) for name, each in zip("ab", parameters, strict=True)]
        for gradient, stream in zip(gradients, (side, main), strict=True):
            gradient.parameter.grad = torch.ones(3, device="cuda:0")
            monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
            gradient.note_stream()
        for gradient in gradients * 2:  # in the hook of the last one
            gradient.load()
    assert waited == [(main, side)]
