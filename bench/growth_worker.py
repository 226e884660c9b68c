"""What bench/growth.py runs with each number of ranks; rank 0 writes its rows as JSON. Not started by hand."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from allreduce import expected_sum, wrong_elements
from common import about, in_turns, is_printing, microseconds
from contenders import MPI_NAME, PUBLIC, contenders, has, stop_gloo
from gradients import measured
from reducers import GROUPED, NUMPY, ONE_BY_ONE, Gradients, data_parallel, grouped, one_by_one, ours

import ringreduce as rr
from ringreduce.collectives.cost_model import ALGORITHMS, choose, predict_us

ELEMENTS = 256


def many_tensors(count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A step with `count` tensors of 1 KiB."""
    gradients = Gradients([(ELEMENTS,)] * count)
    compared = {NUMPY: ours(gradients, rr, gradients.arrays), GROUPED: grouped(gradients)}
    compared[ONE_BY_ONE] = one_by_one(gradients)
    if has("torch"):
        compared |= data_parallel(gradients)
    place = {"part": "tensors", "ranks": rr.size(), "tensors": count, "size": gradients.nbytes}
    return [
        {**place, "who": name, **row}
        for name, row in measured(compared, gradients, options.runs, options.seconds).items()
    ]


def one_buffer(nbytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Our algorithms, what the cost model says of them, and which one it chooses."""
    info = rr.info()
    compared = {name: each for name, each in contenders("float32").items() if name in (*ALGORITHMS, PUBLIC, MPI_NAME)}
    array = np.zeros(nbytes // 4, np.float32)
    actions = {name: lambda algorithm=algorithm: algorithm(array) for name, algorithm in compared.items()}
    times = in_turns(actions, options.runs, options.seconds, before=lambda: array.fill(0))
    expected = expected_sum(array.size, rr.size())
    usable = info.usable_algorithms
    chosen = "shared" if "shared" in usable else choose(nbytes, nbytes, info.hosts, usable, info.constants)
    rows = []
    for name, each in times.items():
        row = {"part": "buffer", "ranks": rr.size(), "tensors": 1, "size": nbytes, "who": name, **microseconds(each)}
        if name in ALGORITHMS:
            row["chosen"] = name == chosen
            if math.isfinite(predicted := predict_us(name, nbytes, info.hosts, info.constants)):
                row["predicted_us"] = predicted
        rows.append({**row, "wrong": wrong_elements(compared[name], array, expected)})
    return rows


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, nargs="+", required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="a turn")
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    rr.init()
    rows: list[dict[str, Any]] = []
    for nbytes in options.sizes:
        rows += one_buffer(nbytes, options)
    for count in options.tensors:
        rows += many_tensors(count, options)
    stop_gloo()
    if is_printing():
        kept = {"header": about(), "constants": str(rr.info().constants), "rows": rows}
        Path(options.json).write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
