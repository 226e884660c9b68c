"""What bench/slow_wire.py runs on every rank of its hosts; writes what it found as JSON. Not started by hand.

    slow_wire_worker.py '{"who": [...], "seeds": [0], "steps": 400}' FILE    losses, bytes of a step
    slow_wire_worker.py '{"who": [...], "seconds": 10}' FILE                 seconds of a step, on the wire as it is

A rank's data depend on the seed, the step and the rank alone, so two ways see the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import is_printing, neutral, rest, slowest, total
from contenders import start_gloo
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional

import ringreduce.torch as hvd
from ringreduce.optim.reducer import CAUTIOUS_STEPS

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
CONTEXT, SEQUENCES = 64, 4  # of a rank's step: 256 tokens
EVERY = 20  # steps between two looks at the loss
SYNC, LONG_SYNC = 8, 20  # steps of local ways between two means
FRAGMENTS, DELAY = 4, 5
WARM_UP = 20  # steps: the rate rises; local ways average each
HELD_OUT = 12  # each such file of the text is for the losses
LONGER = {"DiLoCo int4": 3}  # as many times the steps of the others: such steps are cheap, and learn less
FEW, MOST = 2, 60  # cycles of steps that are timed


class Trainee(NamedTuple):
    """What a way makes of a model."""

    model: Any
    optimizer: Any
    cycle: int = 1
    """Steps after which all begins again."""


def new_model(seed: int) -> Any:
    """1.06 M parameters, the same on all ranks."""
    torch.manual_seed(seed)
    return GPT(width=128, depth=5, heads=4, context=CONTEXT)


def adamw(model: Any) -> Any:
    """The optimizer of all ways."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def distributed(model: Any, compression: Any = hvd.Compression.none) -> Trainee:
    """Ours, of gradients."""
    wrap = functools.partial(hvd.DistributedOptimizer, named_parameters=model.named_parameters())
    return Trainee(model, wrap(adamw(model), compression=compression))


def local(model: Any, warm_up: int) -> Trainee:
    """Ours, of parameters."""
    return Trainee(model, hvd.LocalSGD(adamw(model), sync_every=SYNC, warmup_steps=warm_up), SYNC)


def streamed(model: Any, warm_up: int) -> Trainee:
    """Ours: DiLoCo's fragments, beside computing."""
    options = {"fragments": FRAGMENTS, "delay": DELAY, "compression": hvd.Compression.int4, "warmup_steps": warm_up}
    return Trainee(model, hvd.DiLoCo(adamw(model), sync_every=LONG_SYNC, **options), LONG_SYNC)


def ddp(model: Any, *hook: Any, **options: Any) -> Trainee:
    """PyTorch's DistributedDataParallel on gloo; hook: its state and itself."""
    start_gloo()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    if hook:
        wrapped.register_comm_hook(*hook)
    return Trainee(wrapped, adamw(model))


def ddp_power(model: Any, rank: int, warm_up: int) -> Trainee:
    """PyTorch's PowerSGD."""
    start_gloo()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=warm_up)
    # with several buckets its second all-reduces begin in another order on each rank, and gloo aborts
    return ddp(model, state, powerSGD_hook.powerSGD_hook, bucket_cap_mb=1000)


def ddp_local(model: Any, warm_up: int) -> Trainee:
    """PyTorch's LocalSGD."""
    start_gloo()
    itself = torch.distributed.new_subgroups(1)[0]
    state = post_localSGD_hook.PostLocalSGDState(None, itself, start_localSGD_iter=warm_up)
    made = ddp(model, state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=SYNC, warmup_steps=warm_up)
    return made._replace(optimizer=PostLocalSGDOptimizer(made.optimizer, averager), cycle=SYNC)


def ways(warm_up: int) -> dict[str, Callable[[Any], Trainee]]:
    """All that can be compared; warm_up: steps in which the stateful ones and the local ones are as fp32."""
    return {
        "compute alone": lambda model: Trainee(model, adamw(model)),
        "fp32": distributed,
        "fp16": lambda model: distributed(model, hvd.Compression.fp16),
        "int8": lambda model: distributed(model, hvd.Compression.int8),
        "int4": lambda model: distributed(model, hvd.Compression.int4),
        "PowerSGD-4": lambda model: distributed(model, hvd.PowerSGD(rank=4, start_step=warm_up)),
        "PowerSGD-8": lambda model: distributed(model, hvd.PowerSGD(rank=8, start_step=warm_up)),
        "LocalSGD": lambda model: local(model, warm_up),
        "DiLoCo int4": lambda model: streamed(model, warm_up),
        "DDP fp32": ddp,
        "DDP fp16": lambda model: ddp(model, None, default_hooks.fp16_compress_hook),
        "DDP PowerSGD-4": lambda model: ddp_power(model, 4, warm_up),
        "DDP PowerSGD-8": lambda model: ddp_power(model, 8, warm_up),
        "DDP post-local": lambda model: ddp_local(model, warm_up),
    }


