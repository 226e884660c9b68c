"""Who has other parameters than the rest, and why: what `divergence` says of the fingerprints of all ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ringreduce.execution.signature import ranks_text

TRAINS, OWNED, BUFFER = 1, 2, 4
"""Flags of an array: gradients are computed for it; the optimizer has it; it is no parameter."""
SHOWN = 3

Ranks = Mapping[int, tuple[int, int]]  # an array's fingerprint and flags, by rank
Compared = dict[str, dict[int, tuple[int, int]]]  # by its name


def text(compared: Compared, kind: int, equal_at: int | None, at: int, steps: Mapping[int, int]) -> str:
    """Which arrays differ, on which ranks, since when, and why, where that can be told.

    kind:  0, parameters; or BUFFER.
    equal_at, at: after how many steps they were equal the last time, None for never, and were not any more.
    steps: how many steps each rank has made; those that are missing in `compared` lack the array.
    """
    ours = {name: ranks for name, ranks in compared.items() if next(iter(ranks.values()))[1] & BUFFER == kind}
    differing = {name: ranks for name, ranks in ours.items() if len(ranks) < len(steps) or len({*ranks.values()}) > 1}
    first, *others = differing
    what = "buffer" if kind else "parameter"
    shown = ", ".join(map(repr, others[:SHOWN])) + (", …" if len(others) > SHOWN else "")
    so_do = f"; so do {len(others)} more of {len(ours)}: {shown}" if others else f"; the other {len(ours) - 1} do not"
    since = f"equal after {equal_at}" if equal_at is not None else "not compared before"
    differ = _who({rank: differing[first].get(rank) for rank in steps})
    why = _why(differing, kind, equal_at, steps)
    return f"after {at} steps ({since}) {what} {first!r} differs: {differ}{so_do}. {why}"


def _groups(values: Mapping[int, object]) -> list[list[int]]:
    """The ranks with equal values, the largest group first."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank, value in values.items():
        found[value].append(rank)
    return sorted(found.values(), key=len, reverse=True)


def _who(values: Mapping[int, object]) -> str:
    """Such as `rank 1 from ranks 0,2-7`; where there is no majority, the groups."""
    groups = _groups(values)
    if len(groups) > 1 and len(groups[0]) > len(groups[1]):
        return f"{ranks_text(rank for each in groups[1:] for rank in each)} from {ranks_text(groups[0])}"
    if all(len(each) == 1 for each in groups):
        return f"each of {ranks_text(values)} has its own"
    return " from ".join(map(ranks_text, groups))


def _why(differing: Compared, kind: int, equal_at: int | None, steps: Mapping[int, int]) -> str:
    for flag, without in ((TRAINS, "is frozen (requires_grad=False)"), (OWNED, "is not in the optimizer")):
        for name, ranks in differing.items():
            lack = [rank for rank, (_, flags) in ranks.items() if not flags & flag]
            if kind == 0 and 0 < len(lack) < len(ranks):
                return f"On {ranks_text(lack)}, {name!r} {without}, unlike on {ranks_text(set(ranks) - set(lack))}"
    if len(set(steps.values())) > 1:
        *groups, most = sorted(_groups(steps), key=lambda each: steps[each[0]])
        fewer = ", ".join(f"{ranks_text(each)} took {steps[each[0]]} steps" for each in groups)
        return f"{fewer}, {ranks_text(most)} {steps[most[0]]}: some ranks skipped steps that others took"
    if kind == BUFFER:
        return (
            "Each rank computes buffers such as BatchNorm's from its own data: use rr.torch.SyncBatchNorm, or "
            "broadcast_parameters(model.state_dict(), root_rank=0) before you evaluate or save"
        )
    if all(not flags & OWNED for ranks in differing.values() for _, flags in ranks.values()):
        return "No DistributedOptimizer has it, so its gradient is not reduced: pass it to the optimizer"
    if equal_at is None:
        return (
            "They were never found equal: call broadcast_parameters(model.state_dict(), root_rank=0) before training, "
            "or give all ranks the same seed"
        )
    return (
        "All ranks took the same number of steps, with equal gradients: something else has changed it, such as code "
        "that runs on some ranks only, or faulty memory"
    )
