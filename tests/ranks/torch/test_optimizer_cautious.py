"""Gradients that are computed twice, or thrown away, before a step: as on one GPU, on all ranks alike."""

import _thread
import re
import threading
import time

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.errors import BackwardError
from ringreduce.execution.host import HostResources
from ringreduce.optim import buckets, reducer
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.torch import reducer as torch_reducer
from ringreduce.torch.gradient import Gradient
from tests.support import training
from tests.support.on_threads import each_rank_of
from tests.support.tiers import adapters

CAUTIOUS = True  # see conftest.py
STEPS = 12  # more than the cautious ones


class Gan:
    """A generator of 5 numbers from 3, a discriminator of 5 numbers, and an optimizer for each."""

    def __init__(self, wrapping, names):
        generator = torch.Generator().manual_seed(1)
        self.g, self.d = (
            torch.nn.Sequential(torch.nn.Linear(i, 8), torch.nn.Tanh(), torch.nn.Linear(8, o)).double()
            for i, o in ((3, 5), (5, 1))
        )
        for parameter in [*self.g.parameters(), *self.d.parameters()]:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
        self.og, self.od = (
            torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9)) for model in (self.g, self.d)
        )
        if wrapping:
            self.og = hvd.DistributedOptimizer(self.og, [(f"{names[0]}{n}", p) for n, p in self.g.named_parameters()])
            self.od = hvd.DistributedOptimizer(self.od, [(f"{names[1]}{n}", p) for n, p in self.d.named_parameters()])

    def fake(self, real):
        return self.g(real[:, :3])

    def score(self, x, label):
        scores = self.d(x)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))

    def parameters(self):
        return torch.cat([training.parameters(self.g), training.parameters(self.d)])


def usual(gan, real, step):
    """The generator first; its backward goes through the discriminator, whose gradients nobody wants."""
    gan.og.zero_grad()
    fake = gan.fake(real)
    gan.score(fake, 1.0).backward()
    gan.og.step()
    gan.od.zero_grad()
    ((gan.score(real, 1.0) + gan.score(fake.detach(), 0.0)) / 2).backward()
    gan.od.step()


def dcgan(gan, real, step):
    """PyTorch's example: two backwards for the discriminator, cleared by the modules."""
    gan.d.zero_grad()
    gan.score(real, 1.0).backward()
    fake = gan.fake(real)
    gan.score(fake.detach(), 0.0).backward()
    gan.od.step()
    gan.g.zero_grad()
    gan.score(fake, 1.0).backward()
    gan.og.step()


def critic_first(gan, real, step):
    """Wasserstein's: five steps of the discriminator for one of the generator."""
    gan.od.zero_grad()
    (gan.d(gan.fake(real).detach()).mean() - gan.d(real).mean()).backward()
    torch.nn.utils.clip_grad_norm_(gan.d.parameters(), 0.5)
    gan.od.step()
    if step % 5 == 4:
        gan.og.zero_grad()
        (-gan.d(gan.fake(real)).mean()).backward()
        gan.og.step()


def not_detached(gan, real, step):
    """The discriminator's backward goes through the generator; gradients are zeroed, not dropped."""
    gan.od.zero_grad(set_to_none=False)
    (gan.score(real, 1.0) + gan.score(gan.fake(real), 0.0)).backward()
    gan.od.step()
    gan.og.zero_grad(set_to_none=False)
    gan.score(gan.fake(real), 1.0).backward()
    gan.og.step()


def both_at_once(gan, real, step):
    """An encoder and a decoder with an optimizer each: one backward, two steps."""
    gan.og.zero_grad()
    gan.od.zero_grad()
    gan.score(gan.fake(real), 1.0).backward()
    gan.og.step()
    gan.od.step()


@pytest.mark.parametrize("names", [("g.", "d."), pytest.param(("", ""), marks=adapters)], ids=["prefixed", "equal"])
@pytest.mark.parametrize("loop", [usual, dcgan, critic_first, not_detached, both_at_once])
def test_gan_loops_train_as_one_process(loop, names):
    def program(data, wrapping):
        gan = Gan(wrapping, names)
        for step in range(STEPS):
            loop(gan, data(step), step)
        return gan.parameters()

    size = 3 if loop is usual else 2
    training.close(
        training.same_on_all(run_ranks(size, lambda: program(training.share, True))), program(training.batch, False)
    )


@pytest.mark.parametrize("size", [1, 2])
def test_two_losses_with_a_backward_each_are_added(size):
    def program(data, wrapped):
        model = training.make_model()
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for step in range(STEPS):
            optimizer.zero_grad()
            out = model(data(step))
            out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward()
            training.clip(model)
            optimizer.step()
        return training.parameters(model)

    training.trains_as_one_process(size, program)


