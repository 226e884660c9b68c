"""examples/horovod: scripts of which only the import is changed run on real ranks, and give the results of one process.

Losses are compared in float64, where shares of a batch make up the whole: with P ranks each takes a P-th of the batch.
Scripts that scale the learning rate by the number of ranks, as Horovod's examples do, are given a P-th of that too.
"""

import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.jobs import environment
from tests.support.patience import patient
from tests.support.tiers import parted

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "horovod"
RUNNER = Path(__file__).with_name("one_after_the_other.py")
EXACT = 1e-9
SIZES = [2, 3]


class Job:
    """So many ranks, which run one script after the other: they start, and import torch, once for all."""

    def __init__(self, ranks, folder):
        self.folder = folder
        shutil.copy(RUNNER, folder)  # its requests are files beside it
        command = [Path(sys.executable).with_name("ringrun"), "-np", str(ranks), sys.executable, folder / RUNNER.name]
        variables = environment(PYTHONPATH=str(SCRIPTS), HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="40")  # so a hang is told
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=variables, **pipes)

    def run(self, folder, variables, name, *arguments):
        """Run a script; returns what its rank 0 recorded."""
        script, record = SCRIPTS / f"{name}.py", folder / "record.json"
        record.unlink(missing_ok=True)
        variables = variables | {"RECORD": str(record)}
        self.process.stdin.write(json.dumps([str(folder), variables, str(script), *arguments]) + "\n")
        self.process.stdin.flush()
        late = threading.Timer(patient(90), self.process.terminate)
        late.start()
        printed = list(itertools.takewhile(lambda line: line != "[0] done\n", self.process.stdout))
        late.cancel()
        assert record.exists(), "".join(printed)
        assert printed, "results are for people, too"
        assert [line for line in printed if "Warning" in line or "{" in line] == []
        return json.loads(record.read_text())

    def end(self):
        """Let the ranks end; returns what they say at last, and the exit code."""
        rest, _ = self.process.communicate(timeout=patient(60))
        return rest, self.process.returncode


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(name, ranks, *arguments): what the script's rank 0 recorded. Equal runs are run once."""
    jobs = {}
    new_folder = functools.cache(lambda *arguments: tmp_path_factory.mktemp(arguments[0]))

    @functools.cache
    def run_in(folder, name, ranks, *arguments, **variables):
        job = jobs.pop(ranks, None) or Job(ranks, tmp_path_factory.mktemp("job"))
        try:
            told = job.run(folder, variables, name, *arguments)
        except BaseException:
            job.process.terminate()
            job.end()
            raise
        jobs[ranks] = job
        return told

    def run(name, ranks, *arguments, folder=None, **variables):
        folder = folder or new_folder(name, ranks, *arguments, *variables)
        return run_in(folder, name, ranks, *arguments, **variables)

    yield run
    assert [job.end() for job in jobs.values()] == [("", 0)] * len(jobs)


def assert_equal_everywhere(record, ranks):
    assert len(record["digests"]) == ranks
    assert all(digest == record["digests"][0] for digest in record["digests"]), "parameters differ between ranks"


def assert_falls(losses):
    assert np.isfinite(losses).all()
    tail = max(1, len(losses) // 4)
    assert np.mean(losses[-tail:]) < 0.9 * np.mean(losses[:tail]), losses


def assert_same_curves(record, expected, names):
    """These curves of `record`, each a list or several by name, are as `expected`."""
    for name in names:
        one, other = (each[name] if isinstance(each[name], dict) else {"": each[name]} for each in (record, expected))
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=EXACT, err_msg=f"{name} {key}")


@pytest.fixture
def compared(run):
    """compared(name, ranks, batch): what one process told and so many ranks, once it is alike on all and trains.

    more(ranks): further arguments.
    """

    def compare(name, ranks, batch, folder=None, same=("losses",), more=lambda ranks: ()):
        alone = run(name, 1, f"--batch-size={batch}", *more(1))
        together = run(name, ranks, f"--batch-size={batch // ranks}", *more(ranks), folder=folder)
        assert_equal_everywhere(together, ranks)
        losses = alone["losses"]
        for curve in losses.values() if isinstance(losses, dict) else [losses]:
            assert_falls(curve)
        assert_same_curves(together, alone, same)
        return alone, together

    return compare


