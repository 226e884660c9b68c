"""Evaluates expressions with a fake CuPy."""

import sys

from tests.support import fake_cupy

with fake_cupy.checked(sys.argv[1], one_process=True) as fake:
    runtime = fake.cuda.runtime
    for line in sys.stdin:
        try:
            print(eval(line), flush=True)
        except runtime.CUDARuntimeError as exc:
            print(f"CUDARuntimeError: {exc}", flush=True)
