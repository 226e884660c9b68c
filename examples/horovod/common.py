"""What the scripts here share: data, and what they say at the end. It knows nothing of Horovod."""

import argparse
import hashlib
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import torch

TRAIN_COUNT, TEST_COUNT = 1440, 348  # multiples of 12, so that 1, 2, 3 and 4 ranks get equal shares


def digits(dtype=torch.float64):
    """scikit-learn's handwritten digits: images (count, 1, 8, 8) and labels, for training and for the test."""
    folder = Path(importlib.util.find_spec("sklearn").origin).parent  # importing it would take a second
    table = torch.from_numpy(np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32))
    images, labels = (table[:, :64] / 16).to(dtype).reshape(-1, 1, 8, 8), table[:, 64].long()
    test = slice(TRAIN_COUNT, TRAIN_COUNT + TEST_COUNT)
    return (images[:TRAIN_COUNT], labels[:TRAIN_COUNT]), (images[test], labels[test])


def python_text(count):
    """The first bytes of a file of Python's own library, as whole numbers."""
    return torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()[:count]), dtype=torch.uint8).long()


def digest(tensors):
    """Equal only if every bit of the parameters (a list, or a state_dict) is."""
    values = tensors.values() if isinstance(tensors, dict) else tensors
    fingerprint = hashlib.blake2b(digest_size=8)
    for tensor in values:
        fingerprint.update(tensor.detach().contiguous().numpy().tobytes())
    return fingerprint.hexdigest()


def show(losses):
    """Print the first and the last loss; of several curves, in a dict, those of each."""
    for name, curve in losses.items() if isinstance(losses, dict) else [("loss", losses)]:
        print(f"{name}: {curve[0]:.4f} in the beginning, {curve[-1]:.4f} in the end")


def record(**values):
    """With RECORD=FILE.json in the environment, write there what tests compare."""
    if "RECORD" in os.environ:
        Path(os.environ["RECORD"]).write_text(json.dumps(values))
