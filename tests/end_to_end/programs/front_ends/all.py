"""Runs programs one after the other in this process, each with a port of its own, and keeps what they have trained.

all.py FOLDER NAME=PORT …
"""

import gc
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from accelerate.state import AcceleratorState

from ringreduce.torch.distributed import group
from tests.support.torch_groups import groups_outlive_models

HERE, FOLDER, RANK = Path(__file__).parent, Path(sys.argv[1]), os.environ["RANK"]
rings, begin = [], group.RingProcessGroup.__init__
group.RingProcessGroup.__init__ = lambda *group: rings.append(1) or begin(*group)


def run(name):
    sys.argv[1:] = []
    model = runpy.run_path(str(HERE / f"{name}.py"))["model"]
    parameters = np.concatenate([each.detach().numpy().ravel() for each in model.parameters()])
    np.savez(FOLDER / f"{name}.{RANK}.npz", parameters=parameters, rings=len(rings))
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps how it has started
    rings.clear()


with groups_outlive_models():
    for argument in sys.argv[2:]:
        name, os.environ["MASTER_PORT"] = argument.split("=")
        run(name)
    gc.collect()
