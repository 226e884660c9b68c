"""DDP over the backend "ring": one gradient of rank 1 goes bad in step 37."""

import itertools
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

bad = float(sys.argv[1])
dist.init_process_group("ring")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
model.module[1].weight.register_hook(lambda gradient: gradient * (bad if (next(steps), rank) == (37, 1) else 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
zeros, steps = 0, itertools.count()
for _ in range(40):
    optimizer.zero_grad()
    model(torch.full((2, 4), rank + 1.0)).mean().backward()
    before = model.module[1].weight.detach().clone()
    optimizer.step()
    zeros += bool((before == model.module[1].weight).all())
finite = all(parameter.isfinite().all() for parameter in model.parameters())
print(f"rank {rank}: 40 steps, {zeros} of them by zeros, finite: {finite}")
dist.destroy_process_group()
