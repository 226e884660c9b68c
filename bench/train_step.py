"""One training step: what communication adds to a step's computing, ours beside DDP on gloo.

    ringrun -np 2 python bench/train_step.py
    ringrun -np 2 python bench/train_step.py --batches 1 4 --json train_step.json --plot train_step.png

The transformer of examples/train_gpt.py with 10.9 M parameters (width 384, 6 blocks, 6 heads, 256 bytes of context),
one thread a rank. A step is forward, backward, SGD with momentum. Each rank has its own sequences; a batch is what one
rank takes. Rows:

    compute alone       all ranks take the step at the same time, and nothing is communicated
    compute, barrier    the same, and between backward and the update all ranks wait for the slowest
    one copy            the same, and all ranks copy their gradients once at the same time: what nobody can do without
    ringreduce          optimizer = ringreduce.torch.DistributedOptimizer(...)
    grouped by hand     ringreduce.grouped_allreduce_async_ of all gradients after backward
    MPI_Allreduce       all gradients packed after backward, one MPI_Allreduce of them, divided and unpacked
    DDP gloo            DistributedDataParallel(model, gradient_as_bucket_view=True)
    DDP ring            the same over the torch.distributed backend "ring"
    Horovod             as ours; measured after all others, since its thread polls

Columns: time of a step (median of several runs, the rows in turns, of the slowest rank); what it adds to computing and
waiting for each other; how much longer it is than computing alone (both medians of the runs' own values, so that a slow
moment of the machine meets both); elements of the gradients that are not the ranks' average, computed apart in float64.
"""

from __future__ import annotations

import argparse
import copy
import functools
import operator
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plots
from common import (
    IN_TURNS,
    Column,
    Report,
    flag,
    in_turns,
    main,
    microseconds,
    neutral,
    rest,
    seconds_per_run,
    total,
)
from contenders import has, missing, ring_group, start_gloo, stop_gloo

import ringreduce as rr

