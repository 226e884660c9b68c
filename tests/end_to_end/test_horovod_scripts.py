"""examples/horovod: scripts of which only the import is changed run on real ranks, and train what one process trains.

With P ranks each takes a P-th of the batch. Scripts that scale the learning rate by the number of ranks, as Horovod's
examples do, are given a P-th of that too. The numbers that they print are compared as they stand there, and their
parameters exactly: torch's default type is float64 here, where shares of a batch make up the whole.
"""

import functools
import itertools
import json
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.jobs import CROWDED, environment
from tests.support.patience import patient
from tests.support.tiers import parted

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "horovod"
RUNNER = Path(__file__).with_name("one_after_the_other.py")
EXACT = 1e-9
SIZES = [2, 3]


class Run(NamedTuple):
    """What a script has printed, without the ranks' prefixes, and its variables in the end, by rank.

    A module there is an array of its parameters.
    """

    lines: list[str]
    ranks: list[dict]

    def printed(self, name, among=""):
        """The numbers that follow this name, in the lines that contain `among`."""
        lines = "\n".join(line for line in self.lines if among in line)
        return [float(number) for number in re.findall(rf"\b{name} (-?\d+(?:\.\d+)?)", lines)]

    def trained(self, name="model"):
        """The parameters of a module, which are the same on all ranks."""
        values = [rank[name] for rank in self.ranks]
        assert all(np.array_equal(each, values[0]) for each in values), "parameters differ between ranks"
        return values[0]


