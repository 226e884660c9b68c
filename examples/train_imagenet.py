"""Train a ResNet-50 on ImageNet, or on any folder of images, data-parallel: a program to start your own from.

    ringrun -np 8 python examples/train_imagenet.py --data /data/imagenet
    ringrun -np 8 python examples/train_imagenet.py --data /data/imagenet --resume     # from the last checkpoint
    ringrun -np 8 --elastic python examples/train_imagenet.py --data /data/imagenet    # goes on without failed ranks
    sbatch examples/slurm-gpu.sbatch --data /data/imagenet                             # saves and resumes by itself

    # Without data: from which of two photographs is this crop? A minute on two cores.
    ringrun -np 2 python examples/train_imagenet.py --model resnet18 --pixels 32 --batch 16 --epochs 4 --warmup 1

DIR has train/CLASS/*.jpg and val/CLASS/*.jpg. Needs torch and Pillow; without --data scikit-learn, for its photographs.
Each rank trains on its GPU where there is one. The recipe is that of Goyal et al., "Accurate, Large Minibatch SGD",
2017, in bfloat16, with a cosine schedule and label smoothing.

Order and crops of the images follow from the epoch, and the checkpoint says how far the epoch has come. So a job that
SIGUSR1 stops in the middle of an epoch, and that resumes later, has the loss curve of a job without a break.
"""

import argparse
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ringreduce.torch as hvd

MODELS = {"resnet18": ([2, 2, 2, 2], False), "resnet50": ([3, 4, 6, 3], True)}  # blocks of each stage; bottlenecks?
PARTS = ("model", "optimizer", "sampler")  # of a checkpoint, beside the epoch
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's red, green and blue, which are 0 to 255
STOP = threading.Event()  # SIGUSR1 has come


class Block(nn.Module):
    """Two convolutions, or three as a bottleneck, to which what came in is added; He et al., 2015."""

    def __init__(self, into, width, stride, is_bottleneck):
        super().__init__()
        out = 4 * width if is_bottleneck else width
        convolutions = [(into, width, 3, stride), (width, out, 3, 1)]
        if is_bottleneck:
            convolutions = [(into, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        layers = [layer for each in convolutions for layer in (*convolution(*each), nn.ReLU())]
        self.inner = nn.Sequential(*layers[:-1])
        nn.init.zeros_(self.inner[-1].weight)  # so a block does nothing at first, which lets large batches start well
        self.skip = nn.Identity()
        if stride > 1 or into != out:
            self.skip = nn.Sequential(*convolution(into, out, 1, stride))

    def forward(self, x):
        """(batch, into, height, width) to (batch, out, height / stride, width / stride)."""
        return functional.relu(self.inner(x) + self.skip(x))


def convolution(into, out, kernel, stride):
    """A convolution and its normalization."""
    conv = nn.Conv2d(into, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv, nn.BatchNorm2d(out)


def resnet(depths, is_bottleneck, classes):
    """(batch, 3, height, width) to (batch, classes); as torchvision's resnet50(zero_init_residual=True)."""
    layers, into = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)], 64
    for stage, depth in enumerate(depths):
        for number in range(depth):
            layers.append(Block(into, 64 << stage, 2 if stage and not number else 1, is_bottleneck))
            into = (64 << stage) * (4 if is_bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, classes))


class Images(Dataset):
    """Images of one size with their classes: random crops to train on, or else the middle of each image."""

    def __init__(self, items, pixels, is_training):
        self.items, self.pixels, self.is_training, self.epoch = items, pixels, is_training, 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        """((height, width, 3), class); in bytes, of which a GPU makes floats sooner than floats would get there."""
        image, label = self.items[index]
        image = image if isinstance(image, Image.Image) else Image.open(image).convert("RGB")
        # The same numbers for an epoch and an image: on any rank, in any worker process, and after a break.
        rng = np.random.default_rng([self.epoch, index])
        box = random_box(*image.size, rng) if self.is_training else middle_box(*image.size)
        image = image.resize((self.pixels, self.pixels), Image.Resampling.BILINEAR, box)
        if self.is_training and rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)), label


