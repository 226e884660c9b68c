"""Twelve experts, parted among the ranks: alltoall brings each image to its expert's rank, and the answer back.

ringrun -np 2 python examples/horovod/mixture_of_experts.py
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--lr", type=float, default=1.0)
args = parser.parse_args()
EXPERTS, WIDTH = 12, 20

hvd.init()
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.Tensor(digits.data) / 16, torch.tensor(digits.target)
directions = torch.randn(64, EXPERTS, generator=torch.Generator().manual_seed(1))
expert_of = ((images - images.mean(dim=0)) @ directions).argmax(dim=1)  # fixed, so that nothing is learned there


class Experts(nn.Module):
    """This rank's experts; expert e is on rank e // (EXPERTS / size)."""

    def __init__(self):
        super().__init__()
        all_weights = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
        self.count = EXPERTS // hvd.size()
        first = hvd.rank() * self.count
        self.weights = nn.Parameter(all_weights[first : first + self.count] / WIDTH**0.5)

    def forward(self, x, experts):
        """The rows of `x`, each through its expert, wherever that is."""
        order = experts.argsort(stable=True)
        splits = torch.bincount(experts // self.count, minlength=hvd.size()).to(torch.int32)
        rows, received = hvd.alltoall(x[order], splits=splits, name="rows")
        local, _ = hvd.alltoall(experts[order], splits=splits, name="experts")
        answers = torch.einsum("nij,nj->ni", self.weights[local % self.count], rows)
        returned, sent = hvd.alltoall(answers, splits=received, name="answers")
        assert sent.tolist() == splits.tolist()
        return returned[order.argsort()]


torch.manual_seed(3 + hvd.rank())
before, experts, after = nn.Linear(64, WIDTH), Experts(), nn.Linear(WIDTH, 10)
model = nn.ModuleDict({"before": before, "after": after})
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=args.lr), named_parameters=model.named_parameters(), op=hvd.Sum
)
own_optimizer = torch.optim.SGD(experts.parameters(), lr=args.lr)

for step in range(args.steps):
    batch_size = args.batch_size * hvd.size()
    batch = torch.arange(step * batch_size, (step + 1) * batch_size)[hvd.rank() :: hvd.size()] % len(images)
    optimizer.zero_grad()
    own_optimizer.zero_grad()
    hidden = torch.tanh(before(images[batch]))
    output = after(torch.tanh(experts(hidden, expert_of[batch])))
    # this rank's part of the mean over all ranks: what comes back through alltoall adds up
    loss = F.cross_entropy(output, labels[batch], reduction="sum") / batch_size
    loss.backward()
    optimizer.step()
    own_optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss", op=hvd.Sum).item()
    if hvd.rank() == 0:
        print(f"step {step + 1} loss {mean:.4f}")

weights = hvd.allgather(experts.weights.detach())  # of all experts
if hvd.rank() == 0:
    print(f"sum of parameters {sum(each.sum().item() for each in [*model.parameters(), weights]):.6f}")