@functools.cache
def text() -> tuple[Any, Any]:
    """Bytes of Python's own modules: to train on, and held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [[each for number, each in enumerate(files) if (number % HELD_OUT == 0) is held] for held in (False, True)]
    return tuple(torch.from_numpy(np.concatenate([np.fromfile(each, np.uint8) for each in part])) for part in parts)  # type: ignore[return-value]


def sequences(source: Any, generator: np.random.Generator, count: int) -> Any:
    """Of CONTEXT bytes, and the one that follows each."""
    places = torch.from_numpy(generator.integers(len(source) - CONTEXT, size=count))
    return source[places[:, None] + torch.arange(CONTEXT + 1)].long()


def loss_of(model: Any, rows: Any) -> Any:
    """Nats a byte."""
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def steps(trainee: Trainee, seed: int) -> Iterator[None]:
    """Take one step after the other."""
    for step in itertools.count():
        for group in trainee.optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / WARM_UP)
        trainee.optimizer.zero_grad()
        rows = sequences(text()[0], np.random.default_rng((seed, step, hvd.rank())), SEQUENCES)
        loss_of(trainee.model, rows).backward()
        trainee.optimizer.step()
        yield


def held_out_loss(model: Any) -> float:
    """Of the mean of all ranks' parameters, on text that nobody trained on; on all ranks."""
    mean = copy.deepcopy(getattr(model, "module", model))
    for parameter, value in zip(mean.parameters(), hvd.grouped_allreduce([*mean.parameters()]), strict=True):
        parameter.data.copy_(value.detach())
    with torch.no_grad():
        return float(loss_of(mean, sequences(text()[1], np.random.default_rng(7), 64)))


def train(who: str, seed: int, count: int) -> dict[str, Any]:
    """One way, from the same parameters as all."""
    trainee = ways(WARM_UP)[who](new_model(seed))
    step, losses, sent, counted = steps(trainee, seed), [], 0, 0
    for number in range(1, LONGER.get(who, 1) * count + 1):
        rest()
        before = int(SENT.read_text())
        next(step)
        rest()
        if number > WARM_UP + trainee.cycle:  # what a way does at its begin is not what a step takes
            sent, counted = sent + int(SENT.read_text()) - before, counted + 1
        if number % EVERY == 0:
            losses.append((number, held_out_loss(trainee.model)))
    most = max(neutral().allgather(sent / max(1, counted)))
    wrong = different(trainee.model) if trainee.cycle == 1 else 0
    return {"who": who, "seed": seed, "losses": losses, "wire_bytes": most, "wrong": wrong}


def different(model: Any) -> int:
    """Parameters' elements that are not those of rank 0, of all ranks."""
    mine = torch.cat([each.detach().flatten() for each in model.parameters()])
    return total(int((mine != hvd.broadcast(mine, root_rank=0)).sum()))


def timed(who: str, seconds: float) -> dict[str, Any]:
    """One way's seconds of a step, of the slowest rank: the median of cycles."""
    trainee = ways(FEW)[who](new_model(0))
    step, found = steps(trainee, 0), []
    for _ in range(max(FEW + trainee.cycle, CAUTIOUS_STEPS + 1)):
        next(step)
    while len(found) < FEW or (sum(found) * trainee.cycle < seconds and len(found) < MOST):
        rest()
        began_s = time.perf_counter()
        for _ in range(trainee.cycle):
            next(step)
        found.append(slowest((time.perf_counter() - began_s) / trainee.cycle))
    return {"who": who, "step_s": statistics.median(found)}


def alone_s() -> float:
    """Seconds of a step that one rank takes while the others rest, as on cores of its own."""
    found = 0.0
    for rank in range(hvd.size()):
        if rank == hvd.rank():
            step, times = steps(ways(0)["compute alone"](new_model(0)), 0), []
            for _ in range(10):
                began_s = time.perf_counter()
                next(step)
                times.append(time.perf_counter() - began_s)
            found = statistics.median(times)
        rest()
    return slowest(found)


def main() -> None:
    """This rank's part of a job."""
    hvd.init()
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    who = options["who"]
    if "steps" in options:
        found = {"rows": [train(each, seed, options["steps"]) for seed in options["seeds"] for each in who]}
    else:
        found = {"rows": [timed(each, options["seconds"]) for each in who], "alone_s": alone_s()}
    if is_printing():
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
