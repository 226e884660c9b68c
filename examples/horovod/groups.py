"""Gradients reduced in groups: `groups` of the optimizer in its forms, and grouped collectives called by hand.

ringrun -np 2 python examples/horovod/groups.py
"""

import argparse
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--lr", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.Tensor(digits.data) / 16, torch.tensor(digits.target)


def make_model():
    torch.manual_seed(3 + hvd.rank())
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def loss_of(model, step):
    batch_size = args.batch_size * hvd.size()
    mine = slice(step * batch_size + hvd.rank(), (step + 1) * batch_size, hvd.size())
    return F.cross_entropy(model(images[mine]), labels[mine])


def train(model, optimizer):
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, model


def wrapped(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def train_with(**options):
    model = make_model()
    return train(model, wrapped(model, **options))


def train_in_listed_groups():
    model = make_model()
    first, _, _in_no_group, _, third = model
    return train(model, wrapped(model, groups=[list(first.parameters()), [third.weight, third.bias]]))


def train_by_hand():
    """Averages all gradients in one grouped_allreduce."""
    model, losses = make_model(), []
    for step in range(8):
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        averaged = hvd.grouped_allreduce([each.grad for each in model.parameters()], name="gradients", op=hvd.Average)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), averaged, strict=True):
                parameter -= args.lr * gradient
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, model


def train_sharded():
    """Each rank updates its rows of every parameter, and gathers the others' rows."""
    model = make_model()
    losses = []
    for step in range(8):
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        shards = hvd.grouped_reducescatter(gradients, name="shards", op=hvd.Average)
        updated = []
        for parameter, shard in zip(model.parameters(), shards, strict=True):
            rows = hvd.allgather(torch.tensor([len(shard)])).tolist()
            start = sum(rows[: hvd.rank()])
            updated.append(parameter.detach()[start : start + len(shard)] - args.lr * shard)
        handle = hvd.grouped_allgather_async(updated, name="parameters")
        for parameter, whole in zip(model.parameters(), hvd.synchronize(handle), strict=True):
            parameter.data.copy_(whole)
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, model


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # num_groups is Horovod's old name of groups
    results = {
        "ungrouped": train_with(),
        "groups=2": train_with(groups=2),
        "num_groups=2": train_with(num_groups=2),
        "listed": train_in_listed_groups(),
        "predivided": train_with(groups=1, gradient_predivide_factor=2.0),
        "compressed": train_with(groups=2, compression=hvd.Compression.fp16),
        "by hand": train_by_hand(),
        "sharded": train_sharded(),
    }
models = {name: model for name, (_, model) in results.items()}
if hvd.rank() == 0:
    for name, (losses, model) in results.items():
        total = sum(each.sum().item() for each in model.parameters())
        print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, sum of parameters {total:.6f}")
