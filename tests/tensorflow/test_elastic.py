"""States of TensorFlow's variables: what is committed comes back, and all ranks get the root's.

Ranks that really die: end_to_end/test_frameworks.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce as rr
import ringreduce.tensorflow as hvd
import ringreduce.tensorflow.keras as hvd_keras

RANK, SIZE = hvd.rank(), hvd.size()


@pytest.mark.quick
def test_variables_are_committed_restored_and_the_root_s_on_all_ranks():
    own = [tf.Variable([1.0 + RANK, 2.0]), tf.Variable(RANK), keras.Variable([[RANK + 0.5]])]
    state = hvd.elastic.TensorFlowState(own, batch=RANK)
    assert all(mine is each for mine, each in zip(state.variables, own, strict=True))
    state.sync()
    assert state.batch == 0
    for values in ([[1.0, 2.0], 0, [[0.5]]], [[2.0, 4.0], 3, [[7.0 + RANK]]]):
        for variable, value in zip(own, values, strict=True):
            np.testing.assert_array_equal(tf.convert_to_tensor(variable), value)
        state.restore()
        for variable, value in zip(own, [[2.0, 4.0], 3, [[7.0 + RANK]]], strict=True):
            variable.assign(value)
        state.batch += 1
        state.commit()
    own[0].assign([9.0, 9.0])
    state.restore()
    np.testing.assert_array_equal(own[0], [2.0, 4.0])
    assert state.batch == 1 + 1


@pytest.mark.quick
def test_variables_that_cannot_be_restored_are_named():
    state = hvd.elastic.TensorFlowState([tf.Variable([1.0, 2.0])])
    state.variables[0] = tf.Variable([1.0, 2.0, 3.0])
    with pytest.raises(rr.InputError, match=r"variables of the shapes \[\(3,\)\], but the last commit has \[\(2,\)\]"):
        state.restore()
    with pytest.raises(rr.InputError, match=r"TensorFlowState: no variables; pass them: TensorFlowState\(model"):
        hvd.elastic.TensorFlowState(batch=0)


def test_the_modules_of_horovods_names():
    from ringreduce.tensorflow.elastic import TensorFlowKerasState, run
    from ringreduce.tensorflow.keras.callbacks import MetricAverageCallback
    from ringreduce.tensorflow.keras.elastic import CommitStateCallback, KerasState

    assert TensorFlowKerasState is KerasState is hvd_keras.elastic.KerasState
    assert run is rr.elastic.run
    assert issubclass(MetricAverageCallback, keras.callbacks.Callback)
    assert CommitStateCallback is hvd_keras.elastic.CommitStateCallback
