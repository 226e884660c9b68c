"""Tapes of which some gradients stay a rank's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce as rr
import ringreduce.tensorflow as hvd

RANK, SIZE = hvd.rank(), hvd.size()
X = np.arange(6, dtype=np.float32).reshape(3, 2) + 10 * RANK


def models():
    """A layer that all ranks share, and one of this rank's own, of other sizes elsewhere."""
    shared, own = keras.layers.Dense(2, name="shared"), keras.layers.Dense(1 + RANK, name="own")
    shared.build((None, 2))
    own.build((None, 2))
    for layer in (shared, own):
        layer.kernel.assign(tf.ones_like(layer.kernel) / 2)
    return shared, own


def gradients_of(run, wrap):
    """Those of all four variables: of this rank, and of a tape that `wrap` has made; and what is shared, averaged."""
    shared, own = models()
    variables = [*own.trainable_variables, *shared.trainable_variables]

    def step(wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(own(shared(tf.constant(X))) ** 2)
        return wrap(tape, own, shared).gradient(loss, variables)

    alone = [each.numpy() for each in step(lambda tape, *_: tape)]
    found = [each.numpy() for each in run(lambda: step(wrap))()]
    every = rr.allgather_object(alone[2:])
    return alone[:2], found[:2], found[2:], [np.mean(each, axis=0) for each in zip(*every, strict=True)]


@pytest.mark.quick
@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("kind", ["layers", "one layer", "registered"])
def test_layers_of_one_rank_s_own(run, scales, kind):
    def wrap(tape, own, shared):
        if kind == "registered":
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scales)
            for each in own.trainable_variables:
                tape.register_local_source(each)
            return tape
        layers = own if kind == "one layer" else [own]
        return hvd.PartialDistributedGradientTape(tape, local_layers=layers, scale_local_gradients=scales)

    alone, own, shared, mean = gradients_of(run, wrap)
    for mine, expected in zip(own, alone, strict=True):
        np.testing.assert_allclose(mine, expected / (SIZE if scales else 1), rtol=1e-5)
    for mine, expected in zip(shared, mean, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


def test_all_layers_may_be_local_or_none(run):
    alone, own, _, _ = gradients_of(
        run, lambda tape, *layers: hvd.PartialDistributedGradientTape(tape, local_layers=layers)
    )
    for mine, expected in zip(own, alone, strict=True):
        np.testing.assert_allclose(mine, expected / SIZE, rtol=1e-5)
    table = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table * (RANK + 1.0))
    (found,) = hvd.PartialDistributedGradientTape(tape).gradient(loss, [table])
    np.testing.assert_allclose(found, [(SIZE + 1) / 2] * 2)


def test_a_process_set_that_is_gone_is_told(run):
    """Every rank would be outside of it."""
    gone = hvd.ProcessSet([SIZE - 1])
    gone.process_set_id = 99  # as one that was passed to an earlier init()
    table = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table * (RANK + 1.0))
    with pytest.raises(ValueError, match="there is no process set 99"):
        hvd.DistributedGradientTape(tape, process_set=gone).gradient(loss, [table])


@pytest.mark.quick
def test_an_embedding_of_one_rank_s_own(run):
    """Its gradient stays IndexedSlices, of the table's shape; a tf.Variable is the same as Keras' variable of it."""
    own, shared, unused = keras.layers.Embedding(5 + RANK, 2), tf.Variable([1.0, 2.0]), tf.Variable(0.0)
    own.build()
    table = own.trainable_variables[0]

    def step():
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table.value, [RANK, 4])
            loss = tf.reduce_sum(rows * shared) * (RANK + 1)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=[own], sparse_as_dense=True)
        return tape.gradient(loss, {"own": table.value, "shared": shared, "unused": unused})

    found = run(step)()
    assert isinstance(found["own"], tf.IndexedSlices)
    expected = np.zeros((5 + RANK, 2))
    np.add.at(expected, [RANK, 4], (RANK + 1) * np.array([1.0, 2.0]) / SIZE)
    assert tuple(found["own"].dense_shape) == expected.shape
    np.testing.assert_allclose(tf.convert_to_tensor(found["own"]), expected, rtol=1e-6)
    assert found["unused"] is None


def test_what_is_no_layer_or_has_no_variables():
    for layers, says in [
        (
            [tf.Variable(1.0)],
            r"PartialDistributedGradientTape: local_layers has <tf.Variable .*; expected layers of Ke",
        ),
        (keras.layers.Dense(1, name="late"), r"layer 'late' of local_layers is not built, so it has no variables yet"),
    ]:
        with pytest.raises(rr.InputError, match=says):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layers)


def test_the_arguments_are_horovods(run):
    def step():
        table = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(table * (RANK + 1.0))
        tape = hvd.DistributedGradientTape(tape, "/gpu:0", "", hvd.Compression.none, False, hvd.Sum, 1.0, 0, None)
        return tape.gradient(loss, table)

    np.testing.assert_allclose(run(step)(), [SIZE * (SIZE + 1) / 2] * 2)
