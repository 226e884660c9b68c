"""Who takes part when many tensors are averaged, as after a backward: ours, the peers that this machine has, the floor.

All work on the same gradients, in backward's order, each tensor in memory of its own. A Reducer's `run` is timed; its
`results` are checked after one more run on data that is known.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from common import neutral, parse
from contenders import has, ring_group, start_gloo
from fused_window import fused_window
from models import MODELS, Shape

import ringreduce as rr
from ringreduce.kernels import native

NUMPY, TORCH, GROUPED = "ringreduce, NumPy", "ringreduce, torch", "ringreduce, grouped"
UNCOMPILED = "ringreduce, no compiler"
DDP, DDP_RING, ALONE, HOROVOD = "DDP gloo", "DDP ring", "its backward alone", "Horovod"
WINDOW = "fused window, simplest"
PACKED, ONE_BY_ONE, FLOOR = "MPI_Allreduce, packed", "MPI_Allreduce, each", "floor: one copy"
HOROVODS_WAY, WIRE = "Horovod's way", "floor: raw TCP"
PIECE, PERIOD = 1 << 20, 61


def arguments(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line of a bench of models' gradients."""
    made.add_argument("--models", nargs="+", choices=MODELS, default=None, help="(resnet50 gpt2)")
    options = parse(made)
    options.models = options.models or (["tiny"] if options.quick else ["resnet50", "gpt2"])
    return options


class Reducer(NamedTuple):
    """One contender."""

    run: Callable[[], object]
    results: Callable[[], Sequence[np.ndarray[Any, Any]]]
    """The reduced tensors, in the order of the gradients."""
    averages: bool = True
    """It averages; else it sums."""


class Gradients:
    """The gradients of a model on this rank, float32, in the order in which backward delivers them."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = list(reversed(shapes))
        self.arrays = [np.zeros(shape, np.float32) for shape in self.shapes]
        self.names = [f"gradient.{k}" for k in range(len(self.arrays))]
        counts = [math.prod(shape) for shape in self.shapes]
        self.packed = np.zeros(sum(counts), np.float32)
        self.views = [
            part.reshape(shape)
            for part, shape in zip(np.split(self.packed, np.cumsum(counts)[:-1]), self.shapes, strict=True)
        ]
        self.fill()

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return self.packed.nbytes

    def fill(self) -> None:
        """Known data, also packed: another small whole number on each rank, in each tensor, at each index."""
        for number, array in enumerate(self.arrays):
            flat = array.reshape(-1)
            for low in range(0, flat.size, PIECE):
                flat[low : low + PIECE] = known(low, min(PIECE, flat.size - low), number, neutral().rank)
        self.pack()

    def pack(self) -> None:
        """Copy all gradients once: what no fused all-reduce through memory can do without."""
        for view, array in zip(self.views, self.arrays, strict=True):
            np.copyto(view, array)

    def wrong(self, reducer: Reducer) -> int:
        """Elements of this rank that are not what `reducer` must make of `fill`, computed apart, in float64."""
        self.fill()
        reducer.run()
        size, found = neutral().size, 0
        for number, array in enumerate(reducer.results()):
            flat = array.reshape(-1)
            for low in range(0, flat.size, PIECE):
                part = flat[low : low + PIECE].astype(np.float64)
                summed = np.add.reduce([period(low, number, rank) for rank in range(size)]).astype(np.float64)
                expected = np.resize(summed / size if reducer.averages else summed, part.size)
                found += int((np.abs(part - expected) > 1e-6 * np.abs(expected)).sum())
        return found


def known(low: int, count: int, tensor: int, rank: int) -> np.ndarray[Any, Any]:
    """Elements low, low + 1 ... of a tensor on a rank."""
    return np.resize(period(low, tensor, rank), count)


def period(low: int, tensor: int, rank: int) -> np.ndarray[Any, Any]:
    """The first of them, of which the others are repetitions."""
    return (np.arange(low, low + PERIOD) % PERIOD + 7 * tensor + 3 * rank) % 127


def reducers(gradients: Gradients) -> dict[str, Reducer]:
    """All that can be measured side by side in one process."""
    found = {NUMPY: ours(gradients, rr, gradients.arrays)}
    if native.module is not None:
        found[UNCOMPILED] = uncompiled(found[NUMPY])
    if has("torch"):
        import torch

        import ringreduce.torch as rrt

        found[TORCH] = ours(gradients, rrt, [torch.from_numpy(array) for array in gradients.arrays])
        found |= data_parallel(gradients)
    found[PACKED] = packed(gradients)
    found[HOROVODS_WAY] = horovods_way(gradients)
    flat = [each.reshape(-1) for each in gradients.arrays]
    if len(set(rr.info().hosts)) == 1:
        found[WINDOW] = Reducer(fused_window(flat), lambda: gradients.arrays, averages=False)
    else:
        found[WIRE] = wire(gradients)
    found[FLOOR] = Reducer(gradients.pack, lambda: gradients.views)
    return found


def ours(gradients: Gradients, library: Any, tensors: Sequence[Any]) -> Reducer:
    """What DistributedOptimizer does: submit each by its name as it comes, then wait for all. Horovod's API too."""

    def run() -> None:
        handles = [
            library.allreduce_async_(tensor, name=name, op=library.Average)
            for tensor, name in zip(tensors, gradients.names, strict=True)
        ]
        for handle in handles:
            library.synchronize(handle)

    return Reducer(run, lambda: gradients.arrays)


