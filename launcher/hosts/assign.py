"""How many ranks each host gets."""

from collections.abc import Callable, Sequence

from ..errors import UsageError
from .host import Host

_MAX_SHOWN = 8


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
    names = [str(host) for host in hosts[:_MAX_SHOWN]]
    if len(hosts) > _MAX_SHOWN:
        names.append(f"and {len(hosts) - _MAX_SHOWN} more")
    enough = Host(hosts[0].name, (hosts[0].slots or 0) + size - slots)
    raise UsageError(
        f"-np {size}: the hosts have {slots} slots ({', '.join(names)}); "
        f"start at most {slots} ranks, or give a host more slots, as in {enough}"
    )


def _add_evenly(left: int, ranks: list[int], indices: Sequence[int]) -> None:
    share, rest = divmod(left, len(indices))
    for number, index in enumerate(indices):
        ranks[index] += share + (number < rest)
