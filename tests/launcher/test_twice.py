"""ringrun --twice: two runs of some steps, whose bits are compared; its exit code says whether they are the same."""

import json
import re
import signal
import socket

import pytest

from ringrun.cli import parse
from ringrun.errors import UsageError
from ringrun.job.plan import Job
from ringrun.twice import parse_steps, run
from tests.support.patience import patient, wait_until


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((7,), 7)])
def test_the_second_run_follows_one_that_ended_well(codes, expected):
    told, codes = [], list(codes)

    def run_once(job):
        told.append(job.variables["RINGREDUCE_TWICE"])
        assert job.report_directory == "run", "a first run that fails leaves its report"
        return codes.pop(0)

    assert run(Job(2, ["train"], report_directory="run"), 30, run_once) == expected
    assert not codes
    numbers = [re.fullmatch("([12]):30:(/.*)", each).groups() for each in told]
    assert [number for number, _ in numbers] == ["1", "2"][: len(told)]
    assert len({folder for _, folder in numbers}) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--twice", "0"], r"^--twice: expected a whole number from 1 to 1000000, got '0'$"),
        (
            ["--twice", "5", "--restarts", "2"],
            r"^--twice: a job that continues after failures does not run the same way twice; leave",
        ),
        (
            ["--twice", "5", "--elastic"],
            r"^--twice: a job that continues after failures does not run the same way twice; leave out",
        ),
    ],
)
def test_what_cannot_run_twice_is_refused(flags, expected):
    request = parse([*flags, "-np", "2", "train"])
    with pytest.raises(UsageError, match=expected):
        parse_steps(request.options.twice, request.config.flag("twice"), request.job)


@pytest.mark.parametrize("differs", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_a_job_runs_twice(ringrun, script, tmp_path, differs):
    command = script(
        f"""
        import os
        import numpy as np
        import ringreduce as rr

        first = rr.ProcessSet([0])
        rr.init(process_sets=[first])
        for step in range(1000):
            gradient = np.arange(1000.0) * (rr.rank() + step)
            if first.included():
                rr.allreduce(gradient, name="w", process_set=first)
            if {differs} and (step, rr.rank()) == (7, 1):
                gradient += int.from_bytes(os.urandom(7), "little")
            rr.allreduce(gradient, name="w")
            if step == 3:
                rr.shutdown()
                rr.init(process_sets=[first])
        raise SystemExit("it ends by itself")
        """
    )
    result = ringrun("-np", 2, "--report", "run", "--twice", 10, *command, returncode=int(differs))
    assert len(re.findall("run/report", result.stderr)) == 2
    findings = json.loads((tmp_path / "run" / "report.json").read_text())["findings"]
    assert [each["text"][:30] for each in findings] == ["--twice: 'w' differs in step 7"] * differs
    expected = (
        "'w' differs in step 7, on rank 1 before"
        if differs
        else r"the same bits in 10 steps, in all arrays \(2\), on ranks 0-1"
    )
    assert re.search(f"ringreduce: --twice: {expected}", result.stderr), result.stderr


@pytest.mark.without_mpi
def test_the_second_run_gets_signals_too(start, script, tmp_path):
    command = script(
        """
        import os, pathlib, signal, time

        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        pathlib.Path("up" + os.environ["RINGREDUCE_TWICE"][0]).touch()
        until_s = time.monotonic() + 20
        while not got and time.monotonic() < until_s:
            time.sleep(0.01)
        raise SystemExit(not got)
        """
    )
    ringrun = start("-np", 1, "--twice", 3, "--forward-signals", "USR1", *command)
    for number in (1, 2):
        wait_until((tmp_path / f"up{number}").exists)
        ringrun.send_signal(signal.SIGUSR1)
    assert ringrun.wait(patient(30)) == 0


@pytest.mark.without_mpi
def test_output_files_hold_both_runs_and_none_from_before(ringrun, tmp_path):
    kept = tmp_path / "o" / "rank.0" / "stdout"
    kept.parent.mkdir(parents=True)
    kept.write_text("before")
    ringrun("-np", 1, "--twice", 3, "--output-filename", "o", "printenv", "RINGREDUCE_TWICE", returncode=0)
    assert [line[:4] for line in kept.read_text().splitlines()] == ["1:3:", "2:3:"]


@pytest.mark.without_mpi
def test_both_runs_serve_metrics_at_one_port(ringrun):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    done = ringrun("-np", 1, "--twice", 3, "--metrics-port", where, "true", returncode=0)
    assert done.stderr == f"ringrun: metrics are at http://{where}/metrics\n" * 2


@pytest.mark.extended
def test_a_real_job_whose_parameters_diverge(ringrun, script):
    command = script(
        """
        import torch
        import ringreduce.torch as hvd

        hvd.init()
        model = torch.nn.Linear(4, 2)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        for step in range(60):
            optimizer.zero_grad()
            model(torch.arange(20.0).reshape(5, 4).sin() + hvd.rank()).square().mean().backward()
            optimizer.step()
            if (step, hvd.rank()) == (37, 1):
                model.bias.data.view(torch.int32)[1] ^= 1 << 12
        """
    )
    result = ringrun("-np", 3, "--check", "divergence:10", *command)
    expected = (
        r"check=divergence: after 40 steps \(equal after 30\) parameter 'bias' differs: rank 1 from ranks 0,2; the "
    )
    assert re.search(expected, result.stderr), result.stderr
