"""`import cupy` for whole programs: the fake CuPy, one machine a process; this folder must be on PYTHONPATH.

With it tests/gpu and bench/gpu run where no GPU is, and show that they run: what they find and measure of a GPU, they
do not show. $FAKE_CUPY says how late streams run: lazy (if unset), eager or random; $FAKE_CUPY_GPUS how many GPUs there
are, if not one. A process in which races were found prints them, and ends with exit code 1.
"""

import atexit
import os
import sys

from tests.support import fake_cupy
from tests.support.fake_cupy.machine import Machine

MODE, GPUS = os.environ.get("FAKE_CUPY", "lazy"), int(os.environ.get("FAKE_CUPY_GPUS", "1"))
machine = fake_cupy.machine = Machine(MODE, seed=os.getpid(), device_count=GPUS, one_process=True)
sys.modules.update(fake_cupy.modules())


def tell():
    machine.is_closed = True
    if machine.races:
        print("the fake CuPy has found races:", *machine.races[:20], sep="\n", file=sys.stderr, flush=True)
        os._exit(1)


atexit.register(tell)
