"""Checkpoints on rank 0 that hold all it takes to go on as if nothing had happened: random states too.

    ringrun -np 2 python examples/horovod/checkpoint.py

Every rank draws dropout masks of its own.
"""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", default="checkpoint.pt")
parser.add_argument("--batch-size", type=int, default=48, help="of one rank")
parser.add_argument("--steps-per-epoch", type=int, default=6)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

hvd.init()
torch.manual_seed(11 * hvd.rank())
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.Tensor(digits.images).unsqueeze(1) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

# rank 0 alone sees the file
state = None
if hvd.rank() == 0 and os.path.exists(args.checkpoint):
    state = torch.load(args.checkpoint, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)

# what is neither a parameter nor the optimizer's
progress = {
    "epoch": 0,
    "scheduler": scheduler.state_dict(),
    "random_states": hvd.allgather_object(torch.get_rng_state()),
}
progress = hvd.broadcast_object(state["progress"] if state else progress, root_rank=0, name="progress")
scheduler.load_state_dict(progress["scheduler"])
torch.set_rng_state(progress["random_states"][hvd.rank()])
first_epoch = progress["epoch"]


def train_epoch():
    total = 0.0
    for _ in range(args.steps_per_epoch):
        batch = torch.randint(len(images), (args.batch_size,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step()
    return total / args.steps_per_epoch


def save(epoch):
    random_states = hvd.allgather_object(torch.get_rng_state(), name="random_states")
    if hvd.rank() == 0:
        progress = {"epoch": epoch, "scheduler": scheduler.state_dict(), "random_states": random_states}
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
        torch.save(state, args.checkpoint)


if hvd.rank() == 0 and first_epoch:
    print(f"going on after epoch {first_epoch}")
for epoch in range(first_epoch, args.epochs):
    losses = hvd.allgather_object(train_epoch(), name="losses")
    save(epoch + 1)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1} loss {sum(losses) / len(losses):.4f}, by rank", *(f"{each:.4f}" for each in losses))
if hvd.rank() == 0:
    print(f"sum of parameters {sum(each.sum().item() for each in model.parameters()):.6f}")
