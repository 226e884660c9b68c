"""ringreduce.keras with a stand-in for Keras, of which the adapter uses little; tests/keras has the real one."""

import importlib
import sys
import types

import numpy as np
import pytest
import torch

from ringreduce.testing import run_ranks


class Optimizer:
    """Keras' way to a step: gradients are clipped, then applied."""

    gradient_accumulation_steps, _iterations = None, 0

    def __init__(self, *values, momentum=0.0):
        self._trainable_variables = [
            types.SimpleNamespace(name="w", value=value, shape=value.shape) for value in values
        ]
        self.built, self.learning_rate, self.momentum = False, 1.0, momentum
        self.momentums = [Velocity(8.0)]

    def _clip_gradients(self, gradients):
        return [each.clamp(max=10) for each in gradients]

    def apply(self, *gradients):
        for variable, gradient in zip(self._trainable_variables, self._clip_gradients(gradients), strict=True):
            variable.value = variable.value - gradient


class LossScaleOptimizer(Optimizer):
    def __init__(self, inner):
        super().__init__()
        self.inner_optimizer = inner

    def check_finite(self, gradients):
        return torch.stack(gradients).isfinite().all()


class Velocity(float):
    def assign(self, value):
        self.assigned = value


class Callback:
    def __init__(self):
        self.params, self.model = {"steps": 4}, types.SimpleNamespace(optimizer=Optimizer(momentum=0.9))


@pytest.fixture
def hvd(monkeypatch):
    """ringreduce.keras with the backend "torch"."""
    kinds = {"Optimizer": Optimizer, "LossScaleOptimizer": LossScaleOptimizer, "SGD": Optimizer, "RMSprop": Optimizer}
    functions = {"convert_to_numpy": np.asarray, "cast": lambda value, kind: value.to(getattr(torch, kind))}
    stand_in = types.SimpleNamespace(
        __version__="3.0",
        backend=types.SimpleNamespace(backend=lambda: "torch"),
        optimizers=types.SimpleNamespace(**kinds),
        callbacks=types.SimpleNamespace(Callback=Callback),
        ops=types.SimpleNamespace(**functions),
    )
    monkeypatch.setitem(sys.modules, "keras", stand_in)
    monkeypatch.setattr(LossScaleOptimizer, "check_finite", LossScaleOptimizer.check_finite)  # undone at the end
    yield importlib.import_module("ringreduce.keras")
    for name in [each for each in sys.modules if each.startswith("ringreduce.keras")]:
        del sys.modules[name]


def test_gradients_are_reduced_then_clipped(hvd):
    def program():
        own = Optimizer(torch.zeros(2), torch.zeros(1))
        assert hvd.DistributedOptimizer(own, name="own") is own
        own.apply(torch.tensor([hvd.rank(), 40.0 * hvd.rank()]), torch.tensor([3.0]))
        return [each.value.tolist() for each in own._trainable_variables]

    assert run_ranks(3, program) == [[[-1.0, -10.0], [-3.0]]] * 3


def test_ranks_may_have_made_different_numbers_of_optimizers(hvd):
    """As where one rank loads a model to evaluate it: the others' optimizers without a name match all the same."""

    def program():
        for _ in range(hvd.rank()):
            hvd.DistributedOptimizer(Optimizer(torch.zeros(4)))
        own = hvd.DistributedOptimizer(Optimizer(torch.zeros(1)))
        own.apply(torch.tensor([float(hvd.rank())]))
        return own._trainable_variables[0].value.item()

    assert run_ranks(3, program) == [-1.0] * 3


def test_a_sum_of_passes_is_keras_mean_times_their_number(hvd):
    def program():
        own = hvd.DistributedOptimizer(Optimizer(torch.zeros(1)), "own", backward_passes_per_step=4)
        assert own.gradient_accumulation_steps == 4
        own.apply(torch.tensor([float(hvd.rank())]))
        return own._trainable_variables[0].value.item()

    assert run_ranks(3, program) == [-4.0] * 3


def test_all_ranks_skip_what_one_must_skip(hvd):
    def program():
        outer = LossScaleOptimizer(hvd.DistributedOptimizer(Optimizer(torch.zeros(1)), "own"))
        plain = LossScaleOptimizer(Optimizer(torch.zeros(1)))
        gradient = torch.tensor(float("inf") if hvd.rank() == 1 else 1.0)
        return [bool(each.check_finite([gradient])) for each in (outer, plain)]

    assert run_ranks(3, program) == [[False, True], [False, False], [False, True]]


@pytest.mark.parametrize(
    ("kind", "name"), [(Optimizer, "_clip_gradients"), (LossScaleOptimizer, "check_finite")], ids=lambda each: str(each)
)
def test_a_keras_without_what_is_relied_on_is_refused(hvd, monkeypatch, kind, name):
    monkeypatch.delattr(kind, name)
    with pytest.raises(ImportError, match=rf"needs {kind.__name__}\.{name}, which Keras 3\.0 lacks"):
        hvd.DistributedOptimizer(Optimizer(torch.zeros(1)))


def test_a_first_step_that_reduces_nothing_is_an_error(hvd):
    class Renamed(Optimizer):
        def apply(self, *gradients):
            pass

    def program():
        own = hvd.DistributedOptimizer(Renamed(torch.zeros(1)), backward_passes_per_step=2)
        own.apply(torch.ones(1))
        with pytest.raises(ValueError, match="the first step of this Renamed has not reduced its gradients: Keras"):
            own.apply(torch.ones(1))

    run_ranks(2, program)


def test_what_is_refused(hvd):
    def program():
        wrapped, built = hvd.DistributedOptimizer(Optimizer()), Optimizer()
        built.built = True
        for function, says in [
            (lambda: hvd.DistributedOptimizer(wrapped), "is wrapped already; wrap it once"),
            (lambda: hvd.DistributedOptimizer(LossScaleOptimizer(wrapped)), "is wrapped already"),
            (lambda: hvd.DistributedOptimizer(built, backward_passes_per_step=2), "gradient_accumulation_steps=2"),
            (lambda: hvd.DistributedOptimizer(Optimizer(), backward_passes_per_step=0), "expected 1 or more"),
            (lambda: hvd.DistributedOptimizer(Optimizer(), op=hvd.Max), "op=Max; expected Average, Sum or Adasum"),
            (
                lambda: hvd.callbacks.LearningRateScheduleCallback(None, 2),
                "initial_lr=None; expected the learning rate",
            ),
        ]:
            with pytest.raises(ValueError, match=says):
                function()
        with pytest.raises(TypeError, match=r"expected an optimizer of Keras 3, got a builtins\.str; such as"):
            hvd.DistributedOptimizer("adam")

    run_ranks(2, program)


def test_the_warm_up(hvd):
    def program():
        warmup = hvd.callbacks.LearningRateWarmupCallback(3.0, warmup_epochs=2)
        optimizer = warmup.model.optimizer
        warmup.on_train_begin()
        rates = []
        for epoch in range(3):
            warmup.on_epoch_begin(epoch)
            for batch in range(4):
                optimizer.built = batch > 0
                warmup.on_train_batch_begin(batch)
                rates.append(optimizer.learning_rate)
        return rates, optimizer.momentums[0].assigned

    for rates, velocity in run_ranks(3, program):
        np.testing.assert_allclose(rates, [*np.linspace(1.25, 3.0, 8), *[3.0] * 4])
        np.testing.assert_allclose(velocity, 8.0 * 3.0 / 2.75)
