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

_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]{1,9})\))?")


def slurm_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the nodes of the Slurm job that `environ` belongs to, and their tasks; None outside of a job."""
    nodelist = environ.get(NODELIST)
    if not nodelist:
        return None
    names = expand_nodelist(nodelist)
    why = f"{NODELIST}={quoted(nodelist)}"
    for variable, slots_of in _SOURCES.items():
        if value := environ.get(variable):
            slots = slots_of(environ, variable, value, len(names))
            hosts = [Host(name, number) for name, number in zip(names, slots, strict=False)]
            return Allocation("slurm", tuple(merge(hosts)), f"{why}, {variable}={quoted(value)}")
    return Allocation("slurm", tuple(merge([Host(name) for name in names])), why)


def _tasks_per_node(_environ: Mapping[str, str], variable: str, value: str, nodes: int) -> list[int]:
    """`4(x2),3`: the tasks of each node."""
    return _per_node(variable, value, nodes)


def _tasks(_environ: Mapping[str, str], variable: str, value: str, nodes: int) -> list[int]:
    """The tasks of the job, spread evenly, the first nodes taking what is left over; a node without any falls away."""
    share, left = divmod(parse_slots(value, variable), nodes)
    return [number for node in range(nodes) if (number := share + (node < left))]


def _cpus_per_node(environ: Mapping[str, str], variable: str, value: str, nodes: int) -> list[int]:
    """`16(x2),8`: the CPUs of each node, shared out to tasks."""
    each = _cpus_per_task(environ)
    return [max(1, cpus // each) for cpus in _per_node(variable, value, nodes)]


def _cpus_on_node(environ: Mapping[str, str], variable: str, value: str, nodes: int) -> list[int]:
    """The CPUs of this node, taken for those of each."""
    return [max(1, parse_slots(value, variable) // _cpus_per_task(environ))] * nodes


_SOURCES = {
    "SLURM_TASKS_PER_NODE": _tasks_per_node,
    "SLURM_NTASKS": _tasks,
    "SLURM_JOB_CPUS_PER_NODE": _cpus_per_node,
    "SLURM_CPUS_ON_NODE": _cpus_on_node,
}
"""The variables that hold the slots, the most exact first."""


def _cpus_per_task(environ: Mapping[str, str]) -> int:
    variable = "SLURM_CPUS_PER_TASK"
    return parse_slots(environ.get(variable) or "1", variable)


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
