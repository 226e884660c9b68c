"""A rank of a job that runs scripts one after the other, as its stdin asks: init() works again after shutdown().

A line of stdin is [folder, variables, script, *arguments] as JSON. Rank 0 reads it, and the others find it in a file.
"""

import itertools
import json
import os
import runpy
import sys
import time
import types
from pathlib import Path

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

for folder, variables, *argv in requests():
    os.chdir(folder)
    os.environ.update(variables)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    hvd.shutdown()
    for name in variables:
        del os.environ[name]
    if os.environ["RANK"] == "0":
        print("done", flush=True)
