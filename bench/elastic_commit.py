"""What a commit costs: ringreduce's beside copy.deepcopy, which Horovod's TorchState does, and one copy of the bytes.

    python bench/elastic_commit.py --megabytes 100

A model and Adam's state of so many bytes in all, as ResNet-50 has them: 161 parameters, 3 tensors each, and a counter.
`first` is a commit into new memory; the medians are of later ones. Each commit is checked: what it restores is what was
there. ms, medians.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time

import numpy as np
import torch
from models import resnet50

import ringreduce.torch as hvd


def timed_ms(function):
    """How long it takes."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def new_state(megabytes):
    """A model with parameters in ResNet-50's proportions, its optimizer after a step, and a state of both."""
    counts = [math.prod(shape) for shape in resnet50()]
    scale = megabytes * 1e6 / (3 * 4 * sum(counts))
    model = torch.nn.ParameterList([torch.randn(max(1, int(count * scale))) for count in counts])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    step(model, optimizer)
    return model, optimizer, hvd.elastic.TorchState(model, optimizer, step=0)


def step(model, optimizer):
    """Change everything."""
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimizer.step()


def values(model, optimizer):
    """Sums of all tensors, which tell states apart."""
    tensors = [*model.parameters(), *(each for own in optimizer.state.values() for each in own.values())]
    return [float(each.detach().double().sum()) for each in tensors]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="of the state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="commits of each kind (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer, state = new_state(args.megabytes)
    memory = state._committed.memory
    source, target = np.ones_like(memory), np.ones_like(memory)
    names = ("commit", "deepcopy", "one copy")
    rows = {name: [] for name in names}
    first = timed_ms(state.save)
    for _ in range(args.rounds):
        step(model, optimizer)
        rows["commit"].append(timed_ms(state.save))
        expected = values(model, optimizer)
        rows["deepcopy"].append(timed_ms(lambda: copy.deepcopy([model.state_dict(), optimizer.state_dict()])))
        rows["one copy"].append(timed_ms(lambda: np.copyto(target, source)))
        step(model, optimizer)
        state.restore()
        if values(model, optimizer) != expected:
            raise SystemExit("a commit restored something else than it had kept")
    print(f"a state of {memory.nbytes / 1e6:.0f} MB, torch {torch.__version__}; first commit {first:.1f} ms")
    for name in names:
        print(f"{name:9} {statistics.median(rows[name]):8.1f} ms")


if __name__ == "__main__":
    main()
