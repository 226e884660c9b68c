"""LeNet by hand: convolution, pooling and their backward passes in NumPy, or CuPy, trained on handwritten digits.

    python examples/numpy_lenet.py                        # one process
    ringrun -np 4 python examples/numpy_lenet.py          # the same training, on four ranks
    ringrun -np 4 python examples/numpy_lenet.py --gpu    # each on its GPU, by CuPy

Any number of ranks that divides 32 trains the same model: together they take the same batches. The gradients of the
last layers travel while those of the first are computed. Each layer returns its result, and a function that makes of
the result's gradient those of its input and its parameters.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import ringreduce as rr

if "--gpu" in sys.argv:
    import cupy as xp
else:
    xp = np
EPOCHS, BATCH, TRAIN, RATE, MOMENTUM = 10, 32, 1600, 0.03, 0.9


def convolution(x, w, b):
    """Filters w (filters, channels, 3, 3) over images (n, channels, height, width), padded with zeros."""

    def windows(x):
        padded = xp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        return xp.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))  # (n, channels, height, width, 3, 3)

    def backward(delta):
        gradients = {"w": xp.tensordot(delta, seen, ((0, 2, 3), (0, 2, 3))), "b": delta.sum((0, 2, 3))}
        turned = w[:, :, ::-1, ::-1]
        return xp.tensordot(windows(delta), turned, ((1, 4, 5), (0, 2, 3))).transpose(0, 3, 1, 2), gradients

    seen = windows(x)
    return (xp.tensordot(seen, w, ((1, 4, 5), (1, 2, 3))) + b).transpose(0, 3, 1, 2), backward


def pooling(x):
    """The largest of each 2 x 2 pixels; equal ones share the gradient."""
    n, channels, height, width = x.shape
    blocks = x.reshape(n, channels, height // 2, 2, width // 2, 2)
    largest = blocks.max((3, 5), keepdims=True)
    chosen = blocks == largest

    def backward(delta):
        return (chosen * delta[:, :, :, None, :, None] / chosen.sum((3, 5), keepdims=True)).reshape(x.shape), {}

    return largest[:, :, :, 0, :, 0], backward


def rectified(x):
    """Negative ones to 0."""
    return x * (x > 0), lambda delta: (delta * (x > 0), {})


def fully_connected(x, w, b):
    """Every output of every input: x @ w + b."""
    flat = x.reshape(len(x), -1)
    return flat @ w + b, lambda delta: ((delta @ w.T).reshape(x.shape), {"w": flat.T @ delta, "b": delta.sum(0)})


KINDS = {"conv": convolution, "relu": rectified, "pool": pooling, "full": fully_connected}
LAYERS = ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "full1", "relu3", "full2"]
SHAPES = {"conv1": (8, 1, 3, 3), "conv2": (16, 8, 3, 3), "full1": (64, 48), "full2": (48, 10)}


def initial():
    """The parameters to start from, by layer; all ranks draw the same."""
    draw, made = np.random.default_rng(0), {}
    for name, shape in SHAPES.items():
        inputs, outputs = (np.prod(shape[1:]), shape[0]) if name.startswith("conv") else shape
        made[name] = {"w": xp.asarray(draw.normal(0, (2 / inputs) ** 0.5, shape)), "b": xp.zeros(outputs)}
    return made


def loss_and_backward(parameters, x, labels):
    """The mean cross entropy, how many are right, and a generator of gradients from the last layer to the first."""
    tape = []
    for name in LAYERS:
        x, backward = KINDS[name[:-1]](x, **parameters.get(name, {}))
        tape.append((name, backward))
    x = x - x.max(1, keepdims=True)
    logs = x - xp.log(xp.exp(x).sum(1, keepdims=True))
    truth = xp.eye(10)[labels]

    def gradients():
        delta = (xp.exp(logs) - truth) / len(labels)
        for name, backward in reversed(tape):
            delta, found = backward(delta)
            yield from ((name, key, each) for key, each in found.items())

    return -(logs * truth).sum() / len(labels), (logs.argmax(1) == labels).sum(), gradients()


if __name__ == "__main__":
    rr.init()
    order = np.random.default_rng(0).permutation(1797)
    images, labels = (xp.asarray(each[order]) for each in load_digits(return_X_y=True))
    images = images.reshape(-1, 1, 8, 8) / 16
    parameters = initial()
    speeds = {name: {key: xp.zeros_like(each) for key, each in of.items()} for name, of in parameters.items()}
    sampler = rr.DistributedSampler(TRAIN)
    for epoch in range(EPOCHS):
        losses = []
        sampler.set_epoch(epoch)
        for batch in sampler.batches(BATCH // rr.size()):
            loss, _, gradients = loss_and_backward(parameters, images[batch], labels[batch])
            moving = [(name, key, rr.allreduce_async_(each, name=f"{name}.{key}")) for name, key, each in gradients]
            for name, key, handle in moving:
                speeds[name][key] = MOMENTUM * speeds[name][key] - RATE * rr.synchronize(handle)
                parameters[name][key] += speeds[name][key]
            losses.append(loss)
            rr.mark_step(examples=len(batch))  # what an optimizer of ringreduce does: steps are counted and timed
        loss = rr.allreduce(float(sum(losses) / len(losses)), name="loss")
        _, right, _ = loss_and_backward(parameters, images[TRAIN:], labels[TRAIN:])
        if rr.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.12f}, test accuracy {float(right) / (1797 - TRAIN):.3f}")
