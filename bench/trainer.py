"""One step of Hugging Face's Trainer: what communication adds, over "ring" and over gloo, to ranks that train alone.

    python bench/trainer.py
    python bench/trainer.py --runs 5 --json trainer.json

Needs transformers and accelerate, in the environment that has ringreduce and its MPI.

A GPT-2 of 10.8 M parameters (width 384, 6 blocks, 256 tokens), one sequence and one thread a rank, with AdamW and
clipping, as Trainer does by default. Each row is a job of its own, of two ranks, and the rows take turns:

    each alone      the same ranks at the same time, which know nothing of each other
    gloo            as accelerate does it
    ring            the same program with --torch-backend ring

Columns: time of a step (median of the runs' medians, of the slowest rank); what it adds to training alone; that, over
gloo's; ranks whose parameters are not those of the first rank over gloo, to the last bit.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Column, Report, machine, parse, parser, run_job

ALONE, GLOO, RING = "each alone", "gloo", "ring"
FLAGS: dict[str, list[str]] = {ALONE: [], GLOO: [], RING: ["--torch-backend", "ring"]}
OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI")
RANKS = 2
STEPS, WARM_UP_STEPS = 40, 8
TIMEOUT_S = 300
COLUMNS = (
    Column("who", "who", width=14, left=True),
    Column("time_ms", "time", "ms", 9, ".1f"),
    Column("added_ms", "added", "ms", 9, ".1f"),
    Column("of_gloo", "of gloo's", "", 11, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def arguments() -> argparse.Namespace:
    """The command line; what a rank gets from the job's own stands after it."""
    made = parser(__doc__, runs=5)
    made.add_argument("--rank-of", choices=FLAGS, help=argparse.SUPPRESS)
    made.add_argument("--folder", help=argparse.SUPPRESS)
    return parse(made)


def train(who: str, folder: Path, quick: bool) -> None:
    """One rank: write how long its steps took, and what it has trained."""
    rank = os.environ["RANK"]
    if who == ALONE:
        for name in [each for each in os.environ if each.startswith(OF_A_JOB)]:  # which accelerate looks for
            del os.environ[name]
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    began_s: list[float] = []

    class Times(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began_s.append(time.perf_counter())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, depth, context = (32, 2, 16) if quick else (384, 6, 256)
    shape = {"vocab_size": 256, "n_positions": context, "n_embd": width, "n_layer": depth, "n_head": depth}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    steps = WARM_UP_STEPS + 4 if quick else STEPS
    tokens = torch.randint(256, (steps * RANKS, context))
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    options = TrainingArguments(
        output_dir=str(folder / "output"),
        use_cpu=True,
        per_device_train_batch_size=1,
        max_steps=steps,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, options, train_dataset=rows, callbacks=[Times()])
    trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(began_s)][WARM_UP_STEPS:]
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    (folder / f"{rank}.json").write_text(json.dumps([statistics.median(seconds), digest]))
    del trainer  # its model first: at the end of Python gloo's threads may abort (pytorch/pytorch#190489),
    gc.collect()  # and a model that has the last reference to a group waits for them while they wait for the GIL
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def job(who: str, quick: bool) -> tuple[float, list[str]]:
    """One job: seconds of a step of the slowest rank, and by rank what it has trained."""
    with tempfile.TemporaryDirectory() as folder:
        program = [__file__, "--rank-of", who, "--folder", folder, *(["--quick"] if quick else [])]
        run_job(["-np", str(RANKS), *FLAGS[who]], program, TIMEOUT_S)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return max(seconds for seconds, _ in ranks), [digest for _, digest in ranks]


def main() -> None:
    """Row by row, in turns."""
    options = arguments()
    if not find_spec("transformers") or not find_spec("accelerate"):
        sys.exit("bench/trainer.py needs transformers and accelerate: pip install transformers accelerate")
    if options.rank_of:
        train(options.rank_of, Path(options.folder), options.quick)
        return
    note = f"median of {options.runs} jobs each, of {RANKS} ranks, the rows in turns"
    report = Report("trainer", machine(), COLUMNS, True, note)
    runs = [{who: job(who, options.quick) for who in FLAGS} for _ in range(options.runs)]
    expected = runs[0][GLOO][1][0]
    times_ms = {who: 1e3 * statistics.median(run[who][0] for run in runs) for who in FLAGS}
    added_ms = {
        who: 1e3 * statistics.median(run[who][0] - run[ALONE][0] for run in runs) for who in FLAGS if who != ALONE
    }
    for who in FLAGS:
        row: dict[str, Any] = {"who": who, "time_ms": times_ms[who], "wrong": None}
        if who != ALONE:
            wrong = sum(digest != expected for run in runs for digest in run[who][1])
            row |= {"added_ms": added_ms[who], "of_gloo": added_ms[who] / added_ms[GLOO], "wrong": wrong}
        report.add({**row, "runs_ms": [1e3 * run[who][0] for run in runs]})
    report.finish(options)


if __name__ == "__main__":
    main()
