"""DistributedGradientTape, broadcast_variables, and Horovod's example for TensorFlow 2."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce as rr
import ringreduce.tensorflow as hvd
import ringreduce.tensorflow.keras
from ringreduce import runtime
from ringreduce.tensorflow import host

RANK, SIZE = hvd.rank(), hvd.size()
TABLE, FACTORS, UNUSED = tf.Variable(tf.ones([5, 2])), tf.Variable([1.0, 2.0]), tf.Variable(1.0)


def loss():
    return tf.reduce_sum(tf.nn.embedding_lookup(TABLE, [RANK % 3, 4]) * FACTORS) * (RANK + 1)


def expected():
    """The gradient of the table, averaged over the ranks, in NumPy."""
    total = np.zeros((5, 2))
    for rank in range(SIZE):
        total[[rank % 3, 4]] += (rank + 1) * np.array([1.0, 2.0])
    return total / SIZE


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.quick
def test_a_tape(run, sparse_as_dense):
    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=sparse_as_dense) as tape:
            value = loss()
        return tape.gradient(value, {"table": TABLE, "factors": FACTORS, "unused": UNUSED})

    gradients = run(step)()
    assert isinstance(gradients["table"], tf.Tensor if sparse_as_dense else tf.IndexedSlices)
    np.testing.assert_allclose(tf.convert_to_tensor(gradients["table"]), expected(), rtol=1e-6)
    np.testing.assert_allclose(gradients["factors"], [(SIZE + 1.0)] * 2, rtol=1e-6)
    assert gradients["unused"] is None


def test_options_of_a_tape():
    def gradients(**options):
        with tf.GradientTape() as tape:
            value = loss()
        tape = hvd.DistributedGradientTape(tape, **options)
        assert isinstance(tape, tf.GradientTape)
        return tape.gradient(value, FACTORS).numpy()

    mean = np.full(2, SIZE + 1.0)
    np.testing.assert_allclose(gradients(gradient_predivide_factor=SIZE, compression=hvd.Compression.fp16), mean)
    np.testing.assert_allclose(gradients(op=hvd.Sum), SIZE * mean)
    with pytest.raises(ValueError, match="gradient_predivide_factor=0; expected a number above 0"):
        gradients(gradient_predivide_factor=0)
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=2.0 with op=Sum; it works with op=Average only"):
        gradients(gradient_predivide_factor=2.0, op=hvd.Sum)


@pytest.mark.quick
def test_the_first_graph_with_a_collective_may_be_one_that_is_traced_again():
    """As in Horovod's elastic example, whose first step builds the model without the other ranks."""
    host._order.cache_clear()
    step = tf.function(lambda x, together: hvd.allreduce(x, op=hvd.Sum) if together else x)
    results = [float(step(tf.constant(RANK + 1.0), together)) for together in (False, True)]
    assert results == [RANK + 1, SIZE * (SIZE + 1) / 2]


@pytest.mark.quick
def test_variables(run):
    variables = [tf.Variable([1.0, 2.0 + RANK]), tf.Variable(RANK), keras.Variable([RANK + 0.5])]
    run(lambda: hvd.broadcast_variables(variables, SIZE - 1))()
    np.testing.assert_allclose(variables[0], [1, 1 + SIZE])
    assert variables[1].numpy() == SIZE - 1
    assert variables[2].numpy() == SIZE - 0.5
    hvd.broadcast_variables([], 0)


def test_horovods_example_for_tensorflow_2():
    """Its training step: one function, in which the first batch also broadcasts."""
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01 * SIZE)
    optimizer.build(model.trainable_variables)

    @tf.function
    def training_step(x, y, first_batch):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean((model(x, training=True) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return value

    x = np.random.default_rng(RANK).normal(size=(32, 4)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    losses = [float(training_step(x, y, number == 0)) for number in range(200)]
    assert losses[-1] < losses[0] / 10
    for weights in hvd.allgather_object(model.get_weights()):
        for mine, theirs in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_optimizers_are_those_of_keras():
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert type(wrapped) is keras.optimizers.SGD
    assert ringreduce.tensorflow.keras.DistributedOptimizer is ringreduce.keras.DistributedOptimizer
    assert ringreduce.tensorflow.keras.callbacks.__all__ == ringreduce.keras.callbacks.__all__
    with pytest.raises(TypeError, match=r"expected a Keras optimizer, got a .*GradientDescentOptimizer"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))


@pytest.mark.quick
def test_steps_are_recorded_also_in_a_graph(run):
    def step():
        with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=True) as tape:
            value = loss()
        return tape.gradient(value, [TABLE, FACTORS])

    recorder, step = runtime.current("test").engine.recorder, run(step)
    recorder.start()
    for _ in range(5):
        step()
    recorder.recording = False
    assert [each.number for each in recorder.steps][-4:] == [1, 2, 3, 4]


def test_a_variable_that_cannot_be_sent_is_named():
    variables = [tf.Variable(1.0, name="w"), tf.Variable("text", name="label")]
    with pytest.raises(
        rr.InputError, match=r"broadcast_variables 'label:0': elements of type object have no fixed size"
    ):
        hvd.broadcast_variables(variables, 0)
    assert hvd.allreduce(1.0) == 1


def test_broadcast_returns_the_values(run):
    variables = [tf.Variable([1.0, 2.0 + RANK]), tf.Variable(RANK)]
    values = run(lambda: hvd.broadcast_(variables, SIZE - 1, name="mine"))()
    for value, variable, expected in zip(values, variables, ([1, 1 + SIZE], SIZE - 1), strict=True):
        np.testing.assert_array_equal(value, expected)
        np.testing.assert_array_equal(variable, expected)