def random_box(width, height, rng):
    """8 to 100 % of an image, somewhere in it: (left, upper, right, lower)."""
    for _ in range(10):
        area, ratio = width * height * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, upper = rng.uniform(0, width - across), rng.uniform(0, height - down)
            return left, upper, left + across, upper + down
    return middle_box(width, height)


def middle_box(width, height):
    """The square in the middle of an image, 7/8 of its shorter side: (left, upper, right, lower)."""
    side = min(width, height) * 7 / 8
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def read_folder(folder, split):
    """[(file, number of its class)], sorted: ranks must agree on the order, and file systems have none."""
    classes = {path.name: label for label, path in enumerate(sorted((folder / "train").iterdir()))}
    return [(path, classes[path.parent.name]) for path in sorted((folder / split).glob("*/*"))]


def cut_photographs():
    """[(square, 0 or 1)] of scikit-learn's photographs: those of their left to train on, of their right to test."""
    from sklearn.datasets import load_sample_images

    train, val, side = [], [], 128
    for label, photograph in enumerate(load_sample_images().images):
        height, width, _ = photograph.shape
        for upper in range(0, height - side, 32):
            for left in range(0, width - side + 1, 32):
                if left <= 352 or left >= 480:  # so that the two do not overlap
                    square = Image.fromarray(photograph[upper : upper + side, left : left + side])
                    (train if left <= 352 else val).append((square, label))
    return train, val


def batches(data, args, device, **options):
    """A DataLoader. It spawns its workers: a process that has started MPI must not fork."""
    start = {"multiprocessing_context": "spawn"} if args.workers else {}
    return DataLoader(data, args.batch, num_workers=args.workers, pin_memory=device.type == "cuda", **start, **options)


def learning_rate(args, epochs):
    """Follows from the epochs done and from the number of ranks now, which may change: larger batches, larger steps."""
    alone = args.lr * args.batch / 256
    together = alone * hvd.size()
    if epochs < args.warmup:  # large steps at once would diverge
        return alone + (together - alone) * epochs / args.warmup
    return together * (1 + math.cos(math.pi * (epochs - args.warmup) / (args.epochs - args.warmup))) / 2


def scores_of(model, images, device):
    """(batch, height, width, 3) bytes to (batch, classes); computed in bfloat16, from parameters in float32."""
    mean, std = (torch.tensor(each, device=device).view(1, 3, 1, 1) for each in (MEAN, STD))
    # Nothing moves here: decoded images are channels_last already, which is the faster layout for convolutions.
    images = (images.to(device, non_blocking=True).permute(0, 3, 1, 2) - mean) / std
    with torch.autocast(device.type, torch.bfloat16):
        return model(images).float()  # a loss needs more digits


def average_statistics(model):
    """Average what batch normalization has seen on each rank, to validate with it and to save it.

    It changes nothing later, whenever it is done: means of moving averages are moving averages of means.
    """
    hvd.grouped_allreduce_([each for each in model.buffers() if each.is_floating_point()], name="statistics")


@torch.no_grad()
def validate(model, data, args, device):
    """The mean loss and the accuracy over all images, each of which one rank has looked at."""
    model.eval()
    losses = hits = 0
    for images, labels in batches(data, args, device, sampler=range(hvd.rank(), len(data), hvd.size())):
        labels = labels.to(device)
        scores = scores_of(model, images, device)
        losses += functional.cross_entropy(scores, labels, reduction="sum").double()
        hits += (scores.argmax(1) == labels).sum()
    model.train()
    # Sums, not means: some ranks may have one image more than others.
    sums = hvd.allreduce(torch.tensor([losses, hits], dtype=torch.float64), op=hvd.Sum, name="validation")
    return (sums / len(data)).tolist()


