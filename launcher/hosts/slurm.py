"""The hosts of a Slurm job, from its variables, without asking `scontrol`.

SLURM_JOBNODELIST is compressed: `n[001-003,7],login-[1-2]x`. The number of tasks on each node, in the same order, is
SLURM_TASKS_PER_NODE: `4(x2),3`. See "OUTPUT ENVIRONMENT VARIABLES" in sbatch(1).
"""

import re
from collections.abc import Iterator, Mapping

from ..errors import UsageError
from ..text import quoted
from .host import Allocation, Host, merge, parse_slots
from .nodelist import NODELIST, expand_nodelist

_TASKS, _CPUS, _CPUS_PER_TASK = "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_PER_TASK"
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]{1,9})\))?")


def slurm_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the nodes of the Slurm job that `environ` belongs to, and their tasks; None outside of a job."""
    nodelist = environ.get(NODELIST)
    if not nodelist:
        return None
    names = expand_nodelist(nodelist)
    why = f"{NODELIST}={quoted(nodelist)}"
    slots: list[int | None] = [None] * len(names)
    if tasks := environ.get(_TASKS):
        slots, why = [*_per_node(_TASKS, tasks, len(names))], f"{why}, {_TASKS}={quoted(tasks)}"
    elif cpus := environ.get(_CPUS):
        each = parse_slots(environ.get(_CPUS_PER_TASK) or "1", _CPUS_PER_TASK)
        slots = [max(1, number // each) for number in _per_node(_CPUS, cpus, len(names))]
        why = f"{why}, {_CPUS}={quoted(cpus)}"
    return Allocation("slurm", tuple(merge([Host(*each) for each in zip(names, slots, strict=True)])), why)


def _per_node(variable: str, text: str, nodes: int) -> list[int]:
    where = f"{variable}={quoted(text)}"
    counts = list(_repeated(text, where))
    given = sum(times for _, times in counts)
    if given != nodes:  # checked first: `1(x999999999)` must not be written out
        raise UsageError(f"{where}: expected numbers for the {nodes} nodes of {NODELIST}, not for {given}")
    return [number for number, times in counts for _ in range(times)]


def _repeated(text: str, where: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None:
            raise UsageError(f"{where}: expected a number for each node, as in 4(x2),3, got {quoted(part)}")
        yield parse_slots(match[1], where), int(match[2] or 1)