class Job:
    """So many ranks, which run one script after the other: they start, and import torch, once for all."""

    def __init__(self, ranks, folder):
        self.folder = folder
        shutil.copy(RUNNER, folder)  # its requests are files beside it
        command = [Path(sys.executable).with_name("ringrun"), "-np", str(ranks), sys.executable, folder / RUNNER.name]
        variables = environment(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="40")  # so a hang is told
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=variables, **pipes)

    def run(self, folder, variables, dtype, name, *arguments):
        script, told = SCRIPTS / f"{name}.py", folder / "told.pkl"
        told.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps([str(folder), variables, dtype, str(script), *arguments]) + "\n")
        self.process.stdin.flush()
        late = threading.Timer(patient(90), self.process.terminate)
        late.start()
        printed = list(itertools.takewhile(lambda line: line != "[0] done\n", self.process.stdout))
        printed = [line for line in printed if not CROWDED.match(line)]
        late.cancel()
        assert told.exists(), "".join(printed)
        assert [line for line in printed if "Warning" in line or "{" in line] == []
        lines = [line.split("] ", 1)[1].rstrip("\n") for line in printed]
        assert "sum of parameters" in lines[-1]
        return Run(lines, pickle.loads(told.read_bytes()))

    def end(self):
        """Let the ranks end; returns what they say at last, and the exit code."""
        rest, _ = self.process.communicate(timeout=patient(60))
        return rest, self.process.returncode


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(name, ranks, *arguments): a Run of the script. Equal ones are run once."""
    jobs = {}
    new_folder = functools.cache(lambda *arguments: tmp_path_factory.mktemp(arguments[0]))

    @functools.cache
    def run_in(folder, dtype, name, ranks, *arguments, **variables):
        job = jobs.pop(ranks, None) or Job(ranks, tmp_path_factory.mktemp("job"))
        try:
            told = job.run(folder, variables, dtype, name, *arguments)
        except BaseException:
            job.process.terminate()
            job.end()
            raise
        jobs[ranks] = job
        return told

    def run(name, ranks, *arguments, folder=None, dtype="float64", **variables):
        folder = folder or new_folder(name, ranks, dtype, *arguments, *variables)
        return run_in(folder, dtype, name, ranks, *arguments, **variables)

    yield run
    assert [job.end() for job in jobs.values()] == [("", 0)] * len(jobs)


def assert_falls(losses):
    assert np.isfinite(losses).all()
    tail = max(1, len(losses) // 4)
    assert len(losses) > 1
    assert np.mean(losses[-tail:]) < 0.9 * np.mean(losses[:tail]), losses


def assert_same(one, other):
    """Of two runs."""
    np.testing.assert_allclose(one.trained(), other.trained(), rtol=EXACT, atol=1e-12)
    for name in ("loss", "sum of parameters"):
        np.testing.assert_allclose(one.printed(name), other.printed(name), rtol=0, atol=1.01e-4, err_msg=name)


@pytest.fixture
def compared(run):
    """compared(name, ranks, batch, *arguments): one process's Run, and that of so many ranks, alike and trained.

    more(ranks): further arguments.
    """

    def compare(name, ranks, batch, *arguments, folder=None, more=lambda ranks: ()):
        alone = run(name, 1, f"--batch-size={batch}", *arguments, *more(1))
        together = run(name, ranks, f"--batch-size={batch // ranks}", *arguments, *more(ranks), folder=folder)
        assert_falls(alone.printed("loss"))
        assert_same(together, alone)
        return alone, together

    return compare


def of_mnist(ranks):
    return f"--lr={0.2 / ranks}", f"--test-batch-size={60 // ranks}"


@pytest.mark.adapters
@pytest.mark.parametrize("ranks", parted(SIZES, lambda ranks: ranks == 2))
def test_mnist(compared, ranks):
    alone, together = compared("mnist", ranks, 120, more=of_mnist)
    assert together.printed("accuracy") == alone.printed("accuracy")
    assert alone.printed("accuracy")[-1] > 70


def test_mnist_compressed_predivided_with_loaders_that_are_processes(run):
    arguments = ["--batch-size=60", *of_mnist(2), "--log-interval=1", "--epochs=1"]
    exact = run("mnist", 2, *arguments)
    compressed = run("mnist", 2, *arguments, "--fp16-allreduce", "--gradient-predivide-factor=2", "--workers=1")
    np.testing.assert_allclose(compressed.printed("loss"), exact.printed("loss"), rtol=1e-3)
    assert not np.array_equal(compressed.trained(), exact.trained()), "it was compressed"


def test_mnist_adasum(run):
    done = run("mnist", 4, "--use-adasum", "--batch-size=30", "--lr=0.1", "--epochs=2", dtype="float32")
    assert np.isfinite(done.trained()).all()
    assert_falls(done.printed("loss", "step"))


@pytest.mark.parametrize("ranks", SIZES)
def test_gradient_accumulation(compared, ranks):
    more = lambda size: (f"--base-lr={0.1 / size}", "--warmup-epochs=0")  # noqa: E731
    alone, together = compared("gradient_accumulation", ranks, 60, more=more)
    assert together.printed("accuracy") == alone.printed("accuracy")
    assert alone.printed("accuracy")[-1] > 0.8


def assert_goes_on(whole, first, rest, message):
    """The two parts have printed, and trained, what the whole has."""
    assert rest.lines[0] == message
    assert first.lines[:-1] + rest.lines[1:] == whole.lines
    np.testing.assert_array_equal(rest.trained(), whole.trained())
    assert not np.array_equal(first.trained(), whole.trained())


def test_gradient_accumulation_resumes_with_momentum_in_the_middle_of_the_warm_up(run, tmp_path):
    whole = run("gradient_accumulation", 2, "--batch-size=30", "--epochs=3")
    first = run("gradient_accumulation", 2, "--batch-size=30", "--epochs=1", folder=tmp_path)
    rest = run("gradient_accumulation", 2, "--batch-size=30", "--epochs=3", folder=tmp_path)
    assert_goes_on(whole, first, rest, "resuming after epoch 1")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        f"checkpoint-{epoch}.pth.tar" for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize("ranks", SIZES)
def test_clipping_and_gradient_scaler(compared, run, ranks):
    alone, together = compared("clipping", ranks, 120)
    np.testing.assert_allclose(together.printed("norm"), alone.printed("norm"), atol=1.01e-4)
    assert min(alone.printed("norm")) > 0.25, "all gradients are clipped"
    # one rank's overflow halves the scale on all, and nobody steps
    alone, together = compared("clipping", ranks, 120, "--scaler", "--overflow-at=7")
    assert together.printed("scale") == alone.printed("scale")
    assert alone.printed("scale")[6:8] == [2048, 1024]
    assert [rank["scale"] for rank in together.ranks] == [alone.ranks[0]["scale"]] * ranks
    in_bfloat16 = [
        run("clipping", size, f"--batch-size={120 // size}", "--bf16", "--scaler", dtype="float32").printed("loss")
        for size in (1, ranks)
    ]
    assert_falls(in_bfloat16[0])
    np.testing.assert_allclose(*in_bfloat16, rtol=0.02)


@pytest.mark.parametrize("ranks", SIZES)
def test_groups(run, ranks):
    alone, together = (run("groups", size, f"--batch-size={120 // size}") for size in (1, ranks))
    assert len(together.lines) == 8
    for line in together.lines:
        name, first, last = re.match(r"(.+): loss (\S+) to (\S+),", line).groups()
        assert float(last) < 0.9 * float(first)
        loose = {"rtol": 1e-3, "atol": 1e-3} if name == "compressed" else {"rtol": EXACT, "atol": 1e-12}
        expected = alone.trained("ungrouped")
        np.testing.assert_allclose(together.trained(name), expected, **loose, err_msg=name)
    assert not np.array_equal(together.trained("compressed"), together.trained("ungrouped"))


@pytest.mark.adapters
@pytest.mark.parametrize(("ranks", "dynamic"), parted([(2, False), (3, True), (4, False)], lambda ranks, _: ranks == 2))
def test_process_sets(run, ranks, dynamic):
    each_alone = run("process_sets", 2, "--ranks=2")
    arguments, variables = [f"--ranks={ranks}"], {}
    if dynamic:
        arguments, variables = [*arguments, "--dynamic"], {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    done = run("process_sets", ranks, *arguments, **variables)
    members = [list(range(0, ranks, 2)), list(range(1, ranks, 2))]
    assert f"sets {[list(range(ranks)), *members]}" in done.lines
    for rank, told in enumerate(done.ranks):
        expected = each_alone.ranks[rank % 2]
        assert told["members"] == members[rank % 2]
        np.testing.assert_array_equal(told["model"], done.ranks[rank % 2]["model"])
        np.testing.assert_allclose(told["model"], expected["model"], rtol=EXACT, atol=1e-12)
        assert told["split_loss"] == pytest.approx(expected["split_loss"], rel=EXACT)
    for number in (0, 1):
        losses, expected = (each.printed("loss", f"set {number} ") for each in (done, each_alone))
        np.testing.assert_allclose(losses, expected, atol=1.01e-4)
        assert_falls(losses[:8])
        assert_falls(losses[8:])
    assert not np.array_equal(done.ranks[0]["model"], done.ranks[1]["model"])
    (accuracy,) = done.printed("accuracy of both models together")
    assert [accuracy] == each_alone.printed("accuracy of both models together")
    assert accuracy > 0.6


@pytest.mark.parametrize("ranks", SIZES)
def test_sparse_embeddings(compared, ranks):
    _, sparse = compared("sparse_embeddings", ranks, 120)
    _, dense = compared("sparse_embeddings", ranks, 120, "--sparse-as-dense")
    assert_same(sparse, dense)
    compared("sparse_embeddings", ranks, 120, "--adam")
    expected = [rank + 1.0 if rank < ranks else 0.0 for rank in range(8)]
    expected[7] += 0.5 * ranks
    assert [rank["summed"] for rank in sparse.ranks] == [expected] * ranks


@pytest.mark.adapters
@pytest.mark.parametrize("ranks", parted([1, *SIZES], lambda ranks: ranks == 2))
def test_join(run, ranks):
    together = run("join", ranks)
    assert_falls(together.printed("loss"))
    np.testing.assert_allclose(together.trained(), together.trained("alone"), rtol=EXACT, atol=1e-12)
    for rank, told in enumerate(together.ranks):
        assert told["last_ranks"] == [ranks - 1] * 4, "the rank with most data joins last"
        assert all((gap > 1e-6) == (rank < ranks - 1) for gap in told["behind"]), "who joins early is behind until told"


@pytest.mark.parametrize("ranks", [1, *SIZES])
def test_checkpoint(run, ranks):
    done = run("checkpoint", ranks)
    assert np.isfinite(done.trained()).all()
    assert len(done.printed("loss")) == 4
    assert_falls(done.printed("loss"))
    by_rank = re.findall(r"\d+\.\d{4}", done.lines[0])[1:]
    assert len(set(by_rank)) == ranks, "every rank has its own randomness"


def test_checkpoint_resumes_to_the_last_bit(run, tmp_path):
    # with more than 2 ranks the order in which their gradients are summed may differ from run to run
    whole = run("checkpoint", 2)
    first = run("checkpoint", 2, "--epochs=2", folder=tmp_path)
    rest = run("checkpoint", 2, "--epochs=4", folder=tmp_path)
    assert_goes_on(whole, first, rest, "going on after epoch 2")


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("loss", ["classification", "contrastive", "centred"])
def test_sync_batch_norm_and_differentiable_gathering(compared, ranks, loss):
    alone, together = compared("sync_batch_norm", ranks, 60, f"--loss={loss}")
    for rank in together.ranks:
        assert rank["seen"] == pytest.approx(alone.ranks[0]["seen"], rel=EXACT)


@pytest.mark.parametrize("ranks", SIZES)
def test_mixture_of_experts(compared, ranks):
    alone, together = compared("mixture_of_experts", ranks, 120)
    weights = np.concatenate([rank["experts"] for rank in together.ranks])
    np.testing.assert_allclose(weights, alone.ranks[0]["experts"], rtol=EXACT, atol=1e-12)


@pytest.mark.parametrize("ranks", SIZES)
def test_custom_loop(compared, ranks, tmp_path):
    _, together = compared("custom_loop", ranks, 120, folder=tmp_path)
    call = r"allreduce 'mismatch' \(custom_loop.py:\d+\)"
    mismatch = rf"rank {ranks - 1} of {ranks}, {call}: float64\[3\], but rank 0 has float64\[4\]"
    for rank, told in enumerate(together.ranks):
        assert re.match(mismatch, told["mismatch"])
        assert ("duplicate" in told and "is already pending on rank 0" in told["duplicate"]) == (rank == 0)
    assert sum(rank["polls"] for rank in together.ranks) > 0
    events = json.loads((tmp_path / "timeline.json").read_text())
    for rank in range(ranks):
        assert sum(event["pid"] == rank and event["name"] == "ALLREDUCE" for event in events) > 0