@each_rank_of(2)
def test_a_rank_that_skips_a_batch_after_backward_goes_on_with_the_next():
    """Nothing was under way: the others' step is met by this rank's next one."""
    model, optimizer = training.wrapped()
    steps = batches = 0
    while steps < 3:
        optimizer.zero_grad()
        training.own_backward(model, batches)
        batches += 1
        if hvd.rank() == 1 and batches == 2:
            continue
        optimizer.step()
        steps += 1
    return training.parameters(model)


@each_rank_of(2)
def test_overlap_begins_when_the_steps_have_shown_nothing_else():
    model, optimizer = training.wrapped()
    for step in range(reducer.CAUTIOUS_STEPS + 2):
        optimizer.zero_grad()
        training.own_backward(model, step)
        assert optimizer._reducer.pending == (step >= reducer.CAUTIOUS_STEPS)
        optimizer.step()


@pytest.mark.parametrize("where", ["host", "GPU"])
@pytest.mark.parametrize("unclean", ["backward", "zero_grad"])
def test_overlap_that_was_lost_comes_back_after_clean_steps(unclean, where, monkeypatch, capsys):
    monkeypatch.setattr(reducer, "RECOVERY_STEPS", 11)
    monkeypatch.setattr(HostResources, "overlaps", where == "host")
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", where == "GPU", raising=False)
    monkeypatch.setattr(Gradient, "note_stream", lambda gradient: None)
    monkeypatch.setattr(torch_reducer, "line_of_backward", lambda: "train.py:7")

    def program():
        model, optimizer = training.wrapped()
        begun, known = [], []
        for step in range(15):
            optimizer.zero_grad()
            if step in (1, 2):
                training.own_backward(model, step)
                if unclean == "zero_grad":
                    optimizer.zero_grad()
            training.own_backward(model, step)
            begun.append(optimizer._reducer.pending)
            optimizer.step()
            known.append((hvd.info().overlap, bool(hvd.info().no_overlap)))
        return begun, known

    off, on = (False, True), (where == "host", False)
    assert run_ranks(2, program) == [([False] * 14 + [True], [on] + [off] * 12 + [on] * 2)] * 2
    what = r"computed again before step\(\)" if unclean == "backward" else r"cleared without a step\(\)"
    then = "BackwardError" if unclean == "backward" else "all ranks must do it together"
    said = re.findall(rf"of '.*' was {what} \((.*):\d+\); .*{then}.*no_sync", capsys.readouterr().err)
    line = "train.py" if unclean == "backward" else "test_optimizer_cautious.py"
    assert said == [line] * 2, "once a rank"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_bad_batch_that_all_skip_costs_a_few_steps_of_overlap(size, monkeypatch):
    """And the next one, too, though its gradients are on their way by then; as on one GPU."""
    monkeypatch.setattr(HostResources, "overlaps", True)
    bad, steps, begun = (3, 20, 60, 61), 90, []

    def program(data, wrapped):
        model = training.make_model()
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for step in range(steps):
            optimizer.zero_grad()
            training.loss_of(model, data(step)).backward()
            if data is training.share and hvd.rank() == 0:
                begun.append(optimizer._reducer.pending)
            if step not in bad:
                optimizer.step()
        return training.parameters(model)

    training.trains_as_one_process(size, program)
    assert begun == [13 <= step <= 20 or 38 <= step <= 60 for step in range(steps)], "8 steps, 16, and then 64"


@pytest.mark.parametrize("alone", [0, 1])
@each_rank_of(2)
def test_a_rank_that_skips_a_batch_alone_when_its_gradients_are_on_their_way_is_told(alone):
    """Known only from the next gradients; on both ranks."""
    model, optimizer = training.wrapped()
    optimizer.zero_grad()
    training.own_backward(model, 0)
    training.trained(model, optimizer, 2 * reducer.CAUTIOUS_STEPS)
    optimizer.zero_grad()
    training.own_backward(model, 1)
    assert optimizer._reducer.pending
    message = "no clearing of gradients in place of a step.*clearing of gradients in place of a step=by zero_grad|"
    message += r"clearing of gradients in place of a step=by zero_grad\(\).*no clearing of gradients in place of a step"

    def go_on():
        if hvd.rank() != alone:
            optimizer.step()
        training.trained(model, optimizer, 1)

    with pytest.raises(hvd.HorovodInternalError, match=message):
        go_on()


