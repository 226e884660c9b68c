"""ringrun scaling: is my script faster with more ranks, and if not, why?

    ringrun scaling python train.py --epochs 3           with 1, 2, 4, … ranks, up to one per core or GPU
    ringrun scaling -np 1,2,8 -H h1:4,h2:4 python train.py

It runs the unchanged script with each number of ranks in turn, three times over. Each time it leaves out the first
steps, measures some seconds of training and ends the run. Then it prints a table of steps and examples per second, the
speed-up, and what limits it; how many ranks pay off; and what would help.

The script runs many times in the current folder and is ended by SIGTERM: have it write where nothing can be lost, and
do not let it resume from a checkpoint. Its output is not shown, but if a run fails, the reason is.

A step ends when a ringreduce optimizer steps; over the backend "ring", or with a single rank, any torch optimizer will
do. Examples are counted if they come from a torch DataLoader, Keras's fit(), or a tf.data.Dataset in a loop. Otherwise
call rr.mark_step(examples=N) after each step, where N is how many examples this rank has just trained on.

All other flags (such as --hostfile and --env) and settings are those of ringrun; see ringrun --help.

Exit code: 0 with a table, 1 if nothing could be measured, 2 for a wrong command line; 130 after Ctrl-C, 143 after
SIGTERM and 129 after SIGHUP, with the results so far.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import cli
from ..arguments import Parser, parse_rank_count, parse_seconds, whole
from ..cli import say
from ..config import resolve as config
from ..errors import LauncherError, UsageError
from ..folders import current_folder, private_folder
from ..hosts import Found, may_get_ranks
from ..job.plan import find_command
from ..machine.cpus import limited
from ..machine.topology import read_topology
from ..output.files import refusal
from ..request import checked
from ..text import counted, listed
from .analyse import Answer, analyse, rows, table
from .measure import LEAST_STEPS, Bounds, Run, measure

_USAGE = "ringrun scaling [-np N,N,…] [options] command [arguments …]"
_OWN = {
    "--seconds": ("S", "10", "how long to measure each run, after its first steps (10)"),
    "--steps": ("N", None, "end each run soon after N steps are measured, if that is earlier"),
    "--rounds": ("N", "3", "how many times to run each number of ranks (3)"),
    "--wait": ("S", "120", "how long a run may take to finish its first steps (120)"),
    "--json": ("FILE", None, "write all figures to FILE"),
    "--html": ("FILE", None, "write them to FILE as a web page"),
}
"""Our own flags: what stands for the value, the default, and the help."""

_NOT_HERE = (
    *("report", "twice", "restarts", "timeout", "dry_run", "ranks", "metrics_port"),
    *("elastic", "min_np", "max_np", "spares", "max_failures", "blacklist_cooldown_range", "host_discovery_script"),
)
_MOST = 1_000_000
_MOST_FILES = 5000
_LONGEST = 60  # characters of a file's name
VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    sizes: Sequence[int]
    rounds: int
    bounds: Bounds
    flags: Sequence[str]
    """Those of ringrun."""
    command: Sequence[str]
    folder: str
    """Where ranks start."""
    cores: float = math.inf
    """How many this host has for all ranks; infinite where ranks are on other hosts, or compute on GPUs."""

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield the round and the number of ranks of each run; every other round backwards, as a machine may drift."""
        for number in range(self.rounds):
            for size in self.sizes if number % 2 == 0 else reversed(self.sizes):
                yield number, size


def _parser() -> Parser:
    parser = cli.parser("ringrun scaling", _USAGE, __doc__ or "")
    _add_own(parser)
    parser.add_command()
    parser.print_help = _manual().print_help  # type: ignore[method-assign]
    return parser


def _manual() -> Parser:
    """Return what knows our own flags alone: their manual would be lost among ringrun's."""
    manual = Parser("ringrun scaling", _USAGE, __doc__)
    ranks = "the numbers of ranks to compare, as in 1,2,4; auto: up to one per core or GPU"
    _add_own(manual, [("-np", "N,N,…", ranks)])
    return manual


