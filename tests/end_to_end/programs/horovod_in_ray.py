"""Horovod's tensorflow2_mnist_ray.py, with a smaller model and data; then an elastic job, by ElasticRayExecutor."""

import os

import horovod.tensorflow.keras as hvd
import numpy as np
import ray
import tensorflow as tf
from horovod.ray import ElasticRayExecutor, RayExecutor


def train(num_epochs):
    hvd.init()
    images = np.random.default_rng(hvd.rank()).random((64, 8, 8)).astype(np.float32)
    labels = images.mean((1, 2)) > 0.5
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.cast(images[..., tf.newaxis], tf.float32), tf.cast(labels, tf.int64))
    )
    dataset = dataset.repeat().shuffle(64).batch(16)
    tf.keras.utils.set_random_seed(hvd.rank())
    layers = [tf.keras.layers.Conv2D(2, [3, 3], activation="relu"), tf.keras.layers.Flatten()]
    mnist_model = tf.keras.Sequential([*layers, tf.keras.layers.Dropout(0.25), tf.keras.layers.Dense(2, "softmax")])
    scaled_lr = 0.001 * hvd.size()
    opt = hvd.DistributedOptimizer(tf.optimizers.Adam(scaled_lr))
    mnist_model.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    ]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
    mnist_model.fit(dataset, steps_per_epoch=8 // hvd.size(), callbacks=callbacks, epochs=num_epochs, verbose=0)
    numbers = [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    assert numbers == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()], numbers
    return hvd.rank(), hvd.size(), [each.tolist() for each in mnist_model.get_weights()]


def size():
    import horovod.torch as hvd

    hvd.init()
    assert [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE")] == [hvd.rank(), hvd.size()]
    return hvd.size()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    settings = RayExecutor.create_settings(timeout_s=300)
    executor = RayExecutor(settings, num_workers=2, use_gpu=False, cpus_per_worker=1)
    executor.start()
    results = executor.run(train, kwargs={"num_epochs": 1})
    executor.shutdown()
    print("ranks", [each[:2] for each in results], "equal", results[0][2] == results[1][2], flush=True)
    settings = ElasticRayExecutor.create_settings(min_np=1, max_np=2, timeout_s=300, verbose=2)
    executor = ElasticRayExecutor(settings, cpus_per_slot=1, env_vars={"MARK": "a"}, override_discovery=False)
    executor.start()
    print("sizes", executor.run(size), flush=True)
