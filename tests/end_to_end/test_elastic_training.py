"""torch under `ringrun --elastic`: ranks really die, and the parameters are those that one process gets with the ranks
that took part in each step; and the example."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.end_to_end.conftest import PROGRAMS
from tests.support import jobs
from tests.support.tiers import parted

STEPS = 12


def new_model(seed):
    """Of float64, with Adam."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 8, dtype=torch.float64), torch.nn.Tanh(), torch.nn.Linear(8, 2, dtype=torch.float64)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def batch_of(step, rank):
    """What a rank of the job's start trains on in a step."""
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def replayed(history):
    """The parameters after these steps in one process, with the ranks that took part in each."""
    model, optimizer = new_model(seed=5)
    for step, ranks in enumerate(history):
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch_of(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
    return list(model.parameters())


LOSSES = [
    (["-np", 3], ["2:4:SIGKILL"], {3: 4, 2: 8}),
    (["-np", 3], ["0:5:_exit7"], {3: 5, 2: 7}),
    (["-np", 4], ["1:3:raise", "2:7:exit3"], {4: 3, 3: 4, 2: 5}),
    (["-np", 4], ["3:6:SIGSEGV", "0:6:SIGKILL"], {4: 6, 2: 6}),
    (["-np", 3, "--spares", 1], ["1:5:SIGKILL"], {3: 12}),
    (["-np", 3, "--spares", 1], ["0:5:_exit7"], {3: 12}),
]


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("flags", "deaths", "sizes"),
    parted(LOSSES, lambda *case: case == LOSSES[1]),
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_is_trained_is_what_the_ranks_that_took_part_train_in_one_process(tmp_path, flags, deaths, sizes):
    program, result = PROGRAMS / "trains_with_torch.py", tmp_path / "result"
    command = [jobs.ringrun(Path(sys.executable)), "--elastic", "--min-np", 2, *flags, sys.executable, program, result]
    environment = jobs.environment(PYTHONPATH=str(jobs.ROOT), OMP_NUM_THREADS="1")
    ended = jobs.run([*command, *deaths], env=environment, stderr=subprocess.STDOUT, returncode=0)
    for death in deaths:
        assert re.search(rf"rank {death[0]} of \d failed", ended.stdout), ended.stdout
    history, size, parameters = torch.load(result)
    assert {count: [len(ranks) for ranks in history].count(count) for count in sizes} == sizes, history
    assert size == list(sizes)[-1]
    for one, other in zip(parameters, replayed(history), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_example_goes_on_without_a_rank_that_is_killed():
    example = [sys.executable, jobs.ROOT / "examples" / "elastic_digits.py", "--step-s", "0.02"]
    command = [jobs.ringrun(Path(sys.executable)), "--elastic", "-np", 3, "--min-np", 2, *example]
    seen = []
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, env=jobs.environment()) as job:
        for line in job.stdout:
            seen.append(line)
            found = re.search(r"3 ranks, processes \[(\d+), .*, (\d+)\]", line)
            if len(seen) == 1:
                first, last = found.groups()
                time.sleep(0.1)
                subprocess.run(["kill", "-9", first], check=True)
    assert job.returncode == 0, seen
    assert re.search(rf"epoch 25 of 25: 2 ranks, processes \[\d+, {last}\]", "".join(seen))
    assert float(re.search(r"test accuracy: (\S+)", seen[-1])[1]) > 0.95
