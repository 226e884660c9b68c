"""The wrapped optimizer as an object: schedulers, states, copies, new parameters, wrapping again, errors in between."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringreduce
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from ringreduce.torch.gradient import Gradient
from tests.support.training import batch, loss_of, make_model, parameters, same_on_all, share, wrap


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_made_before_and_after_wrapping(kind, before):
    """Warnings are errors here: a scheduler that missed step() would warn."""

    def program(data, wrapping):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[kind](optimizer) if before else None
        if wrapping:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        scheduler = scheduler or SCHEDULERS[kind](optimizer)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            optimizer.step()
            scheduler.step()
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return torch.cat([parameters(model), torch.tensor(seen, dtype=torch.float64).flatten()])

    close(same_on_all(run_ranks(2, lambda: program(share, True))), program(batch, False))


def test_it_shares_groups_and_state():
    def program():
        model = make_model()
        inner = torch.optim.Adam(model.parameters())
        optimizer = hvd.DistributedOptimizer(inner)
        assert optimizer.param_groups is inner.param_groups
        loss_of(model, share(0)).backward()
        optimizer.step()
        assert optimizer.state is inner.state
        assert len(inner.state) == 4

    run_ranks(2, program)


def test_step_hooks_run_once_and_see_reduced_gradients():
    def program():
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = []
        inner.register_step_pre_hook(lambda *_: calls.append(("pre", model[0].weight.grad.clone())))
        optimizer = hvd.DistributedOptimizer(inner)
        optimizer.register_step_post_hook(lambda *_: calls.append(("post", None)))
        loss_of(model, share(0)).backward()
        optimizer.step()
        assert [name for name, _ in calls] == ["pre", "post"]
        return calls[0][1]

    same_on_all(run_ranks(2, program))


def test_a_state_that_was_copied_and_pickled_can_be_loaded():
    def program():
        model = make_model()
        optimizer = wrap(model, lr=0.25)
        loss_of(model, share(0)).backward()
        optimizer.step()
        state = pickle.loads(pickle.dumps(copy.deepcopy(optimizer.state_dict())))
        optimizer.load_state_dict(state)
        loss_of(model, share(1)).backward()
        optimizer.step()
        return parameters(model)

    same_on_all(run_ranks(2, program))


@pytest.mark.parametrize("named", [True, False])
def test_parameters_that_are_added(named):
    def program(data, wrapping):
        model = make_model()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        if wrapping:
            optimizer = hvd.DistributedOptimizer(optimizer)
        added = [("late.weight", model[2].weight), ("late.bias", model[2].bias)]
        if not named:
            added = [parameter for _, parameter in added]
        for step in range(3):
            if step == 1 and not named:
                optimizer.add_param_group({"params": added, "lr": 0.05})
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            torch.nn.utils.clip_grad_norm_(
                [parameter for group in optimizer.param_groups for parameter in group["params"]], 0.5
            )
            optimizer.step()
            model[2].zero_grad()
        return parameters(model)

    close(same_on_all(run_ranks(2, lambda: program(share, True))), program(batch, False))


def test_torchs_own_names_are_used_and_must_differ():
    def program():
        model = make_model()
        inner = torch.optim.SGD([("a", model[0].weight), ("b", model[0].bias)], lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner)
        with pytest.raises(ValueError, match="add_param_group: names must differ; other parameters have these: a"):
            optimizer.add_param_group({"params": [("a", model[2].weight)]})
        assert set(optimizer._parameter_names.values()) == {"a", "b"}

    run_ranks(1, program)


def test_it_is_freed_with_its_hooks_and_can_be_made_again():
    def program():
        model = make_model()
        optimizer = wrap(model)
        reducer = weakref.ref(optimizer._reducer)
        loss_of(model, share(0)).backward()
        optimizer.step()
        hooks = model[0].weight._post_accumulate_grad_hooks
        assert len(hooks) == 1
        del optimizer
        gc.collect()
        assert reducer() is None
        assert len(hooks) == 0
        optimizer = wrap(model)
        older = wrap(model)  # lives on, but is not heard any more
        optimizer = wrap(model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, share(step)).backward()
            optimizer.step()
        assert not older._reducer.pending
        return parameters(model)

    same_on_all(run_ranks(2, program))


def test_nothing_is_kept_from_step_to_step():
    def program():
        model = make_model()
        optimizer = wrap(model)
        counts = []
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, share(step % 3)).backward()
            gradient = weakref.ref(model[0].weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            assert gradient() is None
            counts.append(len(optimizer._reducer._in_flight))
        assert counts == [0] * 12
        assert type(model[0].weight.grad) is type(None)

    run_ranks(2, program)


def test_an_exception_between_backward_and_step():
    def program():
        model = make_model()
        optimizer = wrap(model)
        for step in range(3):
            optimizer.zero_grad()
            try:
                loss_of(model, share(step)).backward()
                if step == 1:
                    raise RuntimeError("in user code")
            except RuntimeError:
                with pytest.raises(AssertionError, match="to give up this step, call synchronize"):
                    optimizer.zero_grad()
                optimizer.synchronize()
                continue
            optimizer.step()
        return parameters(model)

    same_on_all(run_ranks(2, program))


def test_an_exception_inside_backward():
    """A hook of the user's raises when half of the gradients are on their way."""

    def program():
        model = make_model()
        optimizer = wrap(model)
        trouble = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, share(0)).backward()
        trouble.remove()
        optimizer.synchronize()
        optimizer.zero_grad()
        loss_of(model, share(1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return parameters(model)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(1)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    close(same_on_all(run_ranks(2, program)), parameters(model))


def test_state_that_is_loaded_gives_up_what_was_under_way():
    def program():
        model = make_model()
        optimizer = wrap(model)
        loss_of(model, share(0)).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(model, share(1)).backward()
        optimizer.step()
        return parameters(model)

    same_on_all(run_ranks(2, program))


def test_passes_can_be_changed():
    def program():
        model = make_model()
        optimizer = wrap(model)
        optimizer.set_backward_passes_per_step(2)
        for step in range(2):
            loss_of(model, share(step)).backward()
        optimizer.step()
        with pytest.raises(ValueError, match="backward_passes_per_step=0; expected 1 or more"):
            optimizer.set_backward_passes_per_step(0)
        return parameters(model)

    same_on_all(run_ranks(2, program))


def test_gradients_of_gradients():
    """A penalty on the gradient: .grad has a graph of its own."""

    def program(data, wrapping):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if wrapping:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        x = data(0).requires_grad_()
        rows = (model(x) ** 2).sum()
        (slope,) = torch.autograd.grad(rows, x, create_graph=True)
        slope.square().sum(1).mean().backward()
        optimizer.step()
        return parameters(model)

    close(same_on_all(run_ranks(2, lambda: program(share, True))), program(batch, False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Max}, "op=.*Max.*expected Average, Sum or Adasum"),
        ({"op": "sum"}, "op='sum'; expected Average"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0 with op=.*Average only"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0; expected a number above 0"),
        ({"num_groups": -1}, "num_groups=-1; expected 0 or more"),
        ({"groups": -1}, "groups=-1; expected a number of 0 or more, or lists of parameters"),
        ({"groups": "two"}, "groups='two'; expected a number"),
        ({"groups": [["weight"]]}, "groups: a str; expected lists of parameters"),
        ({"groups": [[torch.zeros(3)]]}, r"groups: a tensor of shape \(3,\) is no parameter of the optimizer"),
        ({"compression": "fp16"}, "compression='fp16'; expected Compression.none"),
        ({"process_set": [0]}, r"process_set=\[0\]; expected a ProcessSet"),
    ],
    ids=str,
)
def test_wrong_arguments(options, message):
    def program():
        with pytest.raises(ringreduce.errors.InputError, match=message):
            wrap(make_model(), **options)

    run_ranks(1, program)


