"""DistributedOptimizer: several ranks train as one process does with the batches of all."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import ringreduce as rr
import ringreduce.keras as hvd
from ringreduce import runtime
from tests.keras import models
from tests.support.tiers import parted

optimizers = keras.optimizers


def sgd(rate=0.1, **options):
    return optimizers.SGD(rate, momentum=0.9, **options)


CASES = {
    "sgd": (sgd, {}, sgd, {}),
    "adamw": (lambda: optimizers.AdamW(0.01), {}) * 2,
    "clipped": (lambda: sgd(clipnorm=0.1), {}) * 2,
    "all clipped": (lambda: sgd(global_clipnorm=0.1), {}) * 2,
    "averaged weights": (lambda: sgd(use_ema=True, ema_overwrite_frequency=3), {}) * 2,
    "accumulated": (lambda: sgd(gradient_accumulation_steps=2, clipnorm=0.1), {}) * 2,
    "predivided": (sgd, {"gradient_predivide_factor": 2.0}, sgd, {}),
    "a sum": (sgd, {"op": hvd.Sum}, lambda: sgd(0.1 * models.SIZE), {}),
    "a mean of passes": (
        sgd,
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        lambda: sgd(gradient_accumulation_steps=2),
        {},
    ),
    "a sum of passes": (sgd, {"backward_passes_per_step": 2}, lambda: sgd(0.2, gradient_accumulation_steps=2), {}),
    "scaled": (lambda: optimizers.LossScaleOptimizer(sgd()), {}, sgd, {}),
    "a fixed scale": (lambda: sgd(loss_scale_factor=1024.0), {}, sgd, {}),
    "eager": (sgd, {}, sgd, {"run_eagerly": True}),
}
if models.BACKEND != "torch":  # which takes no others
    CASES["steps at once"] = (sgd, {}, sgd, {"steps_per_execution": 3})


@pytest.mark.quick
@pytest.mark.parametrize("case", parted(CASES, lambda case: case == "all clipped"))
def test_ranks_train_as_one_process(case):
    """Also where ranks have made different numbers of optimizers, as for a model that one loads to evaluate it."""
    for _ in range(models.RANK):
        hvd.DistributedOptimizer(sgd())
    make, options, alone, compiled = CASES[case]
    wrapped = hvd.DistributedOptimizer(make(), **options)
    recorder = runtime.current("test").engine.recorder
    recorder.start()
    trained = models.fit(models.model(), wrapped, together=True, **compiled)
    recorder.recording = False
    assert recorder.steps[-1].number + 1 == int(wrapped.iterations), "each is recorded, also in compiled code"
    models.equal_on_all_ranks(trained)
    models.close(trained, models.fit(models.model(), alone(), together=False))


@pytest.mark.parametrize(
    ("compression", "error"), [(hvd.Compression.fp16, 0.02), (hvd.Compression.int8.everywhere, 0.1)], ids=["16", "8"]
)
def test_compression(compression, error):
    trained = models.fit(models.model(), hvd.DistributedOptimizer(sgd(), compression=compression), together=True)
    models.equal_on_all_ranks(trained)
    exact = models.fit(models.model(), sgd(), together=False)
    for mine, expected in zip(trained, exact, strict=True):
        np.testing.assert_allclose(mine, expected, atol=error)


def test_mixed_precision():
    """There `compile` wraps the optimizer in a LossScaleOptimizer, which skips steps until its scale is low enough."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        trained = models.model()
        weights = models.fit(trained, hvd.DistributedOptimizer(optimizers.Adam(0.03)), together=True, epochs=10)
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(trained.optimizer) is optimizers.LossScaleOptimizer
    models.equal_on_all_ranks(weights)
    losses = trained.history.history["loss"]
    assert losses[-1] < losses[0] / 4


@pytest.mark.quick
@pytest.mark.parametrize("outside", parted([True, False], lambda outside: outside))
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(outside):
    """Else the other ranks would wait for its gradients."""
    inner = sgd()
    if outside:
        optimizer = optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(inner), initial_scale=8.0)
    else:
        optimizer = hvd.DistributedOptimizer(optimizers.LossScaleOptimizer(inner, initial_scale=8.0))
    trained = models.model()
    trained.compile(optimizer=optimizer, loss="mse")
    before = trained.get_weights()
    x, y = models.data()
    x, y = models.share(x)[:4], models.share(y)[:4]
    trained.train_on_batch(np.where(models.RANK == models.SIZE - 1, np.inf, x), y)
    models.close(trained.get_weights(), before)
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 4.0
    trained.train_on_batch(x, y)
    models.equal_on_all_ranks(trained.get_weights())
    assert not np.array_equal(trained.get_weights()[0], before[0])


