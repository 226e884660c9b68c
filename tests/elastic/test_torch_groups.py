"""Groups of torch.distributed in jobs of `ringrun --elastic`: they end with a rank, and are made anew."""

import sys
from pathlib import Path

from tests.support import jobs
from tests.support.tiers import extended

pytestmark = extended


def job(folder, mode):
    python, program = Path(sys.executable), Path(__file__).parent / "programs" / "torch_groups.py"
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
        "allreduce: this process group belongs to a world that has ended; destroy it and create it again" in done.stderr
    )
