"""Who has other parameters than the rest, and why: what `divergence` says of the fingerprints of all ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ringreduce.execution.signature import ranks_text

TRAINS, OWNED, BUFFER, NUMBER = 1, 2, 4, 8
"""Flags: gradients are computed for an array; the optimizer has it; it is no parameter; it is no array but a number."""
KINDS = (NUMBER, 0, BUFFER)
"""In the order in which they are reported: a learning rate that differs is why parameters do."""
_WORDS = {NUMBER: "value", 0: "parameter", BUFFER: "buffer"}
SHOWN = 3

Ranks = Mapping[int, tuple[str, int]]  # an array's fingerprint, or a number, and flags, by rank
Compared = dict[str, dict[int, tuple[str, int]]]  # by its name


def kind_of(flags: int) -> int:
    """One of KINDS."""
    return flags & (BUFFER | NUMBER)


def _of_kind(compared: Compared, kind: int) -> Compared:
    return {name: ranks for name, ranks in compared.items() if kind_of(next(iter(ranks.values()))[1]) == kind}


def differing(compared: Compared, kind: int, steps: Mapping[int, int]) -> Compared:
    """What ranks have differently of a kind, or some lack.  steps: how many steps each rank has made."""
    ours = _of_kind(compared, kind)
    return {name: ranks for name, ranks in ours.items() if len(ranks) < len(steps) or len({*ranks.values()}) > 1}


def text(compared: Compared, kind: int, equal_at: int | None, at: int, steps: Mapping[int, int]) -> str:
    """Which arrays, or numbers, differ, on which ranks, since when, and why, where that can be told.

    equal_at, at: after how many steps they were equal the last time, None for never, and were not any more.
    steps: how many steps each rank has made; those that are missing in `compared` lack the array.
    """
    differ, count = differing(compared, kind, steps), len(_of_kind(compared, kind))
    first, *others = differ
    shown = ", ".join(map(repr, others[:SHOWN])) + (", …" if len(others) > SHOWN else "")
    so_do = f"; so do {len(others)} more of {count}: {shown}" if others else f"; the other {count - 1} do not"
    so_do = so_do if count > 1 else ""
    since = f"equal after {equal_at}" if equal_at is not None else "not compared before"
    by_rank = {rank: differ[first].get(rank) for rank in steps}
    who = values_text({rank: each and each[0] for rank, each in by_rank.items()}) if kind == NUMBER else _who(by_rank)
    values = list(differing(compared, NUMBER, steps)) if kind == 0 else []
    why = _why(differ, kind, equal_at, steps, values)
    return f"after {at} step{'s' * (at != 1)} ({since}) {_WORDS[kind]} {first!r} differs: {who}{so_do}. {why}"


def _groups(values: Mapping[int, object]) -> list[list[int]]:
    """The ranks with equal values, the largest group first."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank, value in values.items():
        found[value].append(rank)
    return sorted(found.values(), key=len, reverse=True)


def values_text(values: Mapping[int, str | None]) -> str:
    """Such as `rank 1 has 0.01, ranks 0,2-7 have 0.1`; the smallest group first."""
    groups = sorted(_groups(values), key=len)
    said = [
        f"{ranks_text(each)} {'have' if each[1:] else 'has'} {values[each[0]] or 'none'}" for each in groups[:SHOWN]
    ]
    return ", ".join(said) + (", …" if len(groups) > SHOWN else "")


def _who(values: Mapping[int, object]) -> str:
    """Such as `rank 1 from ranks 0,2-7`; where there is no majority, the groups."""
    groups = _groups(values)
    if len(groups) > 1 and len(groups[0]) > len(groups[1]):
        return f"{ranks_text(rank for each in groups[1:] for rank in each)} from {ranks_text(groups[0])}"
    if all(len(each) == 1 for each in groups):
        return f"each of {ranks_text(values)} has its own"
    return " from ".join(map(ranks_text, groups))


def _why(differing: Compared, kind: int, equal_at: int | None, steps: Mapping[int, int], values: list[str]) -> str:
    for flag, without in ((TRAINS, "is frozen (requires_grad=False)"), (OWNED, "is not in the optimizer")):
        for name, ranks in differing.items():
            lack = [rank for rank, (_, flags) in ranks.items() if not flags & flag]
            if kind == 0 and 0 < len(lack) < len(ranks):
                return f"On {ranks_text(lack)}, {name!r} {without}, unlike on {ranks_text(set(ranks) - set(lack))}"
    for name, ranks in differing.items():
        if kind != NUMBER and (without_it := set(steps) - set(ranks)):
            same = "build the same model on all ranks, and freeze the same layers"
            return f"On {ranks_text(without_it)}, {name!r} is missing: {same}"
    if len(set(steps.values())) > 1:
        *groups, most = sorted(_groups(steps), key=lambda each: steps[each[0]])
        fewer = ", ".join(f"{ranks_text(each)} took {steps[each[0]]} steps" for each in groups)
        return f"{fewer}, {ranks_text(most)} {steps[most[0]]}: some ranks skipped steps that others took"
    if kind == NUMBER:
        return (
            "If it steers training, as a learning rate does, all ranks must decide it alike: a scheduler or a callback "
            "that looks at a loss must get the average over all ranks (allreduce)"
        )
    if kind == BUFFER:
        return (
            "Each rank computes buffers such as BatchNorm's from its own data: use rr.torch.SyncBatchNorm, or "
            "broadcast them from rank 0 before you evaluate or save"
        )
    if all(not flags & OWNED for ranks in differing.values() for _, flags in ranks.values()):
        return "No DistributedOptimizer has it, so its gradient is not reduced: pass it to the optimizer"
    if equal_at is None:
        return (
            "They were never found equal: broadcast them from rank 0 before training, with broadcast_parameters or "
            "Keras' BroadcastGlobalVariablesCallback, or give all ranks the same seed"
        )
    if values:
        return f"Value {values[0]!r} has differed since the same step: look there first"
    return (
        "All ranks took the same number of steps, with equal gradients: something else has changed it, such as code "
        "that runs on only some ranks, or faulty memory"
    )
