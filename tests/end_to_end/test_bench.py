"""The benches run as a user starts them, in their quick form: what they print, keep and draw; never how fast it was."""

import argparse
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROGRAMS, ringrun, run
from tests.support.jobs import ROOT
from tests.support.patience import patient

PYTHON = Path(sys.executable)
BENCH = ROOT / "bench"
BOTH = f"{BENCH}:{BENCH / 'gpu'}"
MACHINE = ("cores", "processor", "ringreduce", "numpy", "python", "date", "mpi", "mpi4py", "torch")
HOROVOD = "from ringreduce.torch import *\n"


def bench_module(name):
    """A module of bench/, which is no package: its scripts find each other beside themselves."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


network = bench_module("network")
NO_NETWORK = network.why_not()
between_hosts = pytest.mark.skipif(bool(NO_NETWORK), reason=NO_NETWORK)


@pytest.fixture
def horovod(tmp_path):
    """Environment variables with which `import horovod.torch` finds something: ours, whose names are the same."""
    package = tmp_path / "packages" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(HOROVOD)
    return {"PYTHONPATH": str(package.parent)}


def kept_by(finished, folder):
    """The JSON of a bench that ran well."""
    assert finished.returncode == 0, finished.stdout
    return json.loads((folder / "rows.json").read_text())


def outcome(finished, folder, headings=""):
    """The same, after the checks that benches with a picture have in common.  headings: of the printed rows."""
    kept = kept_by(finished, folder)
    assert not headings or len(table(finished, *headings.split())) == len(kept["rows"])
    assert set(MACHINE) <= set(kept["header"])
    assert all(row["wrong"] in (0, None) for row in kept["rows"])
    assert any(row["wrong"] == 0 for row in kept["rows"])
    assert all(row["time_us"] > 0 for row in kept["rows"] if "runs_us" in row and "backward_alone_us" not in row)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    return kept


def table(finished, *headings):
    """The printed rows, as lists of words; the headings stand above them."""
    lines = [re.sub(r"^\[0\] ", "", line) for line in finished.stdout.splitlines()]
    (first,) = (k for k, line in enumerate(lines) if line.split() == list(headings))
    assert lines[first - 2].startswith("# ")
    return [line.split() for line in lines[first + 2 :] if line and not line.startswith("#")]


def files(folder):
    return ["--json", folder / "rows.json", "--plot", folder / "plot.png"]


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


def test_starting_ranks_where_an_engine_has_the_processes(tmp_path, engines):
    command = [PYTHON, BENCH / "engines.py", "--quick", "--runs", 1, "--who", "dask", "torchrun"]
    rows = kept_by(run([*command, "--json", tmp_path / "rows.json"], **engines), tmp_path)["rows"]
    who = ["ringreduce.run", "its own tasks", "run", "first all-reduce"]
    assert [(row["who"], row["wrong"]) for row in rows] == [(each, None if "own" in each else 0) for each in who]
    assert all(row["time_s"] > 0 for row in rows)
    assert rows[2]["more_s"] == rows[2]["time_s"] - rows[0]["time_s"] - rows[1]["time_s"]


@pytest.mark.extended
def test_scaling_s_table_beside_a_clock(tmp_path):
    command = [PYTHON, BENCH / "scaling.py", "--quick", "--runs", "1", "--scripts", "digits", "--json"]
    rows = kept_by(run([*command, tmp_path / "rows.json"]), tmp_path)["rows"]
    assert [(row["script"], row["ranks"]) for row in rows] == [("digits", 1), ("digits", 2)]
    assert all(row["ratio"] == row["scaling_hz"] / row["hand_hz"] > 0 for row in rows)
    assert rows[0]["scaling_speedup"] == rows[0]["hand_speedup"] == 1


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


@pytest.mark.adapters
def test_what_a_commit_takes():
    finished = run([PYTHON, BENCH / "elastic_commit.py", "--megabytes", 1, "--rounds", 2])
    assert finished.returncode == 0, finished.stdout
    assert [line.split()[0] for line in finished.stdout.splitlines()[1:4]] == ["commit", "deepcopy", "one"]


def test_hosts(tmp_path):
    finished = run([PYTHON, BENCH / "hosts.py", "--quick", *files(tmp_path)])
    if NO_NETWORK:
        assert finished.returncode == 0, finished.stdout
        assert finished.stdout == f"bench/hosts.py: skipped: {NO_NETWORK}\n"
        return
    kept = outcome(finished, tmp_path, "hosts ranks rate size who time share model simulated sent of least #wrong")
    rows = {row["who"].strip(): row for row in kept["rows"]}
    assert {"ring", "hierarchical", "allreduce_", "MPI_Allreduce", "torch gloo", "raw TCP"} < set(rows)
    assert rows["raw TCP"]["share"] == 1
    assert all(
        rows[name][by] > 0 for name in ("ring", "halving", "hierarchical") for by in ("model_us", "simulated_us")
    )
    host = rows["hierarchical"]["rank_hosts"]
    assert host[0] == host[1] != host[2] == host[3]
    for row in rows.values():
        assert row["of_least"] > 0.99, "nobody sends less than 2 (H - 1) / H of the buffer"
    assert rows["raw TCP"]["of_least"] < 1.2


@pytest.mark.extended
@between_hosts
@pytest.mark.parametrize(
    ("arguments", "who"),
    [
        (
            ["hosts.py", "--quick", "--short", "--sizes", 4096],
            {"MPI_Allreduce", "by hand", "doubling", "direct", "ordered()", "allreduce_"},
        ),
        (["gradients.py", "--quick", "--hosts", 2], {"ringreduce, NumPy", "DDP gloo", "DDP ring"}),
    ],
    ids=["short messages", "gradients"],
)
def test_between_hosts(tmp_path, arguments, who):
    bench, *rest = arguments
    kept = outcome(run([PYTHON, BENCH / bench, *rest, *files(tmp_path)]), tmp_path)
    rows = {row["who"].strip(): row for row in kept["rows"]}
    assert who < set(rows)
    assert bench == "hosts.py" or kept["header"]["hosts"] == 2
    assert bench != "hosts.py" or rows["by hand"]["wrong"] == 0


@pytest.mark.extended
@between_hosts
def test_slow_links(tmp_path):
    finished = run([PYTHON, BENCH / "slow_links.py", "--quick", "--runs", 1, "--json", tmp_path / "rows.json"])
    rows = kept_by(finished, tmp_path)["rows"]
    assert all(row["wrong"] == 0 for row in rows)
    found = {row["place"]: re.sub("-[0-9a-f]{6}", "", row["links"]) for row in rows if row["order"] == "found"}
    # a busy machine may name other hosts, too
    assert "host ring2's link carries 0.01" in found["host 2"]
    order = found["hosts 0 and 1"].rpartition("order of hosts: ")[2].split(", ")
    assert sorted(order) == [f"ring{k}" for k in range(4)]
    assert abs(order.index("ring0") - order.index("ring1")) == 2, "they are not neighbours around the ring"


@pytest.mark.extended
@between_hosts
def test_slow_wire(tmp_path):
    ways = ["int8", "int4", "PowerSGD-4", "LocalSGD", "DiLoCo int4", "DDP PowerSGD-4", "DDP post-local"]
    finished = run([PYTHON, BENCH / "slow_wire.py", "--quick", "--who", *ways, *files(tmp_path)], timeout_s=400)
    rows = {row["who"].strip(): row for row in kept_by(finished, tmp_path)["rows"]}
    assert list(rows) == ["fp32", *ways]
    shares = {who: row["of_fp32"] for who, row in rows.items()}
    assert shares["int8"] < 0.26
    assert shares["int4"] < 0.135
    assert shares["DiLoCo int4"] < 0.0075
    assert shares["LocalSGD"] == pytest.approx(1 / 8, rel=0.1)
    assert shares["PowerSGD-4"] == pytest.approx(shares["DDP PowerSGD-4"], rel=0.2)
    losses = {who: [loss for _, loss in row["losses"][0]] for who, row in rows.items()}
    assert all(later < earlier for each in losses.values() for earlier, later in itertools.pairwise(each))
    assert losses["int4"] != losses["fp32"], "another way, in name only"


@pytest.mark.extended
@between_hosts
def test_parameter_server(tmp_path):
    finished = run([PYTHON, BENCH / "parameter_server.py", "--quick", "--workers", 3, *files(tmp_path)])
    found = {row["who"].strip(): row for row in kept_by(finished, tmp_path)["rows"]}
    assert set(found) == {"ring", "1 server"}
    assert all(row["wrong"] == 0 for row in found.values())
    for row in found.values():
        assert row["busiest"] == pytest.approx(row["by_hand"], rel=0.4), "headers of frames, and of requests"
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.skipif(os.geteuid() != 0, reason="as root only: a user learns that root is missing")
def test_hosts_without_its_commands_is_skipped_and_says_why(tmp_path):
    finished = run([PYTHON, BENCH / "hosts.py"], PATH=str(tmp_path), returncode=0)
    assert finished.stdout == "bench/hosts.py: skipped: the command ip (iproute2) is not on PATH\n"


WAITS_INSIDE = f"""
import subprocess, sys
sys.path.insert(0, {str(BENCH)!r})
from network import Network
with Network(2) as network:
    network.shape(100)
    print(network.tag, flush=True)
    {{}}
    subprocess.run(["ip", "netns", "exec", network.names[1], "sleep", "1000"])
