"""Data that does not come out even: rank r has r + 2 batches an epoch, and joins when they are used up.

ringrun -np 2 python examples/horovod/join.py
"""

import argparse
import copy

import common
import torch
import torch.nn as nn
import torch.nn.functional as F

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
(images, labels), _ = common.digits()
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).double()
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


def flat_parameters():
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_alone(model):
    """The losses that the rank with most data should have, computed by this process for all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    curve = []
    for _ in range(args.epochs):
        queues = [list(batches_of(rank)) for rank in range(hvd.size())]
        for step in range(len(queues[-1])):
            batches = [queue[step] for queue in queues if step < len(queue)]
            losses = [F.cross_entropy(model(data), target) for data, target in batches]
            optimizer.zero_grad()
            (sum(losses) / hvd.size()).backward()  # who has joined counts as zeros
            optimizer.step()
            curve.append(losses[-1].item())
    return curve


expected = train_alone(copy.deepcopy(model))
curve, last_ranks, behind = [], [], []
for _ in range(args.epochs):
    losses, last = train_epoch()
    # ranks that joined early have missed steps: all go on from the parameters of the one that made them all
    before = flat_parameters()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    behind.append((flat_parameters() - before).abs().max().item())
    curve += hvd.broadcast_object(losses, root_rank=last, name="losses")
    last_ranks.append(last)

told = hvd.allgather_object((common.digest(model.state_dict()), last_ranks, behind), name="told")
if hvd.rank() == 0:
    digests, last_ranks, behind = zip(*told, strict=True)
    common.show(curve)
    common.record(losses=curve, expected=expected, digests=digests, last_ranks=last_ranks, behind=behind)