def uncompiled(reducer: Reducer) -> Reducer:
    """As where no compiler was there to install ringreduce."""

    def run() -> None:
        module, native.module = native.module, None
        reducer.run()
        native.module = module

    return reducer._replace(run=run)


def grouped(gradients: Gradients) -> Reducer:
    """All tensors in one call."""
    return Reducer(lambda: rr.grouped_allreduce_(gradients.arrays, name="all"), lambda: gradients.arrays)


def packed(gradients: Gradients) -> Reducer:
    """One MPI_Allreduce of one buffer; packing and dividing are not counted, which makes it the harder comparison."""
    from mpi4py import MPI

    return Reducer(lambda: neutral().Allreduce(MPI.IN_PLACE, gradients.packed), lambda: gradients.views, averages=False)


def horovods_way(gradients: Gradients) -> Reducer:
    """On CPUs, as published: pack, one MPI_Allreduce, divide, unpack; without its agreement and its thread."""
    from mpi4py import MPI

    def run() -> None:
        gradients.pack()
        neutral().Allreduce(MPI.IN_PLACE, gradients.packed)
        np.multiply(gradients.packed, np.float32(1 / neutral().size), out=gradients.packed)
        for view, array in zip(gradients.views, gradients.arrays, strict=True):
            np.copyto(array, view)

    return Reducer(run, lambda: gradients.arrays)


def wire(gradients: Gradients) -> Reducer:
    """A raw stream from the first host to the second, of as many bytes as each host must send at least."""
    from hosts_worker import RawStreams

    raw = RawStreams()
    hosts = len(raw.leaders)
    return Reducer(lambda: raw.one(2 * (hosts - 1) * gradients.nbytes // hosts), lambda: ())


def one_by_one(gradients: Gradients) -> Reducer:
    """An MPI_Allreduce for each tensor."""
    from mpi4py import MPI

    def run() -> None:
        for array in gradients.arrays:
            neutral().Allreduce(MPI.IN_PLACE, array)

    return Reducer(run, lambda: gradients.arrays, averages=False)


def data_parallel(gradients: Gradients) -> dict[str, Reducer]:
    """DDP over gloo and over ring, and what to subtract from their times: the same backward without DDP.

    The model's backward computes nothing: parameter by parameter, from the last to the first, it hands over gradients
    that are there already. torch takes them over without a copy, so a step is submission, buckets and communication.
    """
    import torch

    start_gloo()
    groups = {DDP: torch.distributed.group.WORLD, DDP_RING: ring_group()}
    wrap = functools.partial(torch.nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
    models = {name: wrap(delivering(gradients), process_group=group) for name, group in groups.items()}
    models[ALONE] = delivering(gradients)

    def step(module: Any) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad()
            module().backward()

        return run

    def results(module: Any) -> Callable[[], list[np.ndarray[Any, Any]]]:
        return lambda: [parameter.grad.numpy() for parameter in reversed(list(module.parameters()))]

    # DDP makes its buckets anew after the first backward, in the order in which gradients came
    for model in models.values():
        step(model)()
    return {name: Reducer(step(model), results(model)) for name, model in models.items()}


def delivering(gradients: Gradients) -> Any:
    """A module with these gradients. Its parameters lie in the packed buffer, to save memory: nobody reads them."""
    import torch

    class Deliver(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, passed: Any, parameter: Any, gradient: Any) -> Any:
            ctx.gradient = gradient
            return passed.clone()

        @staticmethod
        def backward(ctx: Any, *outputs: Any) -> Any:
            return outputs[0], ctx.gradient.detach(), None  # detached: an object of its own, which torch may keep

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            forward = list(zip(reversed(gradients.views), reversed(gradients.arrays), strict=True))
            self.weights = torch.nn.ParameterList(torch.from_numpy(view) for view, _ in forward)
            self.gradients = [torch.from_numpy(array) for _, array in forward]

        def forward(self) -> Any:
            loss = torch.zeros((), requires_grad=True)
            for weight, gradient in zip(self.weights, self.gradients, strict=True):
                loss = Deliver.apply(loss, weight, gradient)
            return loss

    return Model()


def horovod(gradients: Gradients) -> dict[str, Reducer]:
    """Horovod alone, started."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    return {HOROVOD: ours(gradients, hvd, [torch.from_numpy(array) for array in gradients.arrays])}
