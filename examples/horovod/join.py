"""Data that does not come out even: rank r has r + 2 batches an epoch, and joins when they are used up.

ringrun -np 2 python examples/horovod/join.py
"""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=30, help="of one rank")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.4)
parser.add_argument("--momentum", type=float, default=0.5)
args = parser.parse_args()

hvd.init()
torch.manual_seed(7 + hvd.rank())
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.Tensor(digits.images).unsqueeze(1) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def batches_of(rank):
    """All that this rank has."""
    for number in range(rank + 2):
        start = (number * 5 + rank) * args.batch_size
        yield images[start : start + args.batch_size], labels[start : start + args.batch_size]


def train_epoch():
    """Train until every rank has used up its data; returns the losses of this rank, and who joined last."""
    losses = []
    for data, target in batches_of(hvd.rank()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, hvd.join(hvd.local_rank())


def sum_of_parameters():
    return sum(each.sum().item() for each in model.parameters())


def train_alone(model):
    """What it should come to, computed by this process for all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    for _ in range(args.epochs):
        queues = [list(batches_of(rank)) for rank in range(hvd.size())]
        for step in range(len(queues[-1])):
            batches = [queue[step] for queue in queues if step < len(queue)]
            losses = [F.cross_entropy(model(data), target) for data, target in batches]
            optimizer.zero_grad()
            (sum(losses) / hvd.size()).backward()  # who has joined counts as zeros
            optimizer.step()
    return model


alone = train_alone(copy.deepcopy(model))
last_ranks, behind = [], []
for epoch in range(args.epochs):
    losses, last = train_epoch()
    # ranks that joined early have missed steps: all go on from the parameters of the one that made them all
    before = sum_of_parameters()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    behind.append(abs(sum_of_parameters() - before))
    losses = hvd.broadcast_object(losses, root_rank=last, name="losses")
    last_ranks.append(last)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1} loss {losses[-1]:.4f} after {len(losses)} steps, last to join: rank {last}")
if hvd.rank() == 0:
    print(f"sum of parameters {sum_of_parameters():.6f}")
