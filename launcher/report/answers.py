"""What ranks answered when they were asked what they do (wire.Answer), as people read it: equal answers together."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..connection.wire import Answer
from ..text import numbered

NO_ANSWER = "did not answer in time"
NO_PYTHON = "no Python code runs"


def waiting(asked: Iterable[int], answers: Mapping[int, Answer]) -> list[str]:
    """Return one line for the ranks that wait for the same: `ranks 0,2-3: allreduce 'layer3.w' (train.py:41)`."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(asked):
        answer = answers.get(rank)
        groups.setdefault((answer.doing or answer.silent or NO_PYTHON) if answer else NO_ANSWER, []).append(rank)
    return [f"{numbered('rank', ranks)}: {text}" for text, ranks in groups.items()]


def stacks_report(
    asked: Collection[int], answers: Mapping[int, Answer], size: int, hosts: Mapping[int, str]
) -> list[str]:
    """Return all ranks' stacks; those of ranks that are at the same place once.

    asked: the ranks that run; the others have ended, or not started.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in sorted(asked):
        answer = answers.get(rank) or Answer(0, "", "", NO_ANSWER)
        groups.setdefault((answer.doing, answer.stacks, answer.silent), []).append(rank)
    lines = [line for answer, ranks in groups.items() for line in _group(ranks, answer, size, hosts)]
    if others := set(range(size)) - set(asked):
        lines.append(f"{numbered('rank', others)} of {size}: not running")
    return lines


def _group(ranks: Sequence[int], answer: tuple[str, str, str], size: int, hosts: Mapping[int, str]) -> list[str]:
    doing, stacks, silent = answer
    names = sorted({hosts[rank] for rank in ranks if rank in hosts})
    where = f" on {names[0]}" if len(names) == 1 else f" on {len(names)} hosts" if names else ""
    what = "; ".join(filter(None, [doing, silent])) or NO_PYTHON
    return [f"{numbered('rank', ranks)} of {size}{where}: {what}", *stacks.splitlines()]