@pytest.mark.quick
def test_it_stays_what_it_is():
    plain, wrapped = sgd(name="mine"), sgd(name="mine")
    assert hvd.DistributedOptimizer(wrapped) is wrapped
    assert type(wrapped) is type(plain)
    assert keras.saving.serialize_keras_object(wrapped) == keras.saving.serialize_keras_object(plain)
    assert rr.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16)._clip_gradients is not None


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "name"), [(optimizers.SGD, "_clip_gradients"), (optimizers.LossScaleOptimizer, "check_finite")]
)
def test_a_keras_without_what_is_relied_on_is_refused(monkeypatch, kind, name):
    monkeypatch.delattr(next(each for each in kind.__mro__ if name in vars(each)), name)
    with pytest.raises(ImportError, match=rf"needs {kind.__name__}\.{name}, which Keras 3\.\S+ lacks"):
        hvd.DistributedOptimizer(sgd())


@pytest.mark.quick
def test_a_first_step_that_reduces_nothing_is_an_error():
    class Renamed(optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            pass

    own = hvd.DistributedOptimizer(Renamed(0.1), backward_passes_per_step=2)
    gradients = [keras.ops.ones(2)]
    own.apply(gradients)
    with pytest.raises(ValueError, match="the first step of this Renamed has not reduced its gradients: Keras"):
        own.apply(gradients)


def test_a_model_with_nothing_to_train_has_nothing_to_reduce():
    trained = models.model(seed=models.RANK)
    trained.trainable = False
    before = models.numbers(trained.weights)
    models.close(models.fit(trained, hvd.DistributedOptimizer(sgd()), together=True, epochs=1), before)


@pytest.mark.quick
def test_what_is_refused():
    wrapped, built = hvd.DistributedOptimizer(sgd()), sgd()
    built.build(models.model().trainable_variables)
    for function, says in [
        (lambda: hvd.DistributedOptimizer(wrapped), "is already wrapped; wrap it once"),
        (lambda: hvd.DistributedOptimizer(optimizers.LossScaleOptimizer(wrapped)), "is already wrapped"),
        (lambda: hvd.DistributedOptimizer(built, backward_passes_per_step=2), "gradient_accumulation_steps=2"),
        (lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0), "expected a whole number of 1 or more"),
        (lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Max), "op=Max; expected Average, Sum or Adasum"),
        (lambda: hvd.callbacks.LearningRateScheduleCallback(None, 2), "initial_lr=None; expected the learning rate"),
    ]:
        with pytest.raises(ValueError, match=says):
            function()
    with pytest.raises(TypeError, match=r"expected a Keras optimizer, got a builtins\.str; as in"):
        hvd.DistributedOptimizer("adam")


WITHOUT_US = """
import json, sys
sys.modules["ringreduce"] = None
import keras
model = keras.models.load_model(sys.argv[1])
state = [keras.ops.convert_to_numpy(each).tolist() for each in model.optimizer.variables]
print(json.dumps({"class": type(model.optimizer).__name__, "state": state}))
"""


