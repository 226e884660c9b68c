"""Gradient clipping and mixed precision, in the manner of Horovod's documentation for PyTorch.

    ringrun -np 2 python examples/horovod/clipping.py

Three trainings: with clipping; with clipping and a GradScaler that meets an overflow on one rank only; and with
autocast to bfloat16.
"""

import argparse

import common
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--overflow-at", type=int, default=7)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)


def prepare(dtype):
    torch.manual_seed(3 + hvd.rank())
    (images, labels), _ = common.digits(dtype)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return images, labels, model, optimizer


def share_of(tensor, step):
    """This rank's part of the step's batch."""
    batch_size = args.batch_size * hvd.size()
    batch = tensor.roll(-step * batch_size, dims=0)[:batch_size]
    return batch[hvd.rank() :: hvd.size()]


def train_clipped():
    images, labels, model, optimizer = prepare(torch.float64)
    losses, norms = [], []
    for step in range(args.steps):
        data, target = share_of(images, step), share_of(labels, step)
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.synchronize()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).item())
        with optimizer.skip_synchronize():
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    return losses, norms, common.digest(model.state_dict())


def train_scaled(dtype, autocast):
    images, labels, model, optimizer = prepare(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    losses, scales = [], []
    for step in range(args.steps):
        data, target = share_of(images, step), share_of(labels, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model(data)
            loss = F.cross_entropy(output, target)
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        if step == args.overflow_at and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return losses, scales, common.digest(model.state_dict())


results = {
    "clipped": train_clipped(),
    "scaled": train_scaled(torch.float64, autocast=False),
    "bfloat16": train_scaled(torch.float32, autocast=True),
}
digests = hvd.allgather_object([digest for _, _, digest in results.values()])
scales = hvd.allgather_object(results["scaled"][1])
if hvd.rank() == 0:
    losses = {name: losses for name, (losses, _, _) in results.items()}
    common.show(losses)
    common.record(losses=losses, norms=results["clipped"][1], scales=scales, digests=digests)
