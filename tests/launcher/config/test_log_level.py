"""--log-level and its kin on whole jobs: what init() tells, on which ranks."""

import re

import pytest

from ringreduce.kernels import native

SCRIPT = """
    import numpy as np
    import ringreduce as rr

    rr.init()
    assert rr.allreduce(np.full(10, rr.rank() + 1.0), op=rr.Sum, name="ones")[0] == 3
"""


def test_by_default_nothing_is_told(ringrun, script):
    done = ringrun("-np", 2, *script(SCRIPT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_info_is_one_line_whichever_rank_is_shown(ringrun, script):
    done = ringrun("-np", 2, "--ranks", 1, "--log-level", "INFO", "--cycle-time-ms", "7", *script(SCRIPT), returncode=0)
    (line,) = done.stderr.splitlines()
    head = r"ringreduce: info: ringreduce [\d.]+: 2 ranks on 1 host; .+ with thread level multiple; .* shared memory"
    assert re.match(head, line)
    assert ("sums by NumPy, not the compiled" if native.module is None else "sums by the compiled module") in line
    assert line.endswith("; cycle_time_ms is 7.0")


@pytest.mark.parametrize("variable", ["RINGREDUCE_LOG_LEVEL", "HOROVOD_LOG_LEVEL"])
def test_debug_tells_each_rank_what_is_run(variable, ringrun, script):
    done = ringrun("-np", 2, "--log-with-timestamp", *script(SCRIPT), env={variable: "debug"}, returncode=0)
    for rank in range(2):
        told = rf"^\[{rank}\] \d{{4}}-.*\.\d{{3}} ringreduce: debug: rank {rank}"
        assert re.search(rf"{told} of 2: local rank {rank} of 2, on host 0 ", done.stderr, re.MULTILINE)
        assert re.search(rf"{told}, process set 0, response \d+: allreduce 'ones'$", done.stderr, re.MULTILINE)