"""


@between_hosts
@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "an error"])
def test_hosts_leave_nothing_behind(end):
    error = 'raise ValueError("meant")' if end == "an error" else ""
    script = subprocess.Popen(
        [PYTHON, "-c", WAITS_INSIDE.format(error)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    tag = script.stdout.readline().decode().strip()
    assert tag
    if not error:
        assert tag in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        script.send_signal(getattr(signal, end))
    script.communicate(timeout=patient(30))
    assert script.returncode != 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    left += subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    assert tag not in left
    assert not list(Path("/etc").glob(f"netns/*{tag}"))


def test_wrong_elements_are_counted():
    finished = ringrun(PYTHON, 2, PROGRAMS / "wrong_elements.py", PYTHONPATH=BOTH, returncode=0)
    printed = dict(re.findall(r"^\[0\] (.*) (\d+)$", finished.stdout, re.MULTILINE))
    assert (printed["buffer"], printed["right"], printed["wrong"]) == ("1", "0", "10")
    assert int(printed["not reduced"]) > 50


def test_a_wrong_element_fails_the_bench():
    common = bench_module("common")
    report = common.Report("name", {}, [common.Column("wrong", "#wrong")], False, "")
    report.add({"wrong": None})
    report.add({"wrong": 0})
    options = argparse.Namespace(json=None, plot=None)
    report.finish(options)
    report.add({"wrong": 3})
    with pytest.raises(SystemExit, match=r"bench/name\.py: 3 wrong elements"):
        report.finish(options)


@pytest.mark.parametrize(
    ("arguments", "sizes", "rate"),
    [([], [8, 64], 3), (["--quick"], [8], 3), (["--quick", "--sizes", "1", "2", "--rate", "0"], [1, 2], 0)],
    ids=["usual", "quick", "given"],
)
def test_what_is_not_given_has_its_usual_or_its_quick_value(monkeypatch, arguments, sizes, rate):
    common, found = bench_module("common"), []
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    flags = [common.flag("--sizes", [8, 64], [8]), common.flag("--rate", 3)]
    common.main("name", "", [], lambda options, _: found.append(options), flags, runs=5, note="{runs} runs")
    assert (found[0].sizes, found[0].rate, found[0].runs) == (sizes, rate, 2 if "--quick" in arguments else 5)


def test_a_job_that_fails_ends_its_bench_with_what_it_printed():
    with pytest.raises(SystemExit, match=r"(?s)ringrun -np 2 .*: exit code 1:\n.*no such luck"):
        bench_module("common").run_job(["-np", "2"], ["-c", "raise SystemExit('no such luck')"], patient(60))


RUNS = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
from common import run_command
run_command(sys.argv[2:], float(sys.argv[1]))
"""
TOLD = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(sys.argv[1]).touch()))
pathlib.Path(sys.argv[2]).touch()
time.sleep(1000)
"""


@pytest.mark.parametrize("seconds", [2, 1000], ids=["it takes too long", "the bench is ended"])
def test_what_a_bench_runs_is_told_to_end(tmp_path, seconds):
    begun, told = tmp_path / "begun", tmp_path / "told"
    command = [PYTHON, "-c", TOLD, told, begun]
    bench = subprocess.Popen([PYTHON, "-c", RUNS, str(seconds), *command], stderr=subprocess.PIPE)
    while not begun.exists():
        time.sleep(0.05)
    if seconds > 2:
        bench.terminate()
    bench.communicate(timeout=patient(60))
    assert told.exists()


NO_CUPY = "raise ImportError('there is none here')\n"
NO_DEVICE = """
class runtime:
    class CUDARuntimeError(RuntimeError):
        pass

    @staticmethod
    def getDeviceCount():
        raise runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