def test_a_saved_model_loads_without_us_and_goes_on_with_us(tmp_path_factory):
    path = hvd.broadcast_object(str(tmp_path_factory.mktemp("saved") / "model.keras"), 0)
    whole = models.model()
    models.fit(whole, hvd.DistributedOptimizer(optimizers.Adam(0.01)), together=True, epochs=2)
    if models.RANK == 0:
        whole.save(path)
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # our entry point stays installed
        command = [sys.executable, "-c", WITHOUT_US, path]
        run = subprocess.run(command, capture_output=True, text=True, env=variables)
        assert run.returncode == 0, run.stderr
        loaded = json.loads(run.stdout.splitlines()[-1])
        assert loaded["class"] == "Adam"
        for mine, theirs in zip(models.numbers(whole.optimizer.variables), loaded["state"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    hvd.barrier()
    resumed = hvd.load_model(path, custom_objects={"unused": int})
    weights = models.fit_on(resumed, epochs=2, shuffle=False)
    models.close(weights, models.fit(models.model(), optimizers.Adam(0.01), together=False, epochs=4))
    models.equal_on_all_ranks(weights)


@keras.saving.register_keras_serializable(package="tests")
class Registered(optimizers.SGD):
    pass


class Own(optimizers.SGD):
    pass


@pytest.mark.parametrize(("kind", "options"), [(Registered, {}), (Own, {"custom_optimizers": [Own]})])
def test_optimizers_of_ones_own(tmp_path, kind, options):
    trained = models.model()
    weights = models.fit(trained, hvd.DistributedOptimizer(kind(0.1)), together=True, epochs=1)
    models.close(weights, models.fit(models.model(), kind(0.1), together=False, epochs=1))
    trained.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", **options)
    assert type(loaded.optimizer).__name__ == kind.__name__
    with pytest.raises(ValueError, match="this optimizer is already wrapped"):
        hvd.DistributedOptimizer(loaded.optimizer)


def test_a_loop_of_ones_own():
    trained, optimizer = models.model(), hvd.DistributedOptimizer(sgd())
    optimizer.build(trained.trainable_variables)
    x, y = models.data()
    for batch in np.array_split(np.arange(len(models.share(x))), 4) * 3:
        LOOPS[models.BACKEND](trained, optimizer, models.share(x)[batch], models.share(y)[batch])
    models.close(models.numbers(trained.weights), models.fit(models.model(), sgd(), together=False))


def step_of_torch(trained, optimizer, x, y):
    import torch

    trained.zero_grad()
    ((trained(x) - torch.tensor(y)) ** 2).mean().backward()
    with torch.no_grad():
        optimizer.apply([each.value.grad for each in trained.trainable_weights], trained.trainable_weights)


def step_of_tensorflow(trained, optimizer, x, y):
    import tensorflow as tf

    if not hasattr(trained, "step_of_test"):

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((trained(x) - y) ** 2)
            gradients = tape.gradient(loss, trained.trainable_variables)
            optimizer.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))

        trained.step_of_test = step
    trained.step_of_test(tf.constant(x), tf.constant(y))


def step_of_jax(trained, optimizer, x, y):
    import jax

    def loss(weights):
        return ((trained.stateless_call(weights, [], x)[0] - y) ** 2).mean()

    @jax.jit
    def step(weights, state):
        return optimizer.stateless_apply(state, jax.grad(loss)(weights), weights)

    weights, state = step([v.value for v in trained.trainable_variables], [v.value for v in optimizer.variables])
    for variable, value in zip([*trained.trainable_variables, *optimizer.variables], [*weights, *state], strict=True):
        variable.assign(value)


LOOPS = {"torch": step_of_torch, "tensorflow": step_of_tensorflow, "jax": step_of_jax}


def test_xla_and_torch_compile():
    if models.BACKEND == "tensorflow":
        with pytest.raises(Exception, match=r"XLA cannot call it .* pass jit_compile=False to model.compile"):
            models.fit(models.model(), hvd.DistributedOptimizer(sgd()), together=True, epochs=1, jit_compile=True)
        return
    trained = models.fit(models.model(), hvd.DistributedOptimizer(sgd()), together=True, epochs=1, jit_compile=True)
    models.close(trained, models.fit(models.model(), sgd(), together=False, epochs=1))


def test_ranks_outside_the_process_set_train_alone():
    last = hvd.add_process_set([models.SIZE - 1])
    weights = models.fit(models.model(), hvd.DistributedOptimizer(sgd(), process_set=last), together=True, epochs=1)
    models.close(weights, models.fit(models.model(), sgd(), together=True, epochs=1))
    hvd.remove_process_set(last)


def test_a_process_set_that_is_gone_is_told():
    """Every rank would be outside of it."""
    gone = hvd.ProcessSet([models.SIZE - 1])
    gone.process_set_id = 99  # as one that was passed to an earlier init()
    with pytest.raises(ValueError, match="there is no process set 99"):
        models.fit(models.model(), hvd.DistributedOptimizer(sgd(), process_set=gone), together=True, epochs=1)


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason="only TensorFlow has IndexedSlices")
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_embeddings(sparse_as_dense):
    def trained(optimizer, rank, size):
        keras.utils.set_random_seed(0)
        words = np.random.default_rng(3).integers(0, 20, (24, 3))[rank::size]
        table = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(20, 4), keras.layers.Flatten()])
        table.add(keras.layers.Dense(1))
        table.compile(optimizer=optimizer, loss="mse")
        table.fit(words, np.float32(words[:, :1]), batch_size=24 // size, epochs=3, shuffle=False, verbose=0)
        return models.numbers(table.weights)

    wrapped = hvd.DistributedOptimizer(optimizers.SGD(0.1), sparse_as_dense=sparse_as_dense)
    together = trained(wrapped, models.RANK, models.SIZE)
    models.equal_on_all_ranks(together)
    models.close(together, trained(optimizers.SGD(0.1), 0, 1))
