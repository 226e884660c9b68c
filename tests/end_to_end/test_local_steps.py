"""A job with local steps that ends while a fragment is on its way."""

import sys
from pathlib import Path

from tests.end_to_end.conftest import ringrun

PROGRAM = """
import sys, time
import numpy as np
import ringreduce as rr

rr.init()
optimizer = rr.DiLoCo(lambda grads: None, [np.zeros(1000)], sync_every=4, delay=2)
for step in range(8):
    time.sleep(rr.rank() / 4)
    optimizer([])
print("done")
"""


def test_a_fast_rank_waits_for_the_others_before_it_leaves():
    finished = ringrun(Path(sys.executable), 2, "-c", PROGRAM, returncode=0)
    assert finished.stdout.splitlines().count("[1] done") == 1
