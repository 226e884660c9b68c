"""Is the table of `ringrun scaling` right? The same scripts, timed by a clock outside of them, beside it.

    python bench/scaling.py                                   # six scripts, with 1 and 2 ranks: ten minutes
    python bench/scaling.py --scripts digits DDP --quick

By hand: a plain `ringrun` runs the script twice, with few steps and with many. What the second run takes longer is the
time of the additional steps, without any start and without ringrun's own counting. In each round, both ways and all
numbers of ranks take turns.

Columns: steps a second, as `ringrun scaling` has it and by hand, and their ratio in a round; the speed-up over one
rank, by both (medians of the rounds). A run that fails ends the bench.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from common import Column, Report, beside, flag, main, package_version, run_command, run_job

EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS = 1, 2
FOREVER = 1000000  # steps, which `ringrun scaling` ends
TIMEOUT_S = 600.0
COLUMNS = (
    Column("script", "script", width=10, left=True),
    Column("ranks", "ranks", "", 6, "d"),
    Column("scaling_hz", "scaling", "steps/s", 10, ".2f"),
    Column("hand_hz", "by hand", "steps/s", 10, ".2f"),
    Column("ratio", "ratio", "", 8, ".3f"),
    Column("scaling_speedup", "speed-up", "scaling", 10, ".2f"),
    Column("hand_speedup", "speed-up", "by hand", 10, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
TRAINER = """
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(1)
with open(torch.__file__, "rb") as file:
    text = torch.frombuffer(bytearray(file.read()[:65536]), dtype=torch.uint8)
samples = [{"input_ids": each, "labels": each} for each in text.long().view(-1, 64)]
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    "out", use_cpu=True, max_steps=int(sys.argv[1]), disable_tqdm=True, report_to=[], save_strategy="no"
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=samples).train()
"""


class Script(NamedTuple):
    """How to run a script for so many epochs, or whatever it counts."""

    arguments: Callable[[int], Sequence[object]]
    steps: Callable[[int], int] = lambda ranks: 1
    """Of an epoch, by the number of ranks."""
    flags: Sequence[str] = ()


def lenet(epochs: int) -> list[object]:
    """A copy of the example, which has no flag for this."""
    usual = "EPOCHS, BATCH, TRAIN, RATE, MOMENTUM = 10,"
    text = (EXAMPLES / "numpy_lenet.py").read_text()
    assert usual in text
    Path("lenet.py").write_text(text.replace(usual, usual.replace("10", str(epochs))))
    return ["lenet.py"]


def trainer(steps: int) -> list[object]:
    """A script as those of transformers' users."""
    Path("trainer.py").write_text(TRAINER)
    return ["trainer.py", steps]


def example(name: str, count: str, *options: object) -> Callable[[int], list[object]]:
    """One of examples/, with the flag that says how long it trains."""
    return lambda number: [EXAMPLES / name, count, number, *options]


SMALL_IMAGES = "--model", "resnet18", "--pixels", 32, "--batch", 8
SCRIPTS = {
    "digits": Script(example("train_digits.py", "--epochs"), lambda ranks: 11),
    "LeNet": Script(lenet, lambda ranks: 50),
    "GPT": Script(example("train_gpt.py", "--steps", "--save-every", FOREVER)),
    "ImageNet": Script(example("train_imagenet.py", "--epochs", *SMALL_IMAGES), lambda ranks: 240 // 8 // ranks),
    "DDP": Script(example("torch_ddp.py", "--epochs"), lambda ranks: 47),
    "Trainer": Script(trainer, flags=["--torch-backend", "ring"]),
}


def by_scaling(script: Script, seconds: float) -> dict[int, float]:
    """Steps a second, by the number of ranks."""
    ranks = ",".join(map(str, RANKS))
    own = ["-np", ranks, "--rounds", "1", "--seconds", str(seconds), "--json", "scaling.json", *script.flags]
    command = ["python", *map(str, script.arguments(FOREVER))]
    run_command([beside("ringrun"), "scaling", *own, *command], TIMEOUT_S)
    sizes = json.loads(Path("scaling.json").read_text())["sizes"]
    if problem := next((each["problem"] for each in sizes if not each["runs"]), ""):
        sys.exit(f"bench/scaling.py: {problem}")
    return {run["size"]: run["steps_s"] for each in sizes for run in each["runs"]}


def by_hand(script: Script, ranks: int, seconds: float, about_hz: float) -> float:
    """Steps a second; about_hz: how many to expect, from which the number of steps is chosen."""
    steps = script.steps(ranks)
    few = math.ceil(max(10, seconds / 4 * about_hz) / steps)  # about as many as ringrun scaling leaves out
    many = few + math.ceil(seconds * about_hz / steps)
    times = []
    for epochs in few, many:
        began_s = time.perf_counter()
        run_job(["-np", str(ranks), *script.flags], [str(each) for each in script.arguments(epochs)], TIMEOUT_S)
        times.append(time.perf_counter() - began_s)
    return (many - few) * steps / (times[1] - times[0])


def bench(options: argparse.Namespace, report: Report) -> None:
    """Script by script, in a folder of its own."""
    for name in options.scripts:
        script = SCRIPTS[name]
        if name == "Trainer" and package_version("transformers") == "absent":
            report.say("# Trainer: skipped: transformers is not installed")
            continue
        found: dict[str, list[dict[int, float]]] = {"scaling": [], "hand": []}
        with tempfile.TemporaryDirectory(prefix="ringreduce-") as folder:
            os.chdir(folder)
            for _ in range(options.runs):
                seen = by_scaling(script, options.seconds)
                found["scaling"].append(seen)
                found["hand"].append({each: by_hand(script, each, options.seconds, seen[each]) for each in RANKS})
            os.chdir("/")
        for ranks in RANKS:
            row = {f"{who}_hz": statistics.median(each[ranks] for each in rounds) for who, rounds in found.items()}
            row |= {
                f"{who}_speedup": statistics.median(each[ranks] / each[1] for each in rounds)
                for who, rounds in found.items()
            }
            both = zip(found["scaling"], found["hand"], strict=True)
            ratio = statistics.median(scaling[ranks] / hand[ranks] for scaling, hand in both)
            report.add({"script": name, "ranks": ranks, **row, "ratio": ratio, "wrong": 0, "rounds": found})


if __name__ == "__main__":
    scripts = flag("--scripts", list(SCRIPTS), choices=SCRIPTS, help="rows (all)")
    seconds = flag("--seconds", 6.0, 1.0, metavar="S", help="how long each run is measured (6)")
    main("scaling", __doc__, COLUMNS, bench, [scripts, seconds], runs=3, note="medians of {runs} rounds, in turns")
