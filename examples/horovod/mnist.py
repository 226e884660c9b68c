"""Handwritten digits, in the manner of Horovod's MNIST example for PyTorch.

ringrun -np 2 python examples/horovod/mnist.py
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed
from sklearn.datasets import load_digits

import ringreduce.torch as hvd  # before: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60, help="of one rank")
parser.add_argument("--test-batch-size", type=int, default=100)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in 16 bits")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--log-interval", type=int, default=4, help="steps between two lines")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()


def loader_of(images, labels, batch_size):
    """Every rank sees its own part of the images."""
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    context = "forkserver" if args.workers else None  # not every fabric survives a fork
    options = {"num_workers": args.workers, "multiprocessing_context": context}
    return sampler, torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler, **options)


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)  # another order
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            loss = metric_average(loss.item(), "loss")
            if hvd.rank() == 0:
                print(f"epoch {epoch} step {batch_idx} of {len(train_loader)} loss {loss:.4f}")


def test():
    model.eval()
    test_loss, test_accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += (output.argmax(dim=1) == target).sum().item()
    # len(test_sampler) is this rank's number of images
    test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
    test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test set: average loss {test_loss:.4f}, accuracy {100.0 * test_accuracy:.2f} %")


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(42 + hvd.rank())  # the ranks start differently; the broadcast makes them alike
    torch.set_num_threads(1)

    digits = load_digits()
    images, labels = torch.Tensor(digits.images).unsqueeze(1), torch.tensor(digits.target)
    images = (images - images.mean()) / images.std()
    train_sampler, train_loader = loader_of(images[:1440], labels[:1440], args.batch_size)
    test_sampler, test_loader = loader_of(images[1440:1788], labels[1440:1788], args.test_batch_size)

    model = Net()
    # an average over more ranks bears a longer step; Adasum's result is long enough by itself
    lr_scaler = hvd.size() if not args.use_adasum else 1
    optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)

    # all ranks start as rank 0 does
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()
    if hvd.rank() == 0:
        print(f"sum of parameters {sum(each.sum().item() for each in model.parameters()):.6f}")
