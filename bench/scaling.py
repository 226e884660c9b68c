"""Is the table of `ringrun scaling` right? The same scripts, timed by clocks of their own, beside it.

    python bench/scaling.py                                   # six scripts, with 1 and 2 ranks: ten minutes
    python bench/scaling.py --scripts digits DDP --quick

One more line in the script notes when each step ends. In the same run: what these times say of rank 0's last steps, as
many as `ringrun scaling` has counted; so both have had the same machine. By hand: what they say in a plain `ringrun` of
its own, in which nothing else counts. In each round, both ways and all numbers of ranks take turns. Where the machine's
speed changes from run to run, as beside other machines on one processor, runs by hand differ as much.

Columns: steps a second, as `ringrun scaling` has it, in the same run, and by hand, and its ratios to both in a round;
the speed-up over one rank, by all three (medians of the rounds). A run that fails ends the bench.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import Column, Report, beside, flag, main, package_version, run_command, run_job

EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS = 1, 2
FOREVER = 1000000  # steps, which `ringrun scaling` ends
TIMEOUT_S = 600.0
COLUMNS = (
    Column("script", "script", width=10, left=True),
    Column("ranks", "ranks", "", 6, "d"),
    Column("scaling_hz", "scaling", "steps/s", 10, ".2f"),
    Column("clock_hz", "same run", "steps/s", 10, ".2f"),
    Column("clock_ratio", "ratio", "", 7, ".3f"),
    Column("hand_hz", "by hand", "steps/s", 10, ".2f"),
    Column("hand_ratio", "ratio", "", 7, ".3f"),
    Column("scaling_speedup", "speed-up", "scaling", 10, ".2f"),
    Column("clock_speedup", "speed-up", "same run", 10, ".2f"),
    Column("hand_speedup", "speed-up", "by hand", 10, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
TRAINER = """
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class EndOfStep(TrainerCallback):
    def on_step_end(self, *_, **__):
        pass


set_seed(1)
with open(torch.__file__, "rb") as file:
    text = torch.frombuffer(bytearray(file.read()[:65536]), dtype=torch.uint8)
samples = [{"input_ids": each, "labels": each} for each in text.long().view(-1, 64)]
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    "out", use_cpu=True, max_steps=int(sys.argv[1]), disable_tqdm=True, report_to=[], save_strategy="no"
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=samples, callbacks=[EndOfStep()]).train()
"""
CLOCK = """
import os
import struct
import time

FILE = os.open(f"{os.environ['WORLD_SIZE']}.{os.environ['RANK']}.times", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)


def tick():
    os.write(FILE, struct.pack("d", time.perf_counter()))
