"""One training step on GPUs: what communication adds to a step's computing, ours beside DistributedDataParallel.

    ringrun -np 2 python bench/gpu/train_step.py                                  # one GPU a rank, or all on one
    ringrun -np 2 python bench/gpu/train_step.py --models convolutional --json train_step.json

A step is forward, backward, SGD with momentum, and the end of all work on the GPU. The models:

    convolutional    12 convolutions with batch norms, 7.9 M parameters, 64 images of 64 x 64 a rank
    transformer      examples/train_gpt.py, 10.9 M parameters, 16 sequences of 256 bytes a rank

Rows:

    compute alone    all ranks take the step at the same time, and nothing is communicated
    ringreduce       optimizer = ringreduce.torch.DistributedOptimizer(...): gradients travel while backward goes on
    DDP nccl         DistributedDataParallel(model, gradient_as_bucket_view=True), where each rank has its own GPU
    DDP gloo         the same over gloo, where ranks share one, which NCCL refuses

Columns: time of a step (median of several runs, the rows in turns, of the slowest rank); how much longer it is than
computing alone (the median of the runs' own ratios); elements of the gradients that are not the ranks' average,
computed apart: further from it than a thousandth of the tensor's largest, since a GPU rounds otherwise from run to run.

Skipped, with the reason and exit code 0, where a rank has no GPU, or no torch with CUDA.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: what all benches share, and its own train_step

import numpy as np
from common import Column, Report, about, is_printing, neutral, parse, parser, total
from contenders import start_gloo, stop_gloo
from gpus import about_gpu, place, why_not
from train_step import ALONE, OURS, Trainee, averages, batch_of, gradients_of, measured, new_model, optimizer_of

import ringreduce as rr

TOLERANCE = 1e-3
IMAGES, SIDE, CLASSES = 64, 64, 100
SEQUENCES = 16
COLUMNS = (
    Column("model", "model", width=14, left=True),
    Column("who", "  who", width=18, left=True),
    Column("parameters", "parameters", "M", 11, ".2f"),
    Column("time_ms", "time", "ms", 9, ".2f"),
    Column("overhead_percent", "overhead", "%", 9, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
MODELS = ("convolutional", "transformer")


class GpuTrainee(Trainee):
    """A model and how it is trained; a step is over when the GPU is done."""

    def step(self, inputs: Any, targets: Any) -> None:
        """All of a step."""
        import torch

        super().step(inputs, targets)
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__, runs=9)
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(both)")
    return parse(made)


def torch_why_not() -> str:
    """What is missing for torch on a GPU; empty: nothing."""
    if reason := why_not():
        return reason
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; pip install torch"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def convolutional(quick: bool) -> Any:
    """A plain net of convolutions, each with a batch norm; many small gradients and some large ones, as in ResNets."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[Any] = []
    channels = 3
    for width in (8, 16) if quick else (64, 128, 256, 512):
        for stride in (2, 1, 1):
            layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
    # one position a picture, so that its loss is that of a transformer with one
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES), nn.Unflatten(1, (1, CLASSES))]
    return nn.Sequential(*layers, *head)


def pictures(count: int) -> tuple[Any, Any]:
    """Noise of this rank's own, and a class for each."""
    import torch

    generator = torch.Generator().manual_seed(1000 + neutral().rank)
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return images, torch.randint(CLASSES, (count, 1), generator=generator)


def model_and_batch(name: str, quick: bool) -> tuple[Any, tuple[Any, Any]]:
    """On this rank's GPU."""
    if name == "convolutional":
        model, batch = convolutional(quick), pictures(2 if quick else IMAGES)
    else:
        model = new_model(quick)
        batch = batch_of(1 if quick else SEQUENCES, model.position.num_embeddings)
    return model.cuda(), (batch[0].cuda(), batch[1].cuda())


def trainees(model: Any, backend: str) -> dict[str, GpuTrainee]:
    """Those who are measured side by side, from equal parameters."""
    import torch

    import ringreduce.torch as rrt

    alone, ours, ddp = (copy.deepcopy(model) for _ in range(3))
    start_gloo()
    group = torch.distributed.new_group(backend=backend)
    parallel = torch.nn.parallel.DistributedDataParallel(ddp, process_group=group, gradient_as_bucket_view=True)
    distributed = rrt.DistributedOptimizer(optimizer_of(ours), named_parameters=ours.named_parameters())
    return {
        ALONE: GpuTrainee(alone, optimizer_of(alone)),
        OURS: GpuTrainee(ours, distributed),
        f"DDP {backend}": GpuTrainee(parallel, optimizer_of(ddp)),
    }


def wrong_elements(trainee: Trainee, batch: tuple[Any, Any], expected: Sequence[np.ndarray[Any, Any]]) -> int:
    """Gradients of all ranks that are not `expected`."""
    pairs = zip(gradients_of(trainee, batch), expected, strict=True)
    return total(sum(int((np.abs(a - b) > TOLERANCE * np.abs(b).max()).sum()) for a, b in pairs))


def compare(report: Report, name: str, backend: str, options: argparse.Namespace) -> None:
    """One model: first the gradients, while all parameters are equal, then the times."""
    model, batch = model_and_batch(name, options.quick)
    count = sum(parameter.numel() for parameter in model.parameters())
    expected = averages(copy.deepcopy(model), batch)
    compared = trainees(model, backend)
    wrong = {who: wrong_elements(each, batch, expected) for who, each in compared.items() if who != ALONE}
    for who, row in measured(compared, batch, options).items():
        row |= {"model": name, "who": f"  {who}", "parameters": count / 1e6, "wrong": wrong.get(who)}
        report.add({**row, "time_ms": row["time_us"] / 1e3})


def main() -> None:
    """Measure model by model."""
    options = arguments()
    reason = next(filter(None, neutral().allgather(torch_why_not())), "")
    if reason:
        if is_printing():
            print(f"bench/gpu/train_step.py: skipped: {reason}")
        return
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    rr.init()
    places = neutral().allgather((os.uname().nodename, place()))
    backend = "nccl" if len(set(places)) == len(places) and torch.distributed.is_nccl_available() else "gloo"
    header = {**about_gpu(), "gpus": len(set(places)), **about(hosts=len(set(rr.info().hosts)))}
    note = f"median of {options.runs} runs, the rows in turns, of the slowest rank"
    report = Report("gpu/train_step", header, COLUMNS, is_printing(), note)
    for name in options.models:
        compare(report, name, backend, options)
    stop_gloo()
    report.finish(options)


if __name__ == "__main__":
    main()
