"""Hosts that are named, of which only this one gets ranks."""

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ringrun import cli
from ringrun.errors import UsageError
from ringrun.hosts import Host, ranks_here

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1", "gpu7", "gpu7.lab", "gpu7.other.lab"])
def test_ranks_on_this_host_are_counted(name: str) -> None:
    assert ranks_here([(Host(name, 4), 3), (Host("localhost", 2), 2)], "-H", "gpu7.lab") == 5


@pytest.mark.parametrize(
    ("names", "told"),
    [(["gpu8"], "gpu8,"), (["gpu7", "gpu70", "a", "b", "c", "d"], "gpu70, a, b and 2 more,"), (["gpu"], "gpu,")],
)
def test_other_hosts_are_an_error_that_names_them(names: list[str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        ranks_here([(Host(name), 1) for name in names], "-H x", "gpu7")
    assert str(caught.value).startswith(
        f"-H x: ranks would go to {told} and ringrun starts ranks on this host (gpu7) only"
    )


def test_slots_say_how_many_ranks_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.parse(["-H", "localhost:3", "true"]).np == 3
    assert cli.parse(["-np", "2", "-H", "localhost:3", "true"]).np == 2
    (tmp_path / "hosts").write_text(f"# ours\n\n{socket.gethostname()} slots=5\n")
    assert cli.parse(["--hostfile", str(tmp_path / "hosts"), "true"]).np == 5
    monkeypatch.setenv("SLURM_JOB_NODELIST", socket.gethostname())
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "7")
    assert cli.parse(["true"]).np == 7
    assert cli.parse(["-H", "localhost:2", "true"]).np == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "4", "-H", "localhost:3"], "-np 4: the hosts have 3 slots (localhost:3)"),
        (["-H", "localhost,elsewhere.example"], "-H localhost,elsewhere.example: ranks would go to elsewhere.example,"),
        (["-H", "localhost", "--hostfile", "f"], "-H and --hostfile exclude each other"),
        (["--hostfile", "no-such-file"], "no-such-file"),
        (["-H", "localhost:none"], "localhost:none"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(ringrun: Run, arguments: list[str], message: str) -> None:
    done = ringrun(*arguments, "true")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def test_an_allocation_of_other_hosts_is_not_passed_over(ringrun: Run) -> None:
    done = ringrun("-np", 2, "true", env={"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"})
    assert done.returncode == 2
    assert "ranks would go to n1, n2, and ringrun starts ranks on this host" in done.stderr


def test_ranks_start_in_the_slots(ringrun: Run) -> None:
    done = ringrun("-H", "localhost:3", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} of 3" for rank in range(3)]