def of_mnist(ranks):
    return "--float64", f"--lr={0.2 / ranks}", f"--test-batch-size={60 // ranks}"


@pytest.mark.quick
@pytest.mark.parametrize("ranks", parted(SIZES, lambda ranks: ranks == 2))
def test_mnist(compared, ranks):
    alone, _ = compared("mnist", ranks, 120, same=["losses", "test_loss", "test_accuracy"], more=of_mnist)
    assert alone["test_accuracy"] > 0.7


def test_mnist_compressed_predivided_with_loaders_that_are_processes(run):
    arguments = ["--fp16-allreduce", "--gradient-predivide-factor=2", "--workers=1", "--epochs=1"]
    record = run("mnist", 2, "--batch-size=60", *of_mnist(2), *arguments)
    exact = run("mnist", 2, "--batch-size=60", *of_mnist(2))["losses"][: len(record["losses"])]
    assert_equal_everywhere(record, 2)
    np.testing.assert_allclose(record["losses"], exact, rtol=1e-3)
    assert record["losses"] != exact, "it was compressed"


def test_mnist_adasum(run):
    ranks = 4
    record = run("mnist", ranks, "--use-adasum", "--batch-size=30", "--lr=0.1", "--epochs=2")
    assert_equal_everywhere(record, ranks)
    assert_falls(record["losses"])


@pytest.mark.parametrize("ranks", SIZES)
def test_gradient_accumulation(compared, ranks):
    more = lambda size: (f"--base-lr={0.1 / size}", "--warmup-epochs=0")  # noqa: E731
    alone, _ = compared("gradient_accumulation", ranks, 60, same=["losses", "accuracies"], more=more)
    assert alone["accuracies"][-1] > 0.8


def test_gradient_accumulation_resumes_with_momentum_in_the_middle_of_the_warm_up(run, tmp_path):
    whole = run("gradient_accumulation", 2, "--batch-size=30", "--epochs=3")
    first = run("gradient_accumulation", 2, "--batch-size=30", "--epochs=1", folder=tmp_path)
    rest = run("gradient_accumulation", 2, "--batch-size=30", "--epochs=3", folder=tmp_path)
    assert (whole["resumed_from"], first["resumed_from"], rest["resumed_from"]) == (0, 0, 1)
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert rest["digests"] == whole["digests"]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        f"checkpoint-{epoch}.pth.tar" for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize("ranks", SIZES)
def test_clipping_and_gradient_scaler(compared, ranks):
    alone, together = compared("clipping", ranks, 120, same=["norms"])
    assert min(alone["norms"]) > 0.25, "all gradients are clipped"
    assert_same_curves(together["losses"], alone["losses"], ["clipped", "scaled"])
    np.testing.assert_allclose(together["losses"]["bfloat16"], alone["losses"]["bfloat16"], rtol=0.02)
    # one rank's overflow halves the scale on all, and nobody steps
    assert together["scales"] == alone["scales"] * ranks
    assert alone["scales"][0][6:8] == [2048.0, 1024.0]


@pytest.mark.parametrize("ranks", SIZES)
def test_groups(compared, ranks):
    alone, together = compared("groups", ranks, 120, same=[])
    compressed = together["losses"].pop("compressed")
    assert compressed != together["losses"]["ungrouped"]
    np.testing.assert_allclose(compressed, alone["losses"]["ungrouped"], rtol=1e-3)
    assert len(together["losses"]) == 7
    for name, losses in together["losses"].items():
        assert_falls(losses)
        np.testing.assert_allclose(losses, alone["losses"]["ungrouped"], rtol=EXACT, err_msg=name)


