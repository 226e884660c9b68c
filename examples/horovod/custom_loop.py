"""A training loop without DistributedOptimizer: named gradients, begun in another order on each rank, and polled for.

    ringrun -np 2 python examples/horovod/custom_loop.py

Errors that Horovod reports are provoked on the way and caught, and training goes on.
"""

import argparse
import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--lr", type=float, default=1.0)
parser.add_argument("--timeline", default="timeline.json")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
random.seed(hvd.rank())
ROOT = hvd.size() - 1
torch.manual_seed(3 + ROOT - hvd.rank())
digits = load_digits()
images, labels = torch.Tensor(digits.images).unsqueeze(1) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10))
for name, tensor in model.state_dict().items():
    hvd.broadcast_(tensor, root_rank=ROOT, name=name)
polls = 0


def average_gradients():
    """Begin all, do something else while they travel, end all."""
    global polls
    named = list(model.named_parameters())
    random.shuffle(named)
    handles = {}
    for name, parameter in named:
        handles[name] = hvd.allreduce_async_(parameter.grad, op=hvd.Average, name=f"gradient.{name}")
        time.sleep(random.random() * 0.001)
    while not all(hvd.poll(handle) for handle in handles.values()):
        polls += 1
        time.sleep(0.0005)
    random.shuffle(named)
    for name, parameter in named:
        averaged = hvd.synchronize(handles[name])
        assert averaged.data_ptr() == parameter.grad.data_ptr()


def provoke_mismatch():
    """The last rank passes another shape; every rank is told so."""
    rows = 3 if hvd.rank() == hvd.size() - 1 else 4
    try:
        hvd.allreduce(torch.ones(rows), name="mismatch")
    except hvd.HorovodInternalError as error:
        return str(error)
    return None


def provoke_duplicate():
    """Rank 0 gives one name twice before the others have given it once."""
    message, handle = None, None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="duplicate", op=hvd.Sum)
        try:
            hvd.allreduce_async(torch.ones(2), name="duplicate", op=hvd.Sum)
        except ValueError as error:
            message = str(error)
    hvd.broadcast_object("go on", root_rank=0)
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(2), name="duplicate", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    return message


for step in range(args.steps):
    if hvd.rank() == 0 and step == 2:
        hvd.start_timeline(args.timeline, mark_cycles=True)
    batch_size = args.batch_size * hvd.size()
    mine = torch.arange(step * batch_size, (step + 1) * batch_size)[hvd.rank() :: hvd.size()] % len(images)
    model.zero_grad()
    loss = F.cross_entropy(model(images[mine]), labels[mine])
    loss.backward()
    if step == 4:
        mismatch, duplicate = provoke_mismatch(), provoke_duplicate()
        if hvd.rank() == 0:
            print(f"reported on every rank: {mismatch}\nreported on rank 0: {duplicate}")
    average_gradients()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= args.lr * parameter.grad
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print(f"step {step + 1} loss {mean:.4f}")
    if hvd.rank() == 0 and step == 7:
        hvd.stop_timeline()

if hvd.rank() == 0:
    print(f"polled {polls} times in vain")
    print(f"sum of parameters {sum(each.sum().item() for each in model.parameters()):.6f}")
