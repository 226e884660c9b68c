"""A ResNet in PyTorch, in bfloat16, data-parallel: on handwritten digits, or on random images to see how fast it is.

    ringrun -np 2 python examples/torch_resnet.py
    ringrun -np 8 python examples/torch_resnet.py --synthetic    # ResNet-18, 224 x 224 pixels: images per second

Needs torch and scikit-learn. Each rank trains on its GPU where there is one. Parameters stay in float32; convolutions
compute in bfloat16, and gradients travel in it.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringreduce.torch as hvd

TRAIN = 1500  # of the 1797 digits


class Block(nn.Module):
    """Two convolutions, to which what came in is added; He et al., 2015."""

    def __init__(self, into, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.skip = nn.Identity()
        if into != out:
            self.skip = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        """(batch, into, height, width) to (batch, out, height / stride, width / stride)."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.skip(x))


def resnet(stem, widths, classes):
    """Two blocks of each width after the stem; all widths but the first begin with a stride of 2."""
    layers, into = [*stem], widths[0]
    for width in widths:
        layers += [Block(into, width, 1 + (into != width)), Block(width, width, 1)]
        into = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, classes))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--synthetic", action="store_true", help="random images, and no accuracy")
parser.add_argument("--pixels", type=int, default=224, help="of a random image's side (%(default)s)")
parser.add_argument("--batch", type=int, default=32, help="images per step, of each rank (%(default)s)")
parser.add_argument("--epochs", type=int, default=5, help="(%(default)s)")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)  # the same parameters to begin with, however many ranks
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # init() has selected this rank's GPU
shares = 1 if args.synthetic else hvd.size()  # random images are each rank's own
if args.synthetic:
    images = torch.rand(8 * args.batch, 3, args.pixels, args.pixels)
    labels = torch.randint(1000, (len(images),))
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = resnet(stem, [64, 128, 256, 512], 1000).to(device)
else:
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16  # pixels are 0 to 16
    model = resnet([nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()], [16, 32], 10).to(device)
count = len(images) if args.synthetic else TRAIN
dataset = TensorDataset(images[:count], labels[:count])
sampler = DistributedSampler(dataset, num_replicas=shares, rank=hvd.rank() % shares)
loader = DataLoader(dataset, args.batch, sampler=sampler, drop_last=True)

hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05 * hvd.size(), total_steps=args.epochs * len(loader))
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.bf16)

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)  # another order
    began_s, total = time.perf_counter(), 0.0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.item()
    loss = hvd.allreduce(torch.tensor(total / len(loader)), name="loss")
    rate = len(loader) * args.batch * hvd.size() / (time.perf_counter() - began_s)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1} of {args.epochs}, on {device}: loss {loss:.4f}, {rate:,.0f} images/s", flush=True)

if not args.synthetic:
    model.eval()  # by means and variances that each rank has seen: those of rank 0 count
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    share = slice(TRAIN + hvd.rank(), None, hvd.size())
    with torch.no_grad():
        right = (model(images[share].to(device)).argmax(1).cpu() == labels[share]).sum()
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    if hvd.rank() == 0:
        print(f"test accuracy: {right / (len(images) - TRAIN):.3f}")
