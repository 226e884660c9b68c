"""What bench/memory.py starts as a job of its own for each row: one way to average gradients. Not started by hand.

Each rank writes to FOLDER/RANK.json what it has in memory. Imports stand where they are used: they take memory, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from models import MODELS

STEPS = 5
PERIOD = 61
PIECE = 1024 * PERIOD
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files there are memory
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ ([0-9a-f]+) \S+ (\d+) +(.*)")


class Way(NamedTuple):
    """One way to average."""

    step: Callable[[], object]
    results: Callable[[], Sequence[Any]]
    """The averages, in the order of the arrays; empty where nothing is communicated."""


def period(tensor: int, rank: int) -> Any:
    """The elements of a tensor on a rank, of which the others are repetitions."""
    return ((np.arange(PERIOD) + 7 * tensor + 3 * rank) % 127).astype(np.float32)


def fill(arrays: Sequence[Any]) -> None:
    """Known data, written in pieces that take no memory to speak of."""
    for tensor, array in enumerate(arrays):
        flat = array.reshape(-1)
        for low in range(0, flat.size, PIECE):
            part = flat[low : low + PIECE]
            part[:] = np.resize(period(tensor, RANK), part.size)


def wrong(averages: Sequence[Any]) -> int:
    """Elements that are not the average, computed apart."""
    expected = (np.mean([period(tensor, rank) for rank in range(SIZE)], axis=0) for tensor in range(len(averages)))
    return sum(
        int((np.abs(found.reshape(-1) - np.resize(each, found.size)) > 1e-4).sum())
        for found, each in zip(averages, expected, strict=False)
    )


def alone(arrays: Sequence[Any]) -> Way:
    """Without communication."""
    return Way(lambda: None, list)


def initialised(arrays: Sequence[Any]) -> Way:
    """Nothing after init()."""
    import ringreduce as rr

    rr.init()
    return Way(lambda: None, list)


def by_name(arrays: Sequence[Any]) -> Way:
    """Each array is submitted by its name, then all are waited for."""
    import ringreduce as rr

    rr.init()

    def step() -> None:
        for handle in [rr.allreduce_async_(array, name=f"gradient.{k}") for k, array in enumerate(arrays)]:
            rr.synchronize(handle)

    return Way(step, lambda: arrays)


def grouped(arrays: Sequence[Any]) -> Way:
    """All arrays in one call."""
    import ringreduce as rr

    rr.init()
    return Way(lambda: rr.grouped_allreduce_(arrays, name="all"), lambda: arrays)


def packed(arrays: Sequence[Any]) -> Way:
    """Pack, one MPI_Allreduce, unpack."""
    from mpi4py import MPI

    buffer = np.empty(sum(array.size for array in arrays), np.float32)
    parts = np.split(buffer, np.cumsum([array.size for array in arrays])[:-1])

    def step() -> None:
        for array, part in zip(arrays, parts, strict=True):
            part[:] = array.reshape(-1)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
        for array, part in zip(arrays, parts, strict=True):
            np.divide(part.reshape(array.shape), SIZE, out=array)

    return Way(step, lambda: arrays)


def model_of(arrays: Sequence[Any]) -> Any:
    """A model of torch whose gradients are these arrays."""
    import torch

    torch.set_num_threads(1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(array.shape) for array in arrays)
            self.gradients = [torch.from_numpy(array) for array in arrays]

        def forward(self) -> Any:
            pairs = zip(self.weights, self.gradients, strict=True)
            return sum(weight.flatten() @ gradient.flatten() for weight, gradient in pairs)

    return Model()


def trained(model: Any, optimizer: Any, called: Any, communicates: bool = True) -> Way:
    """A step of training; `called` is the model, perhaps wrapped."""

    def step() -> None:
        optimizer.zero_grad()
        called().backward()
        optimizer.step()

    return Way(step, lambda: [each.grad.numpy() for each in model.weights] if communicates else [])


def sgd(model: Any) -> Any:
    """An optimizer that keeps nothing."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=1e-3)


def torch_alone(arrays: Sequence[Any]) -> Way:
    """Without communication, and without what torch loads of ringreduce by itself."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    model = model_of(arrays)
    return trained(model, sgd(model), model, communicates=False)


def distributed_optimizer(arrays: Sequence[Any]) -> Way:
    """Ours."""
    import ringreduce.torch as rrt

    rrt.init()
    model = model_of(arrays)
    return trained(model, rrt.DistributedOptimizer(sgd(model), model.named_parameters()), model)


def data_parallel(arrays: Sequence[Any], backend: str) -> Way:
    """DDP, whose buckets are the gradients' memory."""
    import torch

    if backend == "ring":
        import ringreduce.torch.distributed  # noqa: F401
    torch.distributed.init_process_group(backend)
    model = model_of(arrays)
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return trained(model, sgd(model), ddp)


WAYS: dict[str, Callable[[Sequence[Any]], Way]] = {
    "alone": alone,
    "init()": initialised,
    "by name": by_name,
    "grouped": grouped,
    "MPI_Allreduce, packed": packed,
    "torch alone": torch_alone,
    "DistributedOptimizer": distributed_optimizer,
    "DDP ring": lambda arrays: data_parallel(arrays, "ring"),
    "DDP gloo": lambda arrays: data_parallel(arrays, "gloo"),
}


def memory() -> dict[str, Any]:
    """Bytes of this process: its own, those of each file in /dev/shm that it maps, and the most it ever had."""
    private, shared = 0, {}
    inode = path = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := MAPPING.match(line):
            offset, inode, path = found.groups()
        key, *value = line.split()
        if key == "Size:" and path.startswith(SHARED_MEMORY):
            shared[inode] = max(shared.get(inode, 0), int(offset, 16) + (int(value[0]) << 10))
            if os.path.exists(path):  # MPI's have names, and holes; ours have neither
                shared[inode] = os.stat(path).st_blocks * 512
        elif key in ("Private_Clean:", "Private_Dirty:") and not path.startswith(SHARED_MEMORY):
            private += int(value[0]) << 10
    status = Path("/proc/self/status").read_text()
    return {"private": private, "shared": shared, "peak": int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10}


def together(folder: Path, what: str) -> None:
    """Wait until all ranks have come here: what two of them have is no longer shared when one ends."""
    (folder / f"{RANK}.{what}").touch()
    while len([*folder.glob(f"*.{what}")]) < SIZE:
        time.sleep(0.01)


def main() -> None:
    """Some steps; then look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=WAYS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    arrays = [np.empty(shape, np.float32) for shape in MODELS[options.model]()]
    way = WAYS[options.who](arrays)
    for _ in range(STEPS):
        fill(arrays)
        way.step()
    gc.collect()
    together(options.folder, "ready")
    found = memory()
    together(options.folder, "measured")
    found["wrong"] = wrong(way.results())
    (options.folder / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
