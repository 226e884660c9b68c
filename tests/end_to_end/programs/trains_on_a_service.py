"""Horovod's tensorflow2_mnist_data_service, with a smaller model and data; then what each rank has got is counted.

ringrun --horovod -np 2 python trains_on_a_service.py service.json [reuse | turns]
"""

import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

ROWS, BATCH, STEPS = 64, 4, 8


def train_fn(compute_config, reuse_dataset=False, round_robin=False):
    hvd.init()
    if compute_config.dispatcher_side == "compute":
        options = {"reuse_dataset": reuse_dataset, "round_robin": round_robin}
        train(lambda data: data.send_to_data_service(compute_config, hvd.rank(), hvd.size(), **options))
        return
    with tf_data_service(compute_config, hvd.rank()) as dispatcher_address:
        distribute = tf.data.experimental.service.distribute(
            service=dispatcher_address,
            processing_mode="distributed_epoch",
            job_name="job" if reuse_dataset else None,
            consumer_index=hvd.rank() if round_robin else None,
            num_consumers=hvd.size() if round_robin else None,
        )
        train(lambda data: data.apply(distribute))


def train(served):
    x = tf.random.stateless_normal([ROWS, 3], seed=[1, 2])
    data = tf.data.Dataset.from_tensor_slices((x, tf.range(ROWS)))
    forever = served(data.repeat().shuffle(ROWS).batch(BATCH))
    tf.keras.utils.set_random_seed(hvd.rank())
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    steps = {"steps_per_epoch": STEPS, "verbose": 0, "callbacks": callbacks}
    model.fit(forever.map(lambda x, number: (x, tf.reduce_sum(x, 1))), **steps)
    weights = hvd.allgather(model.weights[0][None])
    assert np.all(weights[0] == weights[1])
    shared = sys.argv[2:]  # in which case there is one dataset for each service
    counted = forever.take(STEPS) if shared else served(data.batch(BATCH))
    numbers = np.concatenate([number.numpy() for _, number in counted])
    assert set(numbers) <= set(range(ROWS))
    assert len(numbers) == STEPS * BATCH if shared else sorted(numbers) == [*range(ROWS)]
    rows = hvd.allgather(np.array([len(numbers)])).numpy()
    if hvd.rank() == 0:
        print(f"{compute_config.dispatcher_side}: {rows.tolist()}", flush=True)


compute_config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
train_fn(compute_config, bool(sys.argv[2:]), sys.argv[2:] == ["turns"])
hvd.allgather(np.zeros(1))  # all have what they need
if hvd.rank() == 0:
    compute_config.compute_client(verbose=2).shutdown()
