"""Several backward passes per step, warm-up and checkpoints, in the manner of Horovod's ImageNet example.

ringrun -np 2 python examples/horovod/gradient_accumulation.py
"""

import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data.distributed
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", default="checkpoint-{epoch}.pth.tar")
parser.add_argument("--batches-per-allreduce", type=int, default=2, help="backward passes before one reduction")
parser.add_argument("--batch-size", type=int, default=60, help="of one pass of one rank")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--base-lr", type=float, default=0.02, help="for a single pass of a single rank")
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42 + 10 * hvd.rank())
torch.set_num_threads(1)

# only rank 0 may have the files, as on a cluster of local disks
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if hvd.rank() == 0 and os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break

resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

digits = load_digits()
images, labels = torch.Tensor(digits.images).unsqueeze(1) / 16, torch.tensor(digits.target)
dataset = torch.utils.data.TensorDataset(images[:1380], labels[:1380])  # the last step of an epoch has fewer passes
train_sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
allreduce_batch_size = args.batch_size * args.batches_per_allreduce
train_loader = torch.utils.data.DataLoader(dataset, batch_size=allreduce_batch_size, sampler=train_sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

# a step's batch is so many times that of a single pass of a single rank
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * args.batches_per_allreduce * hvd.size(), momentum=args.momentum
)

optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)

# the broadcasts below bring to the other ranks what rank 0 restores
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])

hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def adjust_learning_rate(epoch, batch_idx):
    """For the first epochs the rate rises from that of one rank to that of all."""
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    elif epoch < 3:
        lr_adj = 1.0
    else:
        lr_adj = 1e-1
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch):
    """Loss and accuracy, the means over ranks and passes."""
    train_sampler.set_epoch(epoch)
    metrics = []
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            data_batch, target_batch = (each[i : i + args.batch_size] for each in (data, target))
            output = model(data_batch)
            loss = F.cross_entropy(output, target_batch)
            accuracy = (output.argmax(dim=1) == target_batch).float().mean()
            metrics.append(hvd.allreduce(torch.stack([loss.detach(), accuracy]), name="metrics"))
            # passes are summed, and the mean is wanted
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    return torch.stack(metrics).mean(0).tolist()


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


if hvd.rank() == 0 and resume_from_epoch:
    print(f"resuming after epoch {resume_from_epoch}")
for epoch in range(resume_from_epoch, args.epochs):
    loss, right = train(epoch)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1} loss {loss:.4f}, accuracy {right:.3f}")
    save_checkpoint(epoch)

if hvd.rank() == 0:
    print(f"sum of parameters {sum(each.sum().item() for each in model.parameters()):.6f}")
