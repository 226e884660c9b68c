"""A rank of a job that runs scripts one after the other, as its stdin asks: init() works again after shutdown().

A line of stdin is [folder, variables, dtype, script, *arguments] as JSON. Rank 0 reads it, and the others find it in a
file. What a script has trained, and what some of its variables are in the end, rank 0 pickles in the folder, by rank.
"""

import itertools
import json
import os
import pickle
import runpy
import sys
import time
import types
from pathlib import Path

import torch

import ringreduce.torch as hvd


def requests():
    for number in itertools.count():
        path = Path(__file__).with_name(f"request-{number}")
        if os.environ["RANK"] == "0":
            path.with_suffix(".part").write_text(sys.stdin.readline() or "null")
            path.with_suffix(".part").rename(path)
        while not path.exists():  # other jobs need the cores
            time.sleep(0.01)
        if (request := json.loads(path.read_text())) is None:
            return
        yield request


# the compiler, which torch.optim imports for the first optimizer, takes longer to import than torch
compiler = types.ModuleType("torch._dynamo")
compiler.disable = lambda function=None, *_, **__: function
compiler.graph_break = lambda: None
sys.modules.setdefault("torch._dynamo", compiler)


def parameters(module):
    """Every number of a module, buffers too, as an array."""
    return torch.cat([each.detach().double().flatten() for each in module.state_dict().values()]).numpy()


def is_plain(value):
    """A number, a text, or a list of some."""
    return all(isinstance(each, (str, int, float)) for each in (value if isinstance(value, list) else [value]))


for folder, variables, dtype, *argv in requests():
    torch.set_default_dtype(getattr(torch, dtype))
    os.chdir(folder)
    os.environ.update(variables)
    sys.argv = argv
    found = runpy.run_path(argv[0], run_name="__main__")
    modules = {name: each for name, each in found.items() if isinstance(each, torch.nn.Module)} | found.get(
        "models", {}
    )
    trained = {name: parameters(module) for name, module in modules.items()}
    told = hvd.allgather_object(trained | {name: each for name, each in found.items() if is_plain(each)})
    if hvd.rank() == 0:
        Path("told.pkl").write_bytes(pickle.dumps(told))
    hvd.shutdown()
    for name in variables:
        del os.environ[name]
    if os.environ["RANK"] == "0":
        print("done", flush=True)