"""


class Script(NamedTuple):
    """How to run a script for so many epochs, or whatever it counts."""

    text: str
    step_ends: str
    """With what its line begins at which a step ends."""
    arguments: Callable[[int], Sequence[object]] = lambda count: [count]
    steps: Callable[[int], int] = lambda ranks: 1
    """Of an epoch, by the number of ranks."""
    flags: Sequence[str] = ()

    def timed(self) -> str:
        """The script, in which a line notes when a step ends."""
        made, count = re.subn(
            rf"(?m)^( +){re.escape(self.step_ends)}.*$", r"\g<0>\n\1__import__('clock').tick()", self.text
        )
        assert count == 1, self.step_ends
        return made


def example(name: str, step_ends: str, count: str, *options: object, **how: Any) -> Script:
    """One of examples/, with the flag that says how long it trains."""
    return Script((EXAMPLES / name).read_text(), step_ends, lambda number: [count, number, *options], **how)


def lenet() -> Script:
    """The example, which has no flag for the epochs."""
    usual, epochs = (
        "EPOCHS, BATCH, TRAIN, RATE, MOMENTUM = 10,",
        "EPOCHS, BATCH, TRAIN, RATE, MOMENTUM = int(sys.argv[1]),",
    )
    text = (EXAMPLES / "numpy_lenet.py").read_text()
    assert usual in text
    return Script(text.replace(usual, f"import sys\n{epochs}"), "rr.mark_step(", steps=lambda ranks: 50)


SMALL_IMAGES = "--model", "resnet18", "--pixels", 32, "--batch", 8
SCRIPTS = {
    "digits": example("train_digits.py", "optimizer.step(", "--epochs", steps=lambda ranks: 11),
    "LeNet": lenet(),
    "GPT": example("train_gpt.py", "optimizer.step(", "--steps", "--save-every", FOREVER),
    "ImageNet": example(
        "train_imagenet.py", "state.optimizer.step(", "--epochs", *SMALL_IMAGES, steps=lambda ranks: 240 // 8 // ranks
    ),
    "DDP": example("torch_ddp.py", "optimizer.step(", "--epochs", steps=lambda ranks: 47),
    "Trainer": Script(TRAINER, "pass", flags=["--torch-backend", "ring"]),
}


def by_scaling(script: Script, seconds: float) -> tuple[dict[int, float], dict[int, float]]:
    """Steps a second, by the number of ranks: the table's, and by the script's own clock."""
    ranks = ",".join(map(str, RANKS))
    own = ["-np", ranks, "--rounds", "1", "--seconds", str(seconds), "--json", "scaling.json", *script.flags]
    command = ["python", "timed.py", *map(str, script.arguments(FOREVER))]
    run_command([beside("ringrun"), "scaling", *own, *command], TIMEOUT_S)
    sizes = json.loads(Path("scaling.json").read_text())["sizes"]
    if problem := next((each["problem"] for each in sizes if not each["runs"]), ""):
        sys.exit(f"bench/scaling.py: {problem}")
    runs = {run["size"]: run for each in sizes for run in each["runs"]}
    return {size: run["steps_s"] for size, run in runs.items()}, {
        size: by_clock(size, run["steps"]) for size, run in runs.items()
    }


def by_hand(script: Script, ranks: int, seconds: float, about_hz: float) -> float:
    """Steps a second in a plain run; about_hz: how many to expect, from which the number of steps is chosen."""
    first, steps = max(10, seconds / 4 * about_hz), math.ceil(seconds / 2 * about_hz)  # as ringrun scaling
    epochs = math.ceil((first + steps) / script.steps(ranks))
    arguments = ["timed.py", *map(str, script.arguments(epochs))]
    run_job(["-np", str(ranks), *script.flags], arguments, TIMEOUT_S)
    return by_clock(ranks, steps)


def by_clock(ranks: int, steps: int) -> float:
    """Of rank 0's last steps, so many."""
    times = np.fromfile(f"{ranks}.0.times")
    return float(steps / (times[-1] - times[-1 - steps]))


def bench(options: argparse.Namespace, report: Report) -> None:
    """Script by script, in a folder of its own."""
    for name in options.scripts:
        script = SCRIPTS[name]
        if name == "Trainer" and package_version("transformers") == "absent":
            report.say("# Trainer: skipped: transformers is not installed")
            continue
        found: dict[str, list[dict[int, float]]] = {"scaling": [], "clock": [], "hand": []}
        with tempfile.TemporaryDirectory(prefix="ringreduce-") as folder:
            os.chdir(folder)
            Path("timed.py").write_text(script.timed())
            Path("clock.py").write_text(CLOCK)
            for _ in range(options.runs):
                seen, same_run = by_scaling(script, options.seconds)
                by_hand_too = {each: by_hand(script, each, options.seconds, seen[each]) for each in RANKS}
                for who, each in zip(found, (seen, same_run, by_hand_too), strict=True):
                    found[who].append(each)
            os.chdir("/")
        for ranks in RANKS:
            row: dict[str, Any] = {"script": name, "ranks": ranks, "wrong": 0, "rounds": found}
            for who, rounds in found.items():
                both = list(zip(found["scaling"], rounds, strict=True))
                row[f"{who}_hz"] = statistics.median(each[ranks] for each in rounds)
                row[f"{who}_speedup"] = statistics.median(each[ranks] / each[1] for each in rounds)
                row[f"{who}_ratio"] = statistics.median(scaling[ranks] / each[ranks] for scaling, each in both)
            report.add(row)


if __name__ == "__main__":
    scripts = flag("--scripts", list(SCRIPTS), choices=SCRIPTS, help="rows (all)")
    seconds = flag("--seconds", 6.0, 1.0, metavar="S", help="how long each run is measured (6)")
    main("scaling", __doc__, COLUMNS, bench, [scripts, seconds], runs=3, note="medians of {runs} rounds, in turns")
