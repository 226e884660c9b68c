"""What all benches share: wrong elements, flags, the ends of what they start; the sets of bench/run.py and of GPUs."""

import argparse
import json
import re
import subprocess
import sys
import time

import pytest

from tests.end_to_end.conftest import PROGRAMS, ringrun, run
from tests.support.benches import BENCH, BOTH, PYTHON, bench_module
from tests.support.patience import patient


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
