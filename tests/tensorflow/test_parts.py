"""check=divergence with a DistributedGradientTape: the variables whose gradients it reduces, eagerly and in graphs."""

import re

import pytest
import tensorflow as tf

import ringreduce as rr
import ringreduce.tensorflow as hvd

RANK, SIZE = hvd.rank(), hvd.size()


def stepping(run):
    """step(): of two variables, of which one has no gradient, and another tensor."""
    w, b, unused = tf.Variable([1.0, 2.0], name="w"), tf.Variable(0.5, name=f"b_{RANK}"), tf.Variable([1])

    @run
    def step(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.square(w * x + b))
            loss = 2 * total
        tape = hvd.DistributedGradientTape(tape)
        of_w, of_b, _, _ = tape.gradient(loss, [w, b, unused, total])
        w.assign_sub(of_w / 32)
        b.assign_sub(of_b / 32)

    return step, w, b


@pytest.mark.quick
@pytest.mark.parametrize("run", [lambda function: function, tf.function], ids=["eagerly", "tf.function"])
@pytest.mark.parametrize("number", [0, 3, 99])
def test_who_differs_is_named(found, run, number):
    step, _, b = stepping(run)
    for at in range(7):
        if (at, RANK) == (number, SIZE - 1):
            b.assign_add(0.5)
        step(tf.constant([1.0, 2.0]) + RANK)
    when = "1 step (not compared before)" if number == 0 else "3 steps (equal after 1)"
    found(None if number == 99 else rf"after {re.escape(when)} parameter '\d.b:0' differs")


def test_variables_that_are_broadcast_after_the_first_step(found):
    step, w, b = stepping(lambda function: function)
    b.assign_add(RANK)
    for at in range(4):
        step(tf.constant([1.0, 2.0]) + RANK)
        if at == 0:
            hvd.broadcast_variables([w, b], root_rank=0)
    found(None)


def test_a_graph_that_is_traced_before_does_not_change():
    step, _, _ = stepping(tf.function)
    step(tf.constant([1.0, 2.0]))
    rr.check("divergence:1")
    step(
        tf.constant([[1.0, 2.0]]) if RANK == SIZE - 1 else tf.constant([1.0, 2.0])
    )  # traced anew by the last rank alone
    rr.check("")
