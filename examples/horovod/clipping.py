"""Gradient clipping, with a GradScaler and autocast if asked for, in the manner of Horovod's documentation for PyTorch.

ringrun -np 2 python examples/horovod/clipping.py
ringrun -np 2 python examples/horovod/clipping.py --bf16
ringrun -np 2 python examples/horovod/clipping.py --scaler --overflow-at 7    # on one rank: none of them steps
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--clip", type=float, default=0.25, help="the longest that the gradient may be")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--scaler", action="store_true", help="scale the loss, as training in float16 needs it")
parser.add_argument("--overflow-at", type=int, metavar="STEP", help="make the last rank's gradients infinite there")
args = parser.parse_args()

hvd.init()
torch.manual_seed(3 + hvd.rank())
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.Tensor(digits.images) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=args.scaler)

for step in range(args.steps):
    batch_size = args.batch_size * hvd.size()
    batch = torch.arange(step * batch_size, (step + 1) * batch_size)[hvd.rank() :: hvd.size()] % len(images)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if step == args.overflow_at and hvd.rank() == hvd.size() - 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    # the averages must be there before they are clipped
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).item()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    scale = scaler.get_scale()
    if hvd.rank() == 0:
        print(f"step {step + 1} loss {mean:.4f} norm {norm:.4f} scale {scale:g}")
if hvd.rank() == 0:
    print(f"sum of parameters {sum(each.sum().item() for each in model.parameters()):.6f}")