def test_a_parameter_in_two_groups_and_an_optimizer_that_is_wrapped():
    def program():
        model = make_model()
        with pytest.raises(ValueError, match="is in two places; expected one"):
            wrap(model, groups=[[model[0].weight], [model[0].weight]])
        with pytest.raises(ValueError, match="the optimizer is wrapped already"):
            hvd.DistributedOptimizer(wrap(model))

    run_ranks(1, program)


def test_num_groups_is_the_older_name():
    def program():
        model = make_model()
        loss = loss_of(model, share(0))
        with pytest.warns(DeprecationWarning, match="num_groups is deprecated; pass groups"):
            optimizer = wrap(model, num_groups=2)
        loss.backward()
        optimizer.step()
        return parameters(model)

    run_ranks(1, program)


def test_positions_of_the_arguments():
    def program():
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        compression = ringreduce.compression.Compression.none
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), compression, 2, hvd.Average, 2.0, 0, 1, True, hvd.global_process_set
        )
        for step in range(2):
            loss_of(model, share(step)).backward()
        optimizer.step()
        return parameters(model)

    same_on_all(run_ranks(2, program))


def test_the_general_name_takes_the_options():
    def program():
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ringreduce.DistributedOptimizer(inner, model.named_parameters(), groups=2, op=hvd.Sum)
        assert optimizer._parameter_names == {each: name for name, each in model.named_parameters()}
        with pytest.raises(ValueError, match="groups are options for torch, optax and Keras optimizers only"):
            ringreduce.DistributedOptimizer(lambda grads: None, groups=2)

    run_ranks(1, program)


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
