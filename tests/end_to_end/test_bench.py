"""The benches of one host run as a user starts them, in their quick form: what they print, keep and draw.

Never how fast it was.
"""

import re
import shutil

import pytest

from ringreduce.execution.host import window_bytes
from ringreduce.settings import Settings
from tests.end_to_end.conftest import ringrun, run
from tests.support.benches import BENCH, PYTHON, files, kept_by, outcome, table

HOROVOD = "from ringreduce.torch import *\n"


@pytest.fixture
def horovod(tmp_path):
    """Environment variables with which `import horovod.torch` finds something: ours, whose names are the same."""
    package = tmp_path / "packages" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(HOROVOD)
    return {"PYTHONPATH": str(package.parent)}


def launch(folder, *arguments):
    """The rows of bench/launch.py, which must not grow with the ranks in threads, and by one descriptor for each."""
    finished = run([PYTHON, BENCH / "launch.py", "--runs", 1, "--json", folder / "rows.json", *arguments])
    rows = kept_by(finished, folder)["rows"]
    assert all(row["wrong"] == 0 and row["time_ms"] > 0 for row in rows)
    counted = [row for row in rows if "threads" in row]
    assert all(row["threads"] == 3 and row["ranks"] < row["descriptors"] < row["ranks"] + 32 for row in counted)
    return [(row["ranks"], row["who"].strip()) for row in rows]


@pytest.mark.adapters  # it uses the launcher's own classes
def test_starting_jobs(tmp_path):
    who = ["processes", "forked agents", "connections"]
    assert launch(tmp_path, "--quick", "--who", *who) == [(4, name) for name in who]


@pytest.mark.extended
def test_starting_jobs_of_512_and_4096_ranks(tmp_path):
    assert launch(tmp_path, "--ranks", 512, "--who", "forked agents") == [(512, "forked agents")]
    assert len(launch(tmp_path, "--ranks", 512, 4096, "--who", "connections")) == 2


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("frameworks")  # Ray is not started beside others that take all cores
@pytest.mark.parametrize("engine", ["dask", "ray", "spark"])
def test_starting_ranks_where_an_engine_has_the_processes(tmp_path, engines, engine):
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java (.ci/packages installs it)")
    command = [PYTHON, BENCH / "engines.py", "--quick", "--runs", 1, "--who", engine, "torchrun"]
    rows = kept_by(run([*command, "--json", tmp_path / "rows.json"], timeout_s=500, **engines), tmp_path)["rows"]
    who = ["ringreduce.run", "its own tasks", "run", "first all-reduce"]
    assert [(row["who"], row["wrong"]) for row in rows] == [(each, None if "own" in each else 0) for each in who]
    assert all(row["time_s"] > 0 for row in rows)
    assert rows[2]["more_s"] == rows[2]["time_s"] - rows[0]["time_s"] - rows[1]["time_s"]


@pytest.mark.extended
def test_scaling_s_table_beside_a_clock(tmp_path):
    command = [PYTHON, BENCH / "scaling.py", "--quick", "--runs", "1", "--scripts", "digits", "--json"]
    rows = kept_by(run([*command, tmp_path / "rows.json"]), tmp_path)["rows"]
    assert [(row["script"], row["ranks"]) for row in rows] == [("digits", 1), ("digits", 2)]
    for row in rows:
        assert row["hand_ratio"] == row["scaling_hz"] / row["hand_hz"] > 0
        assert 0.5 < row["clock_ratio"] < 2, "both have timed the same steps"
    assert rows[0]["scaling_speedup"] == rows[0]["clock_speedup"] == rows[0]["hand_speedup"] == 1


def test_one_buffer(tmp_path):
    finished = ringrun(PYTHON, 2, BENCH / "allreduce.py", "--quick", *files(tmp_path))
    kept = outcome(finished, tmp_path)
    rows = table(finished, "algorithm", "size", "count", "type", "op", "time", "algbw", "busbw", "#wrong")
    assert len(rows) == len(kept["rows"])
    assert {row[-1] for row in rows} == {"0"}
    sizes = sorted({row["size"] for row in kept["rows"]})
    assert sizes[0] == 8
    assert sizes[-1] == 1 << 20
    everybody = {(row["algorithm"], row["size"]) for row in kept["rows"]}
    names = ("ring", "direct", "doubling", "shared", "allreduce_", "ordered()", "MPI_Allreduce", "torch gloo")
    assert {(name, size) for name in names for size in sizes} <= everybody
    for row in kept["rows"]:
        assert row["busbw_gbs"] == pytest.approx(row["size"] / row["time_us"] / 1e3)  # 2 ranks: 2 (P - 1) / P = 1
        assert len(row["runs_us"]) == 2


