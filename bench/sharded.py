"""A training step with sharded optimizers: ShardedOptimizer beside DistributedOptimizer, and torch's ZeRO over gloo.

    ringrun -np 2 python bench/sharded.py
    ringrun -np 2 python bench/sharded.py --json sharded.json

The transformer of examples/train_gpt.py with 10.9 M parameters, AdamW, one sequence and one thread a rank. Rows:

    DistributedOptimizer      ringreduce.torch.DistributedOptimizer
    ShardedOptimizer          ringreduce.torch.ShardedOptimizer
    shared parameters         the same with shared_parameters=True; on one host only
    ZeRO gloo                 ZeroRedundancyOptimizer, and DistributedDataParallel(model, gradient_as_bucket_view=True)

Columns: time of a step (median of several runs, the rows in turns, of the slowest rank) and beside the first row's
(median of the ratios of the runs); the processor's time of rank 0 for it, all threads', which means something on a busy
machine too; the state of rank 0's optimizer; parameters that differ from the first row's after the warm-up.
"""

from __future__ import annotations

import argparse
import copy
import functools
import operator
import statistics
import time
from typing import Any

from common import (
    Column,
    Report,
    in_turns,
    main,
    microseconds,
    seconds_per_run,
    total,
)
from contenders import start_gloo, stop_gloo
from train_step import WARM_UP_STEPS, Trainee, batch_of, new_model

import ringreduce as rr

OURS, SHARDED, SHARED, ZERO = "DistributedOptimizer", "ShardedOptimizer", "shared parameters", "ZeRO gloo"
COLUMNS = (
    Column("who", "who", width=22, left=True),
    Column("time_ms", "time", "ms", 10, ".2f"),
    Column("ratio", "ratio", "", 8, ".3f"),
    Column("cpu_ms", "cpu", "ms", 10, ".2f"),
    Column("state_mb", "state", "MB", 9, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def trainees(model: Any) -> dict[str, Trainee]:
    """All, from equal parameters."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    import ringreduce.torch as rrt

    ours, sharded, shared, zero = (copy.deepcopy(model) for _ in range(4))
    start_gloo()
    options = {"lr": 1e-3}
    adam = lambda trained: torch.optim.AdamW(trained.parameters(), **options)  # noqa: E731
    ddp = torch.nn.parallel.DistributedDataParallel(zero, gradient_as_bucket_view=True)
    of_zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **options)
    made = {
        OURS: Trainee(ours, rrt.DistributedOptimizer(adam(ours), ours.named_parameters())),
        SHARDED: Trainee(sharded, rrt.ShardedOptimizer(adam(sharded), sharded.named_parameters())),
    }
    if len(set(rr.info().hosts)) == 1:
        optimizer = rrt.ShardedOptimizer(adam(shared), shared.named_parameters(), shared_parameters=True)
        made[SHARED] = Trainee(shared, optimizer)
    return made | {ZERO: Trainee(ddp, of_zero)}


def state_bytes(optimizer: Any) -> int:
    """Of the moments on this rank."""
    own = getattr(optimizer, "optim", optimizer)
    return sum(each.nbytes for of_one in own.state.values() for each in of_one.values() if each.dim())


def wrong_parameters(model: Any, expected: Any) -> int:
    """On all ranks: those further apart than rounding and Adam's sign of a small gradient explain."""
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return total(sum(int(((one - other).abs() > 2e-3).sum()) for one, other in pairs))


def bench(options: argparse.Namespace, report: Report) -> None:
    """Warm up, compare, and measure in turns."""
    model = new_model(options.quick)
    compared, batch = trainees(model), batch_of(1, model.position.num_embeddings)
    for trainee in compared.values():
        for _ in range(WARM_UP_STEPS):
            trainee.step(*batch)
    first = compared[OURS].model
    found = {who: (wrong_parameters(each.model, first), state_bytes(each.optimizer)) for who, each in compared.items()}
    used_s: dict[str, list[float]] = {who: [] for who in compared}

    def step(who: str) -> None:
        before_s = time.process_time()
        compared[who].step(*batch)
        used_s[who].append(time.process_time() - before_s)

    actions = {who: functools.partial(step, who) for who in compared}
    times = in_turns(actions, options.runs, seconds_per_run(options, 1.0))
    for who, each in times.items():
        ratio = statistics.median(map(operator.truediv, each, times[OURS]))
        row = {
            "who": who,
            "ratio": ratio,
            "cpu_ms": statistics.median(used_s[who]) * 1e3,
            "wrong": found[who][0],
            "state_mb": found[who][1] / 1e6,
            **microseconds(each),
        }
        report.add({**row, "time_ms": row["time_us"] / 1e3})
    stop_gloo()


if __name__ == "__main__":
    main("sharded", __doc__, COLUMNS, bench, runs=9, in_job=True, with_torch=True)
