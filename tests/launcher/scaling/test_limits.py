"""`ringrun scaling` names the limit of real jobs, each so large that a loaded machine does not hide it; and Ctrl-C."""

import json
import os
import signal

import pytest

from ringrun.scaling import measure
from tests.support.patience import patient, wait_until

COMPUTES = """
    import os
    import subprocess
    import sys

    import numpy as np
    import ringreduce as rr

    rr.init()
    {more}
    matrix = np.ones((200, 200))
    while True:
        for _ in range(20):
            matrix @ matrix
        rr.allreduce(matrix[0], name="gradient")
        rr.mark_step(examples=32)
"""
BESIDE_SOMETHING_BUSY = """
    if rr.size() > 1 and rr.rank() == 1:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        spin = "import os; parent = os.getppid()\\nwhile os.getppid() == parent: pass"
        subprocess.Popen([sys.executable, "-c", spin])
        os.nice(10)  # it gets a tenth of the core, whatever else runs on the machine
"""
LATE = """while True:
        time.sleep(0.05 * (rr.rank() == 1))"""
LOADS = """
    import time

    import torch
    import ringreduce.torch as hvd


    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1000000

        def __getitem__(self, index):
            time.sleep(0.02)
            return torch.full((4,), float(index % 7))


    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for inputs in torch.utils.data.DataLoader(Data(), 8):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
"""
ARGUMENTS = "--rounds", 1, "--seconds", 2, "--json", "s.json"


@pytest.fixture
def limits(ringrun, script, tmp_path):
    """Run `ringrun scaling` on a script; returns what limits each number of ranks, and what would help."""

    def find(source, sizes, *more):
        ringrun("scaling", "-np", sizes, *ARGUMENTS, *more, *script(source), returncode=0)
        document = json.loads((tmp_path / "s.json").read_text())
        return [each["limit"] for each in document["sizes"]], document["advice"]

    return find


@pytest.mark.extended
def test_a_rank_beside_something_busy(limits):
    found, advice = limits(COMPUTES.format(more=BESIDE_SOMETHING_BUSY.strip()), "1,2")
    assert found[1] == "rank 1 (another process runs on its core)"
    assert any(text.startswith("rank 1: stop the other process on its core") for text in advice)


@pytest.mark.extended
def test_a_late_rank_is_named_however_short_the_time(limits):
    """Between 3 and 7 s after init(), when steps are sent, it begins to record them, and then only to count."""
    source = COMPUTES.format(more="import time; time.sleep(3.5)").replace("while True:", LATE)
    found, _ = limits(source, "1,2", "--seconds", 0.5)
    assert found[1] == "rank 1 (it computes longer than others)"


@pytest.mark.extended
def test_a_slow_data_loader(limits):
    found, advice = limits(LOADS, "1,2")
    assert found == ["data loader"] * 2
    text = "more workers for the data loader, or a faster disk: with 2 ranks, it takes "
    assert any(each.startswith(text) for each in advice)


@pytest.mark.extended
@pytest.mark.parametrize("factor", [2, 4])
def test_more_ranks_than_cores(limits, factor):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])
    try:
        size = factor * len(cores[:2])
        found, _ = limits(COMPUTES.format(more=""), f"1,{size}")
    finally:
        os.sched_setaffinity(0, cores)
    assert found[1] == "more ranks than cores"


@pytest.mark.adapters
@pytest.mark.parametrize("moment", ["measuring", "of1", "run 1 of", "of2"])
def test_ctrl_c_at_a_terminal_leaves_nothing(start, script, tmp_path, wait_until_gone, moment):
    """The terminal sends it to its foreground group: to `ringrun scaling`, and to what that has not set apart."""
    source = COMPUTES.format(more="open(f'of{rr.size()}', 'w').close()")
    with open(tmp_path / "stderr", "wb") as stderr:
        running = start("scaling", "-np", "1,2", *ARGUMENTS, *script(source), stderr=stderr)
        said = tmp_path / "stderr"
        wait_until((tmp_path / moment).exists if moment.startswith("of") else lambda: moment in said.read_text(), 50)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(patient(30)) == 130
    wait_until_gone()


def test_ctrl_c_while_a_run_is_being_started_ends_it(monkeypatch, tmp_path):
    started = []

    def start(*arguments, **options):
        started.append(measure_start(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    measure_start = measure.start_with_parent
    monkeypatch.setattr(measure, "start_with_parent", start)
    with pytest.raises(KeyboardInterrupt):
        measure.measure(1, [], ["sleep", "60"], str(tmp_path), measure.Bounds())
    assert started[0].returncode is not None