def _add_own(parser: Parser, more: Sequence[tuple[str, str, str]] = ()) -> None:
    add = parser.group("What is measured")
    for name, metavar, text in more:
        add(name, metavar=metavar, help=text)
    for name, (metavar, default, text) in _OWN.items():
        add(name, metavar=metavar, default=default, help=text)


def run(arguments: Sequence[str]) -> int:
    """Do what `ringrun scaling` is asked for; returns the exit code. LauncherError where that cannot be done."""
    resolved = config.resolve(_parser(), arguments, os.environ)
    return cli.run_resolved(resolved, lambda: _run(resolved, passed_on(arguments, resolved.options.command)))


def passed_on(arguments: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the flags of a command line that each run's ringrun gets; ours, which all have a value, are left out."""
    kept, words = [], iter(arguments[: len(arguments) - len(command)])
    for word in words:
        if word.partition("=")[0] not in {*_OWN, "-np", "-n", "--num-proc"}:
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    return kept[:-1] if kept[-1:] == ["--"] else kept


def sizes(text: str, flag: str, most: int) -> list[int]:
    """Return the numbers of ranks in `text`; for auto 1, 2, 4 and so on, and `most`; UsageError for what is none.

    >>> sizes("auto", "-np", 6), sizes("4,1", "-np", 2), sizes("auto", "-np", 1)
    ([1, 2, 4, 6], [1, 4], [1, 2])
    """
    if text == "auto":
        return sorted({2**power for power in range(most.bit_length())} | {2, most})
    found = sorted({parse_rank_count(each.strip(), flag) or 0 for each in text.split(",")})
    if 0 in found or len(found) < 2:
        raise UsageError(f"{flag} {text}: expected several numbers of ranks to compare, as in {flag} 1,2,4")
    return found


def plan(resolved: config.Config, flags: Sequence[str]) -> Plan:
    """Return what is to be run, checked; UsageError for what cannot be."""
    options, flag = resolved.options, resolved.flag
    for name in _NOT_HERE:
        if resolved.sources[name] != "default":
            raise UsageError(f"{flag(name)}: ringrun scaling does not support it; leave it out")
    for name in (own.removeprefix("--") for own in _OWN):
        if resolved.place(name):  # each run's ringrun reads the file, too
            raise UsageError(f"{flag(name)}: give it on the command line of ringrun scaling, not in the file")
    text, options.np = options.np, "auto"
    request = checked(resolved)
    program = find_command(request.job.command)
    steps = options.steps and whole(options.steps, flag("steps"), LEAST_STEPS, _MOST)
    bounds = Bounds(parse_seconds(options.seconds, flag("seconds")), steps, parse_seconds(options.wait, flag("wait")))
    rounds = whole(options.rounds, flag("rounds"), 1, _MOST)
    most = cli.size_of(request, program) if text == "auto" else 0
    folder = request.job.folder or current_folder()
    return Plan(sizes(text, flag("np"), most), rounds, bounds, flags, options.command, folder, _cores(request.found))


def _cores(found: Found | None) -> float:
    """Return `Plan.cores`."""
    topology = read_topology(os.environ)
    if topology.gpus or (found and may_get_ranks(found, None)):
        return math.inf
    return limited(len(topology.cores), topology.quota)


def _run(resolved: config.Config, flags: Sequence[str]) -> int:
    todo, options = plan(resolved, flags), resolved.options
    for name in ("json", "html"):
        _require_writable(getattr(options, name), resolved.flag(name))
    if options.json and options.html and os.path.realpath(options.json) == os.path.realpath(options.html):
        raise UsageError(f"--json {options.json} and --html {options.html} are one file; give two")
    ranks = ", ".join(map(str, todo.sizes))
    say(f"ringrun: measuring {todo.rounds * len(todo.sizes)} runs one after the other, with {ranks} ranks in turn")
    rounds: list[dict[int, Run]] = [{} for _ in range(todo.rounds)]
    before, code = _files(todo.folder), 0
    try:
        _measure_all(todo, rounds)
    except (KeyboardInterrupt, SystemExit) as why:
        code = int(why.code or 0) if isinstance(why, SystemExit) else 130
        say("ringrun: interrupted; results so far:")
    answer = analyse(rounds, todo.cores)
    changed = sorted(name for name, state in _files(todo.folder).items() if before.get(name) != state)
    own = [options.output_filename, getattr(resolved.settings.get("timeline"), "text", None)]
    written = [name for name in changed if not _is_ours(os.path.join(todo.folder, name), own)]
    notes = [*answer.notes, *([_written(written)] if written else [])]
    if answer.measured:
        print("\n".join(table(answer)))
    advice = ["What would help:", *(f"  {text}" for text in answer.advice)] if answer.advice else []
    print("\n".join([answer.sentence, *notes, *advice]), flush=True)
    document = as_json(answer, notes, todo.command)
    if options.json:
        _write(options.json, "--json", json.dumps(document, indent=1) + "\n")
    if options.html:
        from .page import render

        _write(options.html, "--html", render(document))
    return code or int(not answer.measured)


def _measure_all(todo: Plan, rounds: Sequence[dict[int, Run]]) -> None:
    """Fill in the rounds; a number of ranks that fails in its first run is left out afterwards."""
    failed: set[int] = set()
    total = todo.rounds * len(todo.sizes)
    for count, (number, size) in enumerate(todo.order(), 1):
        if size in failed:
            continue
        with private_folder() as folder:
            found = measure(size, todo.flags, todo.command, folder, todo.bounds)
        rounds[number][size] = found
        if found.problem and not number:
            failed.add(size)
        figures = found.problem or f"{found.steps_s:.3g} steps/s over {found.steps} steps"
        say(f"ringrun: run {count} of {total}, {counted(size, 'rank')}: {figures}")


def as_json(answer: Answer, notes: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Return what --json writes."""
    found = [
        asdict(each) | {"runs": [_json_of(run) for run in each.runs], "shown": shown}
        for each, shown in zip(answer.sizes, rows(answer), strict=True)
    ]
    texts = {"sentence": answer.sentence, "notes": list(notes), "advice": list(answer.advice)}
    return {
        "version": VERSION,
        "command": list(command),
        "held": answer.held,
        "best": answer.best,
        **texts,
        "sizes": found,
    }


def _json_of(run: Run) -> dict[str, Any]:
    return {**asdict(run), "computing_ms": run.computing_ms, "examples_s": run.examples_s}


def _files(folder: str) -> Mapping[str, tuple[int, int]]:
    """Return the state of the files below `folder`, of the first _MOST_FILES; hidden ones are nobody's results."""
    found: dict[str, tuple[int, int]] = {}
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for name in names:
            try:
                state = os.stat(os.path.join(path, name))
            except OSError:
                continue
            found[os.path.relpath(os.path.join(path, name), folder)] = state.st_size, state.st_mtime_ns
        if len(found) > _MOST_FILES:
            break
    return found


def _is_ours(path: str, own: Sequence[str | None]) -> bool:
    """Return whether it is not the script that writes `path`: it is, or is in, one of `own`, or takes our output."""
    real = Path(os.path.realpath(path))
    with contextlib.suppress(OSError):  # closed, or gone
        if any(os.path.samestat(os.stat(real), os.fstat(stream)) for stream in (1, 2)):
            return True
    return any(real.is_relative_to(os.path.realpath(each)) for each in own if each)


def _written(names: Sequence[str]) -> str:
    shown = listed([name[-_LONGEST:] for name in names], 4)
    return (
        f"files have changed here: {shown}; if the script wrote them, every run wrote them again, and a script that "
        "resumes from a checkpoint did different work in each run"
    )


def _require_writable(path: str | None, flag: str) -> None:
    """Raise UsageError now, and not after some minutes, where `path` cannot be written; leave no file behind."""
    if path is not None:
        is_new = not os.path.lexists(path)
        try:
            with open(path, "ab"):
                pass
            if is_new:
                os.unlink(path)
        except OSError as error:
            raise refusal(flag, path, error, "file") from error


def _write(path: str, flag: str, text: str) -> None:
    try:
        Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise LauncherError(f"{flag} {path}: {error.strerror or error}") from error