def save(state, path):
    """Write the checkpoint, on rank 0 alone, whole or not at all."""
    if hvd.rank() == 0:
        parts = {name: getattr(state, name).state_dict() for name in PARTS}
        torch.save({"epoch": state.epoch, **parts}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


def say(text):
    """Print it, once."""
    if hvd.rank() == 0:
        print(text, flush=True)


def train_epoch(state, args, data, device):
    """Train from where the state is to the end of its epoch; returns True to stop before that."""
    sampler, since, since_s = state.sampler, 0, time.perf_counter()
    loader = batches(data, args, device, sampler=sampler, drop_last=True)
    for number, (images, labels) in enumerate(loader, 1):
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(args, state.epoch + sampler.processed_num / len(data))
        state.optimizer.zero_grad()
        scores = scores_of(state.model, images, device)
        loss = functional.cross_entropy(scores, labels.to(device), label_smoothing=0.1)
        loss.backward()  # gradients are averaged over the ranks while backward still computes others
        state.optimizer.step()
        sampler.record_batch(number, args.batch)
        if number % args.every and number < len(loader):
            continue
        # One call for both: the loss to print, and whether any rank is to stop, so that all stop after the same step.
        loss, stop = hvd.allreduce(torch.tensor([loss.item(), STOP.is_set()]), name="loss").tolist()
        speed = (number - since) * args.batch * hvd.size() / (time.perf_counter() - since_s)
        done = state.epoch + sampler.processed_num / len(data)
        say(f"epoch {done:.3f}: loss {loss:.6f}, {speed:,.0f} images/s on {hvd.size()} ranks")
        if stop:
            return True
        state.commit()  # --elastic: what the others go back to when a rank dies
        since, since_s = number, time.perf_counter()
    return False


@hvd.elastic.run  # begins again, at the last commit, when ranks have died; runs once without --elastic
def train(state, args, data, val, device):
    """Train from where the state is to the last epoch, or until SIGUSR1; save after each epoch and at the stop."""
    while state.epoch < args.epochs:
        data.epoch = state.epoch
        stop = train_epoch(state, args, data, device)
        average_statistics(state.model)
        if stop:
            save(state, args.checkpoint)
            say(f"SIGUSR1: stopped; --resume goes on from {args.checkpoint}")
            return
        loss, accuracy = validate(state.model, val, args, device)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        save(state, args.checkpoint)
        state.commit()
        say(f"epoch {state.epoch} of {args.epochs}: validation loss {loss:.6f}, accuracy {accuracy:.1%}")


def parse():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="images in DIR/train and DIR/val; default: crops of two photographs")
    add("--model", choices=MODELS, default="resnet50", help="(%(default)s)")
    add("--pixels", type=int, default=224, help="width and height of what the network sees (%(default)s)")
    add("--batch", type=int, default=32, help="images per step, of each rank; a large GPU takes 256 (%(default)s)")
    add("--epochs", type=int, default=90, help="(%(default)s)")
    add("--warmup", type=float, default=5, help="epochs in which the learning rate rises (%(default)s)")
    add("--lr", type=float, default=0.1, help="learning rate of 256 images a step; grows in proportion (%(default)s)")
    add("--workers", type=int, default=0, help="processes of each rank that decode images; a GPU needs 4 to 16 (0)")
    add("--every", type=int, default=20, metavar="N", help="print, and commit, after N steps (%(default)s)")
    add("--checkpoint", type=Path, default="imagenet.pt", metavar="FILE", help="written after each epoch (%(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    return parser.parse_args()


def main():
    """Make what is trained, and train."""
    args = parse()
    signal.signal(signal.SIGUSR1, lambda *_: STOP.set())
    hvd.init()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # shapes stay the same
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # init() has selected this rank's GPU
    splits = [read_folder(args.data, split) for split in ("train", "val")] if args.data else cut_photographs()
    data, val = (Images(items, args.pixels, is_training=not number) for number, items in enumerate(splits))
    if len(data) < args.batch * hvd.size():
        sys.exit(f"{len(data)} training images; expected at least {hvd.size()} ranks x --batch {args.batch}")
    model = resnet(*MODELS[args.model], classes=1 + max(label for _, label in data.items))
    model = model.to(device, memory_format=torch.channels_last)
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]  # biases and normalizations do not decay
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=hvd.elastic.ElasticSampler(data), epoch=0)
    restarted = int(os.environ.get("RINGREDUCE_RESTART_COUNT", 0))  # by ringrun --restarts, after a failure
    if (args.resume or restarted) and hvd.rank() == 0 and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        state.epoch = saved["epoch"]  # on rank 0 alone: the others get its state when train() begins
        for name in PARTS:
            getattr(state, name).load_state_dict(saved[name])
    train(state, args, data, val, device)


if __name__ == "__main__":
    main()