class cuda:
    runtime = runtime
"""
WITHOUT_A_GPU = {
    NO_CUPY: "CuPy cannot be imported (there is none here); pip install '.[cuda12]' or '.[cuda13]'",
    NO_DEVICE: "CUDA finds no driver or no device: cudaErrorNoDevice: no CUDA-capable device is detected",
}


@pytest.mark.parametrize("name", ["kernels", "gradients", "train_step", "all"])
@pytest.mark.parametrize("cupy", WITHOUT_A_GPU, ids=["no CuPy", "no device"])
def test_gpu_benches_without_a_gpu_are_skipped_and_say_why(tmp_path, name, cupy):
    (tmp_path / "cupy.py").write_text(cupy)
    script = BENCH / "gpu" / f"{name}.py"
    if name in ("kernels", "all"):
        command = [PYTHON, script, *([tmp_path / "results"] if name == "all" else [])]
        finished = run(command, PYTHONPATH=str(tmp_path))
    else:
        finished = ringrun(PYTHON, 2, script, PYTHONPATH=str(tmp_path))
    assert finished.returncode == 0, finished.stdout
    said = finished.stdout.removeprefix("[0] ")
    assert said == f"bench/gpu/{name}.py: skipped: {WITHOUT_A_GPU[cupy]}\n"
    assert not (tmp_path / "results").exists()


def test_everything_for_gpus_is_run_and_told_whatever_fails(tmp_path):
    (tmp_path / "bench.json").write_text("of an earlier run")
    run([PYTHON, PROGRAMS / "everything.py", tmp_path, "--minutes", 1], PYTHONPATH=BOTH, returncode=1)
    page = (tmp_path / "results.md").read_text().splitlines()
    assert page[0].startswith("# GPU results, 20")
    assert page[2].startswith("gpu none at all, driver 1.2, ")
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page if line.startswith("| ")]
    steps = {row[0]: (row[1], row[3]) for row in cells[:6]}
    assert steps.pop("step") == ("", "its last line")
    assert steps.pop("good") == ("passed", r"`a\|b`")
    assert steps.pop("bad") == ("FAILED with exit code 1", "`no good`")
    assert steps.pop("long") == ("FAILED: not done after 2 s", "`begun`")
    assert steps == {"bench": ("passed", "`a              1.3         -`"), "late": ("passed", "``")}
    assert cells[6:] == [["who", "time (us)", "#wrong"], ["a", "1.3", "-"]]
    assert page[-2:] == ["- bar: reached", "- left out: b"]
    assert (tmp_path / "good.txt").read_text() == "a|b\n\n"
    assert run(["pgrep", "-f", "os.fork.*begun"]).stdout == "", "nothing is left"


def test_what_there_was_no_time_for_is_told_and_is_no_success(tmp_path):
    finished = run([PYTHON, PROGRAMS / "everything.py", tmp_path, "--minutes", 0], PYTHONPATH=BOTH, returncode=1)
    assert "begun" not in finished.stdout


@pytest.fixture
def runner(monkeypatch):
    """bench/run.py, which finds the other modules beside itself."""
    monkeypatch.syspath_prepend(BENCH)
    return bench_module("run")


def test_the_whole_set_is_taken_once(runner, tmp_path):
    command = [PYTHON, BENCH / "run.py", "--results", tmp_path, "--quick", "--only", "start"]
    assert "1 of 1: start" in run(command).stdout
    [path] = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    [job] = kept["sets"]["start"]
    assert kept["quick"]
    assert job["command"].startswith("python bench/launch.py --ranks 8 ")
    assert [row["who"] for row in job["rows"]] == ["mpirun", "ringrun"]
    assert "has them all" in run(command).stdout
    assert json.loads(path.read_text()) == kept
    results = runner.Results(tmp_path, quick=False)
    assert len(results.missing()) == sum(each.jobs for each in runner.SETS.values()), "a quick run counts for nothing"
    assert {name for name, number in results.missing() if number} == {
        name for name, each in runner.SETS.items() if each.jobs > 1
    }
    results.write()
    assert "has figures of a whole run" in run(command, returncode=1).stdout


def test_the_fastest_of_mpis_settings_for_about_that_size_is_taken(runner, tmp_path):
    results = runner.Results(tmp_path, quick=False)
    assert runner.setting(("tuning, 2 ranks", 44), results) is None
    rows = [(40, "slow", 2.5, "1"), (40, "fast", 1.5, "2"), (900, "other", 0.5, "3")]
    rows = [{"size": a, "who": b, "time_us": c, "setting": {"coll": d}} for a, b, c, d in rows]
    results.jobs("tuning, 2 ranks").append({"rows": rows})
    assert runner.setting(("tuning, 2 ranks", 44), results) == ("fast", {"OMPI_MCA_coll": "2"})


CHECKED = "check nan", "check divergence:10"


def test_recording_steps(tmp_path):
    finished = ringrun(PYTHON, 2, BENCH / "observing.py", "--quick", "--json", tmp_path / "rows.json")
    rows = kept_by(finished, tmp_path)["rows"]
    assert [row["who"].strip() for row in rows] == ["not recorded", "recorded, reported", *CHECKED]
    assert re.search(r"# an operation: [\d.]+ us, [12]\.00 in a step", finished.stdout), (
        "the gradients, and in some steps whether learning rates agree"
    )
    assert "# together " in finished.stdout