def test_gradients_and_horovod(tmp_path, horovod):
    finished = ringrun(PYTHON, 3, BENCH / "gradients.py", "--quick", *files(tmp_path), **horovod)
    kept = outcome(finished, tmp_path, "model who tensors size time algbw of floor of ours #wrong")
    who = [row["who"] for row in kept["rows"]]
    assert who[-1] == "Horovod", "whose thread polls: it comes after all others"
    ours, peers = (
        {"ringreduce, NumPy", "ringreduce, torch"},
        {"DDP gloo", "DDP ring", "fused window, simplest", "Horovod's way"},
    )
    assert ours | peers | {"floor: one copy"} < {*who}
    times = {row["who"]: row["time_us"] for row in kept["rows"]}
    for row in kept["rows"]:
        assert row["of_floor"] == pytest.approx(row["time_us"] / times["floor: one copy"])
        assert (row["wrong"] is None) == (row["who"] == "floor: one copy")


def test_short_calls(tmp_path):
    finished = ringrun(PYTHON, 2, BENCH / "short.py", "--quick", "--json", tmp_path / "rows.json")
    rows = kept_by(finished, tmp_path)["rows"]
    assert len(rows) == 3 + 1 + 3 * 4 * 3
    for row in rows:
        for state in row["state"]:
            assert len(state["round_trip_ns"]) == 1
            assert state["copy_gbs"] > 0
            assert state["stores"] == ["plain", "plain"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_halves(tmp_path, ranks):
    finished = ringrun(PYTHON, ranks, BENCH / "halves.py", "--quick", *files(tmp_path))
    kept = outcome(finished, tmp_path, "operation who size time faster #wrong")
    ours, others = ["in shared memory", "ringreduce"], ["MPI", "floor: one copy"]
    into = [*ours, "ringreduce, out=", *others]
    who = {"reducescatter": into, "allgather": into, "broadcast": [*ours, *others]}
    assert [(row["operation"], row["who"]) for row in kept["rows"]] == [(o, w) for o in who for w in who[o]]


def test_a_training_step(tmp_path, horovod):
    finished = ringrun(PYTHON, 2, BENCH / "train_step.py", "--quick", *files(tmp_path), **horovod)
    kept = outcome(finished, tmp_path)
    assert len(table(finished, "batch", "who", "parameters", "time", "added", "overhead", "#wrong")) == 9
    assert "# a hook takes " in finished.stdout
    overheads = {row["who"].strip(): row["overhead_percent"] for row in kept["rows"]}
    local = ["compute alone", "compute, barrier", "one copy"]
    assert list(overheads) == [
        *local,
        "ringreduce",
        "grouped by hand",
        "MPI_Allreduce",
        "DDP gloo",
        "DDP ring",
        "Horovod",
    ]
    assert overheads.pop("compute alone") is None
    assert None not in overheads.values()


def test_a_sharded_step(tmp_path):
    finished = ringrun(PYTHON, 2, BENCH / "sharded.py", "--quick", "--json", tmp_path / "rows.json")
    rows = kept_by(finished, tmp_path)["rows"]
    names = ["DistributedOptimizer", "ShardedOptimizer", "shared parameters", "ZeRO gloo"]
    assert [row["who"] for row in rows] == names
    assert all(abs(row["state_mb"] * 2 / rows[0]["state_mb"] - 1) < 0.01 for row in rows[1:3])


def test_a_step_of_trainer(tmp_path, front_ends):
    command = [PYTHON, BENCH / "trainer.py", "--quick", "--runs", 1, "--json", tmp_path / "rows.json"]
    finished = run(command, timeout_s=240, **front_ends)
    rows = {row["who"]: row for row in kept_by(finished, tmp_path)["rows"]}
    assert [*rows] == ["each alone", "gloo", "ring"]
    assert rows["ring"]["of_gloo"] == pytest.approx(rows["ring"]["added_ms"] / rows["gloo"]["added_ms"])
    assert rows["ring"]["wrong"] == rows["gloo"]["wrong"] == 0


def test_codecs(tmp_path):
    finished = run([PYTHON, BENCH / "codecs.py", "--quick", "--json", tmp_path / "rows.json"])
    rows = kept_by(finished, tmp_path)["rows"]
    headings = "codec by gradients encode decode both of float32 #wrong"
    assert len(table(finished, *headings.split())) == len(rows) == 28
    assert all(row["wrong"] == 0 and row["both_gbs"] < row["encode_gbs"] for row in rows)
    sizes = {"fp16": 1 / 2, "bf16": 1 / 2, "int8": 258 / 1024, "int4": 130 / 1024, "none": 1}
    sizes |= {"PowerSGD-4": 1 / 32, "PowerSGD-8": 1 / 16}
    assert {row["codec"]: row["of_float32"] for row in rows} == {**sizes, "int4, stochastic": 130 / 1024}


def test_growth(tmp_path):
    finished = run([PYTHON, BENCH / "growth.py", "--quick", *files(tmp_path)])
    kept = outcome(finished, tmp_path, "part ranks ranks tensors size who time predicted measured #wrong")
    parts = {part: [row for row in kept["rows"] if row["part"] == part] for part in ("tensors", "buffer", "predicted")}
    assert {row["ranks"] for row in parts["tensors"]} == {row["ranks"] for row in parts["buffer"]} == {2, 3}
    assert {row["tensors"] for row in parts["tensors"]} == {1, 30}
    ours = [row for row in parts["buffer"] if row["who"].strip() == "ring"]
    assert len(ours) == 4
    for row in ours:
        assert row["off"] == pytest.approx(row["time_us"] / row["predicted_us"])
    assert {row["ranks"] for row in parts["predicted"]} == {8, 16, 1000}
    assert {row["who"].strip() for row in parts["predicted"]} == {"ring", "hierarchical"}


@pytest.mark.adapters
def test_scale(tmp_path):
    finished = run([PYTHON, BENCH / "scale.py", "--quick", *files(tmp_path)])
    kept = kept_by(finished, tmp_path)
    rows = {row["who"].split()[0]: row for row in kept["rows"]}
    assert {"hierarchical", "halving", "doubling", "negotiation"} < set(rows)
    assert sum(row["taken"] == "<--" for row in rows.values()) == 1
    assert 0 < rows["hierarchical"]["share"] < 1
    assert rows["negotiation"]["messages"] > 0
    assert 0 < rows["ResNet-50"]["adds"] < 0.05


@pytest.mark.adapters
def test_what_negotiation_takes_with_many_ranks():
    finished = run([PYTHON, BENCH / "negotiation.py", "--ranks", 8, 16])
    assert finished.returncode == 0, finished.stdout
    _, *lines = finished.stdout.splitlines()
    rows = [[float(word) for word in line.split()] for line in lines]
    assert [row[:2] for row in rows] == [[8, 1], [16, 2]]
    assert rows[0][5] == 0 < rows[1][5], "one host's ranks send nothing of what is known"


def test_what_agreement_takes_without_data(tmp_path):
    finished = ringrun(PYTHON, 2, BENCH / "agreement.py", "--runs", 1, "--json", tmp_path / "rows.json")
    assert len(kept_by(finished, tmp_path)["rows"]) == 6


def memory(folder, *arguments):
    """The rows of bench/memory.py, one job each, by name."""
    finished = run(
        [PYTHON, BENCH / "memory.py", "--runs", 1, *arguments, "--json", folder / "rows.json"], timeout_s=300
    )
    rows = kept_by(finished, folder)["rows"]
    headings = "model who ranks private more shared peak #wrong"
    assert len(table(finished, *headings.split())) == len(rows)
    return {row["who"]: row for row in rows}


@pytest.mark.timeout(400)
def test_memory_of_a_rank(tmp_path):
    rows = memory(tmp_path, "--quick")
    ours = ["init()", "by name", "grouped", "DistributedOptimizer"]
    silent = {"alone", "torch alone", "init()"}
    assert {*rows} == {*silent, *ours, "MPI_Allreduce, packed", "DDP ring", "DDP gloo"}
    assert all(row["wrong"] == (None if who in silent else 0) for who, row in rows.items())
    assert rows["alone"]["shared_mb"] == rows["torch alone"]["shared_mb"] == rows["DDP gloo"]["shared_mb"] == 0
    for who in ours:
        assert rows[who]["shared_mb"] == pytest.approx(window_bytes(Settings()) / 1e6, abs=0.2), (
            "MPI has files there, too"
        )
    assert rows["DDP ring"]["shared_mb"] > rows["init()"]["shared_mb"]


@pytest.mark.adapters
@pytest.mark.timeout(400)
def test_a_rank_s_memory_does_not_grow_with_its_gradients(tmp_path):
    names = ["init()", "by name", "grouped", "MPI_Allreduce, packed"]
    rows = memory(tmp_path, "--ranks", 2, "--only", *names)
    started, *ours, packed = (rows[name] for name in names)
    for each in ours:
        assert each["more_mb"] - started["more_mb"] < 10
        assert each["peak_mb"] - started["peak_mb"] < 25, "the other rank's part of shared memory, too"
        assert each["shared_mb"] == started["shared_mb"]
    assert packed["more_mb"] > 102


@pytest.mark.adapters
def test_what_a_commit_takes():
    finished = run([PYTHON, BENCH / "elastic_commit.py", "--megabytes", 1, "--rounds", 2])
    assert finished.returncode == 0, finished.stdout
    assert [line.split()[0] for line in finished.stdout.splitlines()[1:4]] == ["commit", "deepcopy", "one"]


CHECKED = "check nan", "check divergence:10"


def test_recording_steps(tmp_path):
    finished = ringrun(PYTHON, 2, BENCH / "observing.py", "--quick", "--json", tmp_path / "rows.json")
    rows = kept_by(finished, tmp_path)["rows"]
    assert [row["who"].strip() for row in rows] == ["not recorded", "recorded, reported", *CHECKED]
    assert re.search(r"# an operation: [\d.]+ us, [12]\.00 in a step", finished.stdout), (
        "the gradients, and in some steps whether learning rates agree"
    )
    assert "# together " in finished.stdout
