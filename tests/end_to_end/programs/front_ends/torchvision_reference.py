"""The shape of torchvision's reference for classification: init_distributed_mode, sums of all ranks, EMA, BatchNorm."""

import os

import torch
import torch.distributed as dist
from torch import nn


def init_distributed_mode():
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise SystemExit("Not using distributed mode")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="gloo", init_method="env://", world_size=world_size, rank=rank)
    dist.barrier()


def reduce_across_processes(value):
    t = torch.tensor(value)
    dist.barrier()
    dist.all_reduce(t)
    return t


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        def average(old, new, _):
            return decay * old + (1 - decay) * new

        super().__init__(model, avg_fn=average, use_buffers=True)


def train_one_epoch(model, criterion, optimizer, loader, model_ema):
    model.train()
    total, count = 0.0, 0
    for image, target in loader:
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model_ema.update_parameters(model)
        total, count = total + loss.item(), count + len(image)
    return reduce_across_processes([total, count])


init_distributed_mode()
torch.manual_seed(1)
images, labels = torch.rand(48, 3, 8, 8), torch.randint(0, 4, (48,))
dataset = torch.utils.data.TensorDataset(images, labels)
sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
model = nn.Sequential(
    nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
model_ema = ExponentialMovingAverage(model, decay=0.9)
ddp = nn.parallel.DistributedDataParallel(model)
for epoch in range(3):
    sampler.set_epoch(epoch)
    seen = train_one_epoch(ddp, criterion, optimizer, loader, model_ema)
    scheduler.step()
assert seen[1] == len(dataset), "each image once an epoch, on whichever rank"
if dist.get_rank() == 0:
    torch.save({"model": ddp.module.state_dict(), "model_ema": model_ema.state_dict()}, "checkpoint.pth")
dist.destroy_process_group()