def test_the_line_of_a_backward_whose_hooks_run_in_a_thread_of_autograds():
    """As those of GPUs' gradients do: that thread has frames of torch alone."""
    found, entered, done = [], threading.Event(), threading.Event()
    names = {"found": found, "entered": entered, "done": done, "line": torch_reducer.line_of_backward}

    def of_torch(text):
        return eval(compile(text, torch.autograd.graph.__file__, "eval"), names)

    def backward():
        x = torch.ones((), requires_grad=True) * 1
        x.register_hook(of_torch("lambda _: (entered.set(), done.wait(20), None)[2]"))
        x.backward()

    caller = threading.Thread(target=backward)
    caller.start()
    assert entered.wait(20)
    _thread.start_new_thread(of_torch("lambda: (found.append(line()), done.set())"), ())
    caller.join(20)
    line = backward.__code__.co_firstlineno + 3
    assert found == [f"test_optimizer_cautious.py:{line}"]


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ("backward", r"was computed 2 times since the last step.*but backward_passes_per_step is 1.*no_sync"),
        (
            "zero_grad",
            r"zero_grad\(\) after backward\(\) and before step\(\).*no_sync.*call synchronize\(\) first, on all ranks",
        ),
    ],
)
@each_rank_of(2)
def test_later_it_is_an_error_that_names_the_cures(late, message):
    model, optimizer = training.wrapped()
    training.trained(model, optimizer, reducer.CAUTIOUS_STEPS)
    optimizer.zero_grad()
    training.own_backward(model, 0)
    for kind in (AssertionError, RuntimeError, BackwardError):
        with pytest.raises(kind, match=message):
            training.own_backward(model, 1) if late == "backward" else optimizer.zero_grad()
    optimizer.synchronize()


def test_gradients_of_equal_names_at_once():
    """Known only after the cautious steps: the message tells of another optimizer."""
    told = threading.Event()  # until then rank 1 has none, and rank 0's are pending

    def program():
        models = [training.make_model(seed) for seed in range(2)]
        optimizers = [training.wrap(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            training.trained(model, optimizer, reducer.CAUTIOUS_STEPS)
        if rr.rank() == 1:
            assert told.wait(timeout=60)
        training.own_backward(models[0], 0)
        if rr.rank() == 0:
            with pytest.raises(ValueError, match=r"already pending.*Does another DistributedOptimizer .*'d\.' \+ name"):
                training.own_backward(models[1], 0)
            told.set()
        optimizers[0].synchronize()

    run_ranks(2, program)


@pytest.mark.parametrize("cautious", [0, 8])
def test_waiting_in_backward_for_extensions_that_take_grad_themselves(cautious, monkeypatch):
    """What is in .grad as soon as backward is done is reduced, and a plain tensor."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", cautious)

    def program():
        model, optimizer = training.wrapped(wait_in_backward=True)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            training.backward_that_lacks_a_layer(model, training.share(step), hvd.rank(), step)
            assert [type(each.grad) for each in model.parameters()] == [torch.Tensor] * 4
            found.append(np.concatenate([each.grad.numpy().reshape(-1) for each in model.parameters()]))
            assert not optimizer._reducer.pending
            optimizer.step()
        return torch.from_numpy(np.stack(found))

    found = training.same_on_all(run_ranks(2, program))
    model = training.make_model()
    for rank in range(2):
        training.backward_that_lacks_a_layer(model, training.batch(0)[rank::2], rank, 0)
    training.close(found[0], torch.cat([each.grad.reshape(-1) / 2 for each in model.parameters()]))


def test_between_hosts_a_full_bucket_does_not_wait_for_the_next_one(monkeypatch):
    """It arrives while backward computes what is in the next one, though the engine may batch for ever."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", 0)
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 50)
    monkeypatch.setattr(HostResources, "overlaps", True)

    def program():
        (model, optimizer), arrived = training.wrapped(), []
        training.trained(model, optimizer, 1)  # then there are buckets

        def wait_for_the_first(_):
            (bucket,) = optimizer._reducer._in_flight
            assert {each.name for each in bucket.members} == {"2.weight", "2.bias"}
            until_s = time.monotonic() + 60
            while not (there := all(each.done() for each in bucket.handles)) and time.monotonic() < until_s:
                time.sleep(1e-3)  # a wait would end the batch
            arrived.append(there)

        def backward(model, step):
            hidden = model[1](model[0](training.share(step)))
            hidden.register_hook(wait_for_the_first)
            model[2](hidden).square().mean().backward()

        training.trained(model, optimizer, 1, backward)
        return arrived

    assert run_ranks(2, program, hosts=[0, 1], settings=Settings(cycle_time_ms=1e6)) == [[True], [True]]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_script_s_own_hooks_get_this_ranks_gradients(overlaps, monkeypatch):
    """Whether these are submitted during backward or after it: what is clipped there is clipped before the sum."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", 0)
    monkeypatch.setattr(HostResources, "overlaps", overlaps)

    def clip(parameter):
        parameter.grad.clamp_(-0.1, 0.1)

    def clipped(optimizer, model, data):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
        for _ in range(3):
            optimizer.zero_grad()
            training.loss_of(model, data).backward()
            optimizer.step()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    def alone(rank):
        model = training.make_model()
        return clipped(torch.optim.SGD(model.parameters(), lr=0), model, training.batch(0)[rank::2])

    def program():
        model, optimizer = training.wrapped(lr=0)
        return clipped(optimizer, model, training.share(0))

    training.close(training.same_on_all(run_ranks(2, program)), (alone(0) + alone(1)) / 2)