SECONDS_PER_RUN = 1.0
WARM_UP_STEPS = 9  # in the first 8 a DistributedOptimizer reduces nothing while backward runs
ALONE, BARRIER, COPY = "compute alone", "compute, barrier", "one copy"
OURS, BY_HAND, DDP, DDP_RING, HOROVOD = "ringreduce", "grouped by hand", "DDP gloo", "DDP ring", "Horovod"
MPI_NAME = "MPI_Allreduce"
LOCAL = (ALONE, BARRIER, COPY)  # rows without communication
COLUMNS = (
    Column("batch", "batch", "", 6, "d"),
    Column("who", "  who", width=18, left=True),
    Column("parameters", "parameters", "M", 11, ".2f"),
    Column("time_ms", "time", "ms", 9, ".2f"),
    Column("added_ms", "added", "ms", 9, ".2f"),
    Column("overhead_percent", "overhead", "%", 9, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


class Trainee(NamedTuple):
    """A model and how it is trained."""

    model: Any
    optimizer: Any
    between: Callable[[Any], object] = lambda model: None
    """Called with the model between backward and the update."""

    def backward(self, inputs: Any, targets: Any) -> None:
        """Gradients, from none."""
        from torch.nn import functional

        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()).backward()
        self.between(self.model)

    def step(self, inputs: Any, targets: Any) -> None:
        """All of a step."""
        self.backward(inputs, targets)
        self.optimizer.step()


def new_model(quick: bool) -> Any:
    """The same on all ranks."""
    import torch

    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from train_gpt import GPT

    torch.manual_seed(0)
    return GPT(width=32, depth=2, heads=2, context=16) if quick else GPT(width=384, depth=6, heads=6, context=256)


def optimizer_of(model: Any) -> Any:
    """Cheap, and the same for all."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def trainees(model: Any) -> dict[str, Trainee]:
    """Those who can be measured side by side in one process, from equal parameters."""
    import torch

    import ringreduce.torch as rrt

    alone, barrier, copied, ours, by_hand, by_mpi, ddp, ddp_ring = (copy.deepcopy(model) for _ in range(8))
    start_gloo()
    wrap = functools.partial(torch.nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
    distributed = rrt.DistributedOptimizer(optimizer_of(ours), named_parameters=ours.named_parameters())
    return {
        ALONE: Trainee(alone, optimizer_of(alone)),
        BARRIER: Trainee(barrier, optimizer_of(barrier), lambda _: rest()),
        COPY: Trainee(copied, optimizer_of(copied), copy_gradients),
        OURS: Trainee(ours, distributed),
        BY_HAND: Trainee(by_hand, optimizer_of(by_hand), reduce_by_hand),
        MPI_NAME: Trainee(by_mpi, optimizer_of(by_mpi), reduce_by_mpi),
        DDP: Trainee(wrap(ddp), optimizer_of(ddp)),
        DDP_RING: Trainee(wrap(ddp_ring, process_group=ring_group()), optimizer_of(ddp_ring)),
    }


def gradients_in(model: Any) -> list[Any]:
    """Those of all parameters."""
    return [parameter.grad for parameter in model.parameters()]


def copy_gradients(model: Any) -> None:
    """Once, by all ranks at the same time, into memory of their own."""
    gradients = gradients_in(model)
    targets = memory_for(model)
    rest()
    for gradient, target in zip(gradients, targets, strict=True):
        target.copy_(gradient)


@functools.cache
def memory_for(model: Any) -> list[Any]:
    """As much as the model's gradients need."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def reduce_by_hand(model: Any) -> None:
    """What a user writes who has no DistributedOptimizer."""
    rr.synchronize(rr.grouped_allreduce_async_(gradients_in(model), name="gradients"))


def reduce_by_mpi(model: Any) -> None:
    """What a user of mpi4py writes, and Horovod does on CPUs: one packed buffer."""
    from mpi4py import MPI

    targets, packed = packed_for(model)
    for gradient, target in zip(gradients_in(model), targets, strict=True):
        target.copy_(gradient)
    neutral().Allreduce(MPI.IN_PLACE, packed.numpy())
    packed /= neutral().size
    for gradient, target in zip(gradients_in(model), targets, strict=True):
        gradient.copy_(target)


@functools.cache
def packed_for(model: Any) -> tuple[list[Any], Any]:
    """A place for each gradient in one buffer, and the buffer."""
    import torch

    parameters = list(model.parameters())
    packed = torch.zeros(sum(each.numel() for each in parameters))
    parts = packed.split([each.numel() for each in parameters])
    return [part.view_as(each) for part, each in zip(parts, parameters, strict=True)], packed


def hook_us(count: int) -> float:
    """What a hook of ours adds to backward, of `count` parameters of one element."""
    import torch

    import ringreduce.torch as rrt

    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(count)]

    def seconds() -> float:
        loss = torch.cat(parameters).sum()
        start = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - start
        for parameter in parameters:
            parameter.grad = None
        return took

    without = min(seconds() for _ in range(10))
    distributed = rrt.DistributedOptimizer(torch.optim.SGD(parameters))
    distributed._reducer._at_the_end = distributed._reducer._computed.clear  # which is no part of a hook
    return (min(seconds() for _ in range(10)) - without) / count * 1e6


def horovod_trainee(model: Any) -> dict[str, Trainee]:
    """Horovod, started, beside computing alone once more."""
    import horovod.torch as hvd

    hvd.init()
    alone, theirs = copy.deepcopy(model), copy.deepcopy(model)
    distributed = hvd.DistributedOptimizer(optimizer_of(theirs), named_parameters=theirs.named_parameters())
    return {ALONE: Trainee(alone, optimizer_of(alone)), HOROVOD: Trainee(theirs, distributed)}


def batch_of(count: int, context: int) -> tuple[Any, Any]:
    """Bytes of this rank's own, and those to predict."""
    import torch

    generator = torch.Generator().manual_seed(1000 + neutral().rank)
    sequences = torch.randint(256, (count, context + 1), generator=generator)
    return sequences[:, :-1], sequences[:, 1:]


