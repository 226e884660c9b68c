"""The hosts of a Slurm job, from its variables, without asking `scontrol`.

SLURM_JOB_NODELIST is compressed: `n[001-003,7],login-[1-2]x`. The number of tasks on each node, in the same order, is
SLURM_TASKS_PER_NODE: `4(x2),3`. See "OUTPUT ENVIRONMENT VARIABLES" in sbatch(1).
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping

from ..errors import UsageError
from .host import Allocation, Host, check_name, merge, parse_slots, shown

MAX_NODES = 65536
"""As many as Slurm itself expands; a longer list is a mistake, and would fill memory."""

_NODELIST = "SLURM_JOB_NODELIST"
_NODE = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]{1,9})\))?")


def slurm_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the nodes of the Slurm job that `environ` belongs to, and their tasks; None outside of a job."""
    nodelist = environ.get(_NODELIST)
    if not nodelist:
        return None
    names = expand_nodelist(nodelist)
    why = f"{_NODELIST}={shown(nodelist)}"
    for variable, slots_of in _SOURCES.items():
        if value := environ.get(variable):
            slots = slots_of(environ, variable, value, len(names))
            hosts = [Host(name, number) for name, number in zip(names, slots, strict=False)]
            return Allocation("slurm", tuple(merge(hosts)), f"{why}, {variable}={shown(value)}")
    return Allocation("slurm", tuple(merge([Host(name) for name in names])), why)


def expand_nodelist(text: str) -> list[str]:
    """Return the names in Slurm's compressed list, in its order; UsageError if it is no such list."""
    where = f"{_NODELIST}={shown(text)}"
    nodes = _NODE.findall(text)
    if not nodes or ",".join(nodes) != text:
        raise UsageError(f"{where}: expected names with ranges in brackets, as in n[001-003,7],m[1-2]x")
    names: list[str] = []
    for node in nodes:
        literals_and_ranges = _BRACKETS.split(node)
        choices = [_expand_ranges(ranges, where) for ranges in literals_and_ranges[1::2]]
        if len(names) + math.prod(map(len, choices)) > MAX_NODES:
            raise UsageError(f"{where}: more than {MAX_NODES} nodes")
        for numbers in itertools.product(*choices):
            parts = itertools.zip_longest(literals_and_ranges[::2], numbers, fillvalue="")
            names.append("".join(itertools.chain.from_iterable(parts)))
            check_name(names[-1], where)
    return names


def _expand_ranges(text: str, where: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise UsageError(f"{where}: expected a number or a rising range, as in 001-003, not {shown(part)}")
        if len(numbers) + int(last) - int(first) >= MAX_NODES:
            raise UsageError(f"{where}: more than {MAX_NODES} nodes")
        numbers += (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


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
"""What tells the slots, the most exact first."""


def _cpus_per_task(environ: Mapping[str, str]) -> int:
    variable = "SLURM_CPUS_PER_TASK"
    return parse_slots(environ.get(variable) or "1", variable)


def _per_node(variable: str, text: str, nodes: int) -> list[int]:
    where = f"{variable}={shown(text)}"
    counts = list(_repeated(text, where))
    told = sum(times for _, times in counts)
    if told != nodes:  # told first: `1(x999999999)` must not be written out
        raise UsageError(f"{where}: expected numbers for the {nodes} nodes of {_NODELIST}, not for {told}")
    return [number for number, times in counts for _ in range(times)]


def _repeated(text: str, where: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None:
            raise UsageError(f"{where}: expected a number for each node, as in 4(x2),3, not {shown(part)}")
        yield parse_slots(match[1], where), int(match[2] or 1)
