"""The nodes of a Slurm job, through `srun`: one step with one task on each of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ..engines.slurm import STEP, on_nodes
from .base import Answer, Runner
from .parallel import Outcome, Task
from .refusals import program_problem, srun_problem

# a task says whose it is and how the program ended, behind its stderr; its number is srun's label
_SCRIPT = '"$@"; echo "ringrun: exit $? on $SLURMD_NODENAME" >&2'
_LABEL = re.compile(rb" *([0-9]+): ?")
_EXIT = re.compile(r"ringrun: exit ([0-9]{1,3}) on (\S+)\n?")
# of the step that ringrun itself may run in; what a new step gets is said with flags
_OF_A_STEP = ("SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_CPU_BIND", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK")


class Slurm(Runner):
    """Runs programs on the nodes of this Slurm job: one task on each, whose lines begin with its number.

    The step takes none of the job's slots (--overlap).
    """

    def __init__(self, srun: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._srun = srun

    def tasks(self, names: Sequence[str], argv: Sequence[str], variables: Mapping[str, str]) -> list[Task]:
        """See `Runner.tasks`: one srun for all."""
        flags = [*STEP, *on_nodes(names, 1), "--mpi=none", "--cpu-bind=none", "--input=none", "--label"]
        command = [self._srun, *flags, f"--ntasks={len(names)}", "sh", "-c", _SCRIPT, "ringrun", *argv]
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_STEP}
        return [Task(command, environment={**inherited, **variables})]

    def answers(self, names: Sequence[str], program: str, outcomes: Sequence[Outcome]) -> list[Answer]:
        """See `Runner.answers`: each node's, out of what the one srun wrote."""
        (outcome,) = outcomes
        out, err = by_task(outcome.stdout), by_task(outcome.stderr)
        found = {}
        for task, (lines, _) in err.items():
            stderr = lines.decode(errors="replace")
            if match := _EXIT.search(stderr):
                stdout, end = out.get(task, (b"", 0))
                before, code = stderr[: match.start()], int(match[1])
                arrived_s = outcome.arrived_by(end) if end else 0.0
                found[match[2]] = (stdout, before, code, arrived_s, program_problem(program, code, before))
        own = b"".join(line for line in outcome.stderr.splitlines(keepends=True) if not _LABEL.match(line))
        missing = srun_problem(outcome.code, own.decode(errors="replace"), outcome.not_run, self._timeout_s)
        return [Answer(name, *found[name]) if name in found else Answer(name, problem=missing) for name in names]


def by_task(data: bytes) -> dict[bytes, tuple[bytes, int]]:
    """Return what each task wrote, from lines with labels (`0: text`), and where in `data` its last line ends."""
    lines: dict[bytes, list[bytes]] = {}
    ends: dict[bytes, int] = {}
    end = 0
    for line in data.splitlines(keepends=True):
        end += len(line)
        if match := _LABEL.match(line):
            lines.setdefault(match[1], []).append(line[match.end() :])
            ends[match[1]] = end
    return {task: (b"".join(parts), ends[task]) for task, parts in lines.items()}