def gradients_of(trainee: Trainee, batch: tuple[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """After one backward, in float64; those of a DistributedOptimizer are there when it is synchronized."""
    trainee.backward(*batch)
    is_distributed = hasattr(trainee.optimizer, "synchronize")
    if is_distributed:
        trainee.optimizer.synchronize()
    found = [parameter.grad.cpu().numpy().astype(np.float64) for parameter in trainee.model.parameters()]
    if is_distributed:
        with trainee.optimizer.skip_synchronize():
            trainee.optimizer.step()
    return found


def averages(model: Any, batch: tuple[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The gradients of `model`, averaged over the ranks by MPI in float64: what all must get."""
    from mpi4py import MPI

    expected = gradients_of(Trainee(model, optimizer_of(model)), batch)
    for array in expected:
        neutral().Allreduce(MPI.IN_PLACE, array)
        array /= neutral().size
    return expected


def wrong_elements(trainee: Trainee, batch: tuple[Any, Any], expected: Sequence[np.ndarray[Any, Any]]) -> int:
    """Gradients of all ranks that differ from `expected` by more than rounding."""
    found = gradients_of(trainee, batch)
    pairs = zip(found, expected, strict=True)
    return total(sum(int((np.abs(a - b) > 1e-5 * np.abs(b) + 1e-7).sum()) for a, b in pairs))


def measured(compared: dict[str, Trainee], batch: tuple[Any, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What stands in the rows of one batch."""
    for name, trainee in compared.items():
        for _ in range(1 if name in LOCAL else WARM_UP_STEPS):
            trainee.step(*batch)
    actions = {name: lambda trainee=trainee: trainee.step(*batch) for name, trainee in compared.items()}
    times = in_turns(actions, options.runs, seconds_per_run(options, SECONDS_PER_RUN))
    found = {}
    for name, each in times.items():
        row = microseconds(each)
        ratio = statistics.median(map(operator.truediv, each, times[ALONE]))
        row["overhead_percent"] = None if name == ALONE else 100 * (ratio - 1)
        if name not in (ALONE, BARRIER) and BARRIER in times:
            added = microseconds(list(map(operator.sub, each, times[BARRIER])))
            row |= {"added_ms": added["time_us"] / 1e3, "added_runs_us": added["runs_us"]}
        found[name] = row
    return found


def compare(report: Report, who: Any, options: argparse.Namespace) -> None:
    """All batches: first the gradients, while all parameters are equal, then the times."""
    model = new_model(options.quick)
    count = sum(parameter.numel() for parameter in model.parameters())
    for number in options.batches:
        batch = batch_of(number, model.position.num_embeddings)
        expected = averages(copy.deepcopy(model), batch)
        compared = who(model)
        if options.only:
            compared = {name: each for name, each in compared.items() if name in (*LOCAL, *options.only)}
        wrong = {
            name: wrong_elements(trainee, batch, expected) for name, trainee in compared.items() if name not in LOCAL
        }
        for name, row in measured(compared, batch, options).items():
            if who is trainees or name != ALONE:
                row |= {"batch": number, "who": f"  {name}", "parameters": count / 1e6, "wrong": wrong.get(name)}
                report.add({**row, "time_ms": row["time_us"] / 1e3})


def plot(report: Report, path: str) -> None:
    """Bars from zero: computing, and on top of it what communication adds."""
    batches = list(dict.fromkeys(row["batch"] for row in report.rows))
    figure, axes = plots.canvas(1, len(batches), (5.5 * len(batches), 3.4))
    for panel, batch in zip(axes[0], batches, strict=True):
        rows = [{**row, "who": row["who"].strip()} for row in report.rows if row["batch"] == batch]
        names = [row["who"] for row in rows]
        alone, colour = rows[0]["time_ms"], plots.colours(names)
        panel.barh(names, [min(alone, row["time_ms"]) for row in rows], color="0.75")
        panel.barh(
            names, [max(0, row["time_ms"] - alone) for row in rows], left=alone, color=[colour[n] for n in names]
        )
        for place, row in enumerate(rows):
            more = "" if row["overhead_percent"] is None else f" ({row['overhead_percent']:+.1f} %)"
            panel.text(max(alone, row["time_ms"]), place, f" {row['time_ms']:.0f} ms{more}", va="center", fontsize=8)
        panel.invert_yaxis()
        panel.set(xlim=(0, 1.45 * max(row["time_ms"] for row in rows)), xlabel="ms a step, lower is better")
        panel.set_title(f"{batch} sequence{'s' * (batch > 1)} a rank", fontsize=10)
        if panel is not axes[0][0]:
            panel.set_yticklabels([])
    header, parameters = report.header, report.rows[0]["parameters"]
    title = f"A training step, {header['ranks']} ranks with one thread each, GPT of {parameters:.1f} M parameters"
    plots.finish(figure, title, header, path)


def bench(options: argparse.Namespace, report: Report) -> None:
    """Measure batch by batch."""
    compare(report, trainees, options)
    hook = hook_us(2000)  # on all ranks
    report.say(f"# a hook takes {hook:.1f} us")
    if has("horovod"):
        compare(report, horovod_trainee, options)
    stop_gloo()


if __name__ == "__main__":
    flags = [
        flag("--only", None, nargs="+", metavar="NAME", help="these rows, and those without communication"),
        flag("--batches", [1, 4], [1], metavar="N", help="sequences of a rank (1 4)"),
    ]
    note = IN_TURNS + missing()
    main("train_step", __doc__, COLUMNS, bench, flags, runs=9, note=note, in_job=True, with_torch=True, plot=plot)
