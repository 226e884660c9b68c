"""Groups of torch.distributed in jobs of `ringrun --elastic`: they end with a rank, and are made anew."""

import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.tiers import extended

pytestmark = [pytest.mark.timeout(180), extended]

PROGRAM = """
    import os, signal, sys
    import torch, torch.distributed as dist
    import ringreduce.torch as hvd

    folder, makes_anew = sys.argv[1], sys.argv[2] == "anew"
    hvd.init()
    me = hvd.rank()

    def join():
        if dist.is_initialized():
            dist.destroy_process_group()
        store = f"file://{folder}/{hvd.size()}"
        dist.init_process_group("ring", init_method=store, rank=hvd.rank(), world_size=hvd.size())

    @hvd.elastic.run
    def train(state):
        if makes_anew and dist.get_world_size() != hvd.size():
            join()
        while state.step < 6:
            if state.step == 3 and me == 0 and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            value = torch.ones(3) * (me + 1)
            dist.all_reduce(value)
            state.value = value.tolist()
            state.step += 1
            state.commit()
        dist.barrier(dist.new_group())
        return state.value, hvd.rank(), hvd.size()

    join()
    print("made", me, train(hvd.elastic.TorchState(step=0, value=None)))
    dist.destroy_process_group()
"""


def job(folder, mode):
    program = folder / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    python = Path(sys.executable)
    return jobs.run([jobs.ringrun(python), "--elastic", "-np", 3, python, program, folder, mode], timeout_s=90)


def test_they_are_made_anew(tmp_path):
    done = job(tmp_path, "anew")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert lines == [f"made {rank} ([5.0, 5.0, 5.0], {rank - 1}, 2)" for rank in (1, 2)]


def test_who_keeps_them_is_told_how(tmp_path):
    done = job(tmp_path, "kept")
    assert done.returncode == 1
    assert (
        "allreduce: this process group belongs to a world that has ended; destroy it, and make it anew" in done.stderr
    )
