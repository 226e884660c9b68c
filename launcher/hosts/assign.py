"""Which hosts a job may use, and how many ranks each gets."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..machine.placement import automatic_size
from ..machine.topology import read_topology
from ..text import counted, listed
from .allocation import find_allocation
from .host import Host, is_here, parse_host_list
from .hostfile import discover, read_hostfile, read_text
from .nodelist import expand_nodelist


@dataclass(frozen=True)
class Found:
    """The hosts that the user or a batch system names."""

    hosts: Sequence[Host]
    why: str
    """Where they were named."""
    in_slurm: bool
    """They belong to a Slurm job that ringrun runs in, and Slurm starts processes there."""


def named_hosts(listed: str | None, file: str | None, place: str = "", script: Sequence[str] = ()) -> Found | None:
    """Return the hosts of -H, of --hostfile, or of the allocation that this process belongs to, if there are any.

    place:  where they were given, to begin a message about them, if that is not the command line
    script: the argv of --host-discovery-script, which prints them
    """
    _refuse_being_many(os.environ)
    if listed is not None and file is not None:
        raise UsageError(f"{place}-H and --hostfile cannot be combined; use only one")
    if script and (listed is not None or file is not None):
        raise UsageError(f"{place}--host-discovery-script cannot be combined with -H or --hostfile; use only one")
    try:
        if listed is not None:
            hosts, why = parse_host_list(listed), f"-H {listed}"
        elif file is not None:
            hosts, why = read_hostfile(file), f"--hostfile {file}"
        elif script:
            hosts, why = discover(script), f"--host-discovery-script {' '.join(script)}"
    except UsageError as error:
        raise UsageError(f"{place}{error}") from None
    if listed is None and file is None and not script:
        allocation = find_allocation(os.environ, read_text)
        return Found(allocation.hosts, allocation.why, allocation.kind == "slurm") if allocation else None
    nodes: list[str] = []
    with contextlib.suppress(UsageError):  # a list that is none: the hosts were named because of that
        nodes = expand_nodelist(os.environ.get("SLURM_JOB_NODELIST", ""))
    return Found(hosts, why, all(host.name in nodes for host in hosts))


def without(hosts: Sequence[Host], excluded: Sequence[Host], flag: str) -> list[Host]:
    """Return the hosts that are left, with the slots that are left.

    excluded: without slots: not this host; with slots: so many fewer on it.
    Raises UsageError where a host is not among them, its slots are not said or are fewer, or no host is left.
    """
    slots = {host.name: host.slots for host in hosts}
    names = {host.name for host in excluded}
    for each in excluded:
        own = slots.get(each.name)
        if each.name not in slots:
            raise UsageError(f"{flag} {each}: there is no such host; there are {listed([str(host) for host in hosts])}")
        if each.slots is not None and own is None:
            raise UsageError(f"{flag} {each}: how many slots {each.name} has is unknown; name it without a number")
        if each.slots is not None and own is not None and each.slots > own:
            raise UsageError(f"{flag} {each}: {each.name} has only {counted(own, 'slot')}")
        slots[each.name] = 0 if each.slots is None or own is None else own - each.slots
    left = [replace(host, slots=slots[host.name]) for host in hosts if slots[host.name] != 0 or host.name not in names]
    if not left:
        raise UsageError(f"{flag} {','.join(map(str, excluded))}: no host is left")
    return left


def may_get_ranks(found: Found, size: int | None) -> Sequence[Host]:
    """Return the hosts that may get any of `size` ranks; nothing if this is the only one."""
    slots_are_said = all(host.slots is not None for host in found.hosts)
    hosts = [host for host, _ in assign(found.hosts, size, lambda host: 1)] if slots_are_said else found.hosts
    return [] if all(map(is_here, hosts)) else hosts


def place_ranks(
    found: Found | None, size: int | None, slots_of: Callable[[Host], int] | None = None
) -> tuple[int, Sequence[tuple[Host, int]]]:
    """Return how many ranks there are and, if some go to other hosts, which host gets how many, in order.

    slots_of:  how many ranks a host gets whose slots nobody has said; by default as many as this one would.
    """

    def as_here(_: Host | None = None) -> int:
        return automatic_size(read_topology(os.environ))

    if found is None:
        return size or as_here(), ()
    assigned = assign(found.hosts, size, slots_of or as_here)
    elsewhere = [host for host, _ in assigned if not is_here(host)]
    return sum(count for _, count in assigned), assigned if elsewhere else ()


def _refuse_being_many(environ: Mapping[str, str]) -> None:
    """Raise UsageError if srun has started ringrun once for every rank."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and tasks not in ("", "0", "1"):
        raise UsageError(
            f"srun has started ringrun {tasks} times (SLURM_STEP_NUM_TASKS={tasks}), and each would start all ranks; "
            "start it once, in the batch script or in salloc, without srun; or start ringrun join once on each node; "
            "salloc also gives you a shell, as `srun --pty bash` does"
        )


def assign(hosts: Sequence[Host], size: int | None, default_slots: Callable[[Host], int]) -> list[tuple[Host, int]]:
    """Return which of the `hosts` (one or more) get ranks, in order, with how many: `size` in all, or every slot.

    A host is filled before the next gets one. Slots that were said are a limit: UsageError when `size` passes it.
    Where a host's slots were not said, `default_slots` of it are filled at first; the ranks for which there is
    no slot go to these hosts too, spread evenly.
    """
    ranks: list[int] = []
    left = size
    for host in hosts:
        slots = default_slots(host) if host.slots is None and left != 0 else host.slots or 0
        taken = slots if left is None else min(slots, left)
        ranks.append(taken)
        left = None if left is None else left - taken
    if size is not None and left:
        _add_evenly(left, ranks, _unsaid(hosts, size, sum(ranks)))
    return [(host, count) for host, count in zip(hosts, ranks, strict=True) if count]


def _unsaid(hosts: Sequence[Host], size: int, slots: int) -> list[int]:
    """Return which hosts have slots that were not said; UsageError if none has."""
    unsaid = [index for index, host in enumerate(hosts) if host.slots is None]
    if unsaid:
        return unsaid
    enough = Host(hosts[0].name, (hosts[0].slots or 0) + size - slots)
    raise UsageError(
        f"-np {size}: the hosts have only {counted(slots, 'slot')} ({listed([str(host) for host in hosts])}); "
        f"start at most {counted(slots, 'rank')}, or give a host more slots, as in {enough}"
    )


def _add_evenly(left: int, ranks: list[int], indices: Sequence[int]) -> None:
    share, rest = divmod(left, len(indices))
    for number, index in enumerate(indices):
        ranks[index] += share + (number < rest)
