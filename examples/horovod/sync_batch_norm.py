"""Batch normalization over the batches of all ranks, and a contrastive loss over the features of all ranks.

ringrun -np 2 python examples/horovod/sync_batch_norm.py
ringrun -np 2 python examples/horovod/sync_batch_norm.py --loss contrastive
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=24, help="of one rank")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--loss", choices=["classification", "contrastive", "centred"], default="classification")
args = parser.parse_args()

hvd.init()
torch.manual_seed(5 + hvd.rank())
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.Tensor(digits.images).unsqueeze(1) / 16, torch.tensor(digits.target)


class Net(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, kernel_size=3)
        self.norm = hvd.SyncBatchNorm(6)
        self.fc = nn.Linear(6 * 9, outputs)
        self.fc_norm = hvd.SyncBatchNorm(outputs, momentum=0.3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc_norm(self.fc(x.flatten(1)))


def share_of(tensor, step):
    batch_size = args.batch_size * hvd.size()
    return tensor[step * batch_size : (step + 1) * batch_size][hvd.rank() :: hvd.size()]


def classification_loss(step):
    return F.cross_entropy(model(share_of(images, step)), share_of(labels, step))


def contrastive_loss(step):
    """Two views of one image should look alike, and unlike those of the other images of all ranks."""
    data = share_of(images, step)
    views = F.normalize(model(data), dim=1), F.normalize(model(data.flip(-1)), dim=1)
    gathered = hvd.allgather(torch.stack(views, dim=1), name="views")
    own = hvd.rank() * args.batch_size + torch.arange(args.batch_size)
    return F.cross_entropy(gathered[own, 0] @ gathered[:, 1].T / 0.5, own)


class MeanOverRanks(torch.autograd.Function):
    """A user's own differentiable function, made of collectives."""

    @staticmethod
    def forward(ctx, tensor):
        return hvd.allreduce(tensor, name="forward", op=hvd.Average)

    @staticmethod
    def backward(ctx, gradient):
        return hvd.allreduce(gradient, name="backward", op=hvd.Average)


def centred_loss(step):
    features = model(share_of(images, step)).square()
    return (MeanOverRanks.apply(features.mean(dim=0)) - 0.1 * torch.arange(features.shape[1])).square().mean()


# the gradient of allgather is averaged over the ranks, so that the optimizer has to sum
loss_of, outputs, op = {
    "classification": (classification_loss, 10, hvd.Average),
    "contrastive": (contrastive_loss, 6, hvd.Sum),
    "centred": (centred_loss, 3, hvd.Average),
}[args.loss]
model = Net(outputs)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=op)
for step in range(args.steps):
    optimizer.zero_grad()
    loss = loss_of(step)
    loss.backward()
    optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print(f"step {step + 1} loss {mean:.4f}")

model.eval()  # normalizes by what it has seen in training
with torch.no_grad():
    seen = model(images[1440:]).abs().mean().item()
if hvd.rank() == 0:
    print(f"mean output in evaluation {seen:.6f}")
    print(f"sum of parameters {sum(each.sum().item() for each in model.parameters()):.6f}")