@pytest.mark.quick
@pytest.mark.parametrize(("ranks", "dynamic"), parted([(2, False), (3, True), (4, False)], lambda ranks, _: ranks == 2))
def test_process_sets(run, ranks, dynamic):
    each_alone = run("process_sets", 2, "--ranks=2")
    arguments, variables = [f"--ranks={ranks}"], {}
    if dynamic:
        arguments, variables = [*arguments, "--dynamic"], {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    record = run("process_sets", ranks, *arguments, **variables)
    members = [list(range(0, ranks, 2)), list(range(1, ranks, 2))]
    assert record["sets"] == [list(range(ranks)), *members]
    for rank, told in enumerate(record["ranks"]):
        assert told["in_set"] == members[rank % 2]
        assert told["digest"] == record["ranks"][rank % 2]["digest"]
        for kind in ("losses", "split"):
            assert_falls(told[kind])
    assert record["ranks"][0]["digest"] != record["ranks"][1]["digest"]
    for rank, told in enumerate(record["ranks"]):
        for kind in ("losses", "split"):
            np.testing.assert_allclose(told[kind], each_alone["ranks"][rank % 2][kind], rtol=EXACT)
    assert record["ensemble"] == each_alone["ensemble"] > 0.6


@pytest.mark.parametrize("ranks", SIZES)
def test_sparse_embeddings(compared, ranks):
    _, together = compared("sparse_embeddings", ranks, 120)
    np.testing.assert_allclose(together["losses"]["sparse"], together["losses"]["dense"], rtol=EXACT)
    expected = [rank + 1.0 if rank < ranks else 0.0 for rank in range(8)]
    expected[7] += 0.5 * ranks
    assert together["sums"] == [expected] * ranks


@pytest.mark.quick
@pytest.mark.parametrize("ranks", parted([1, *SIZES], lambda ranks: ranks == 2))
def test_join(run, ranks):
    together = run("join", ranks)
    assert_equal_everywhere(together, ranks)
    assert_falls(together["losses"])
    np.testing.assert_allclose(together["losses"], together["expected"], rtol=EXACT)
    assert together["last_ranks"] == [[ranks - 1] * 4] * ranks, "the rank with most data joins last"
    for rank, behind in enumerate(together["behind"]):
        assert all((gap > 1e-4) == (rank < ranks - 1) for gap in behind), "who joins early is behind until told"


@pytest.mark.parametrize("ranks", [1, *SIZES])
def test_checkpoint(run, ranks):
    record = run("checkpoint", ranks)
    assert_equal_everywhere(record, ranks)
    curves = np.array(record["losses"])
    assert curves.shape == (4, ranks, 6)
    assert_falls(curves.mean(axis=(1, 2)))
    assert len({tuple(curve) for curve in curves[0]}) == ranks, "every rank has its own randomness"


def test_checkpoint_resumes_to_the_last_bit(run, tmp_path):
    # with more than 2 ranks the order in which their gradients are summed may differ from run to run
    whole = run("checkpoint", 2)
    first = run("checkpoint", 2, "--epochs=2", folder=tmp_path)
    rest = run("checkpoint", 2, "--epochs=4", folder=tmp_path)
    assert (first["first_epoch"], rest["first_epoch"]) == (0, 2)
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert rest["digests"] == whole["digests"] != first["digests"]


@pytest.mark.parametrize("ranks", SIZES)
def test_sync_batch_norm_and_differentiable_gathering(compared, ranks):
    alone, together = compared("sync_batch_norm", ranks, 60)
    for name, seen in alone["seen"].items():
        assert together["seen"][name] == pytest.approx(seen, rel=EXACT)


@pytest.mark.parametrize("ranks", SIZES)
def test_mixture_of_experts(compared, ranks):
    compared("mixture_of_experts", ranks, 120, same=["losses", "weights"])


@pytest.mark.parametrize("ranks", SIZES)
def test_custom_loop(compared, ranks, tmp_path):
    _, together = compared("custom_loop", ranks, 120, tmp_path)
    call = r"allreduce 'mismatch' \(custom_loop.py:\d+\)"
    mismatch = rf"rank {ranks - 1} of {ranks}, {call}: float32\[3\], but rank 0 has float32\[4\]"
    assert len(together["mismatches"]) == ranks
    for message in together["mismatches"]:
        assert re.match(mismatch, message), message
    assert re.match("allreduce 'duplicate': .* is pending already on rank 0", together["duplicates"][0])
    assert together["duplicates"][1:] == [None] * (ranks - 1)
    assert sum(together["polls"]) > 0
    events = json.loads((tmp_path / "timeline.json").read_text())
    for rank in range(ranks):
        assert sum(event["pid"] == rank and event["name"] == "ALLREDUCE" for event in events) > 0
