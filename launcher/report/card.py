"""The failure card: what ringrun prints last when a rank has failed, to be read at a glance, on a terminal or in a log.

    -- ringrun: rank 1 of 4 failed first -------------------------------------------
    how         exit code 1
    where       host node7, pid 4711, GPU 1, ran for 2 min 5 s
    the others  ranks 0,2-3: allreduce 'layer3.w' (train.py:41)
    Traceback (most recent call last):
      …
    --------------------------------------------------------------------------------

Facts are wrapped; what the rank itself wrote, and what checks have found, is never cut.
"""

import itertools
import textwrap
from collections.abc import Collection, Mapping, Sequence

from ..connection.wire import Answer
from ..text import duration
from .answers import waiting
from .outcome import RankEnd, evidence, failures_of_others, in_words

WIDTH = 80
_LABEL = 12
_FINDINGS = 3  # that are shown
_RED_BOLD, _FAINT, _RESET = "\x1b[1;31m", "\x1b[2m", "\x1b[0m"


def card(
    cause: RankEnd,
    ends: Collection[RankEnd],
    size: int,
    *,
    launcher_tail: Sequence[str] = (),
    found: Sequence[str] = (),
    asked: Collection[int] = (),
    answers: Mapping[int, Answer] | None = None,
    left: Mapping[int, str] | None = None,
    going_on: str = "",
    colour: bool = False,
) -> list[str]:
    """Return the card's lines.

    found:         what checks have found before.
    asked, answers: the ranks that still ran when the first one failed, and what they answered.
    left:          why ranks have left in order: where the cause has lost one of them, that one is the card's subject.
    going_on:      how an elastic job goes on without this rank.
    """
    gone = min((left or {}).keys() & cause.blames, default=None)
    if left and gone is not None:
        title = f"rank {gone} of {size} left first: {left[gone]}"
        facts = _rows("where", [_where(end) for end in ends if end.rank == gone])
        facts += _rows("so failed", [f"rank {cause.rank}: {in_words(cause)}", cause.oom, _where(cause)])
    else:
        title = f"rank {cause.rank} of {size} failed{'' if going_on else ' first'}"
        facts = [*_rows("how", [in_words(cause), cause.oom]), *_rows("where", [_where(cause)])]
    # a rank that failed at the same moment has nothing more to say, unless it had been quick enough to say it
    silent = {end.rank for end in ends if end.failed} - {rank for rank, said in (answers or {}).items() if said.doing}
    others = set(asked) - {cause.rank, gone} - silent
    more = [f"and {len(found) - _FINDINGS} more findings"] if len(found) > _FINDINGS else []
    labels = itertools.chain(["found"], itertools.repeat(""))
    facts += [label.ljust(_LABEL) + text for text, label in zip([*found[:_FINDINGS], *more], labels, strict=False)]
    facts += _rows("failed too", failures_of_others(cause, ends))
    facts += _rows("the others", waiting(others, answers or {}))
    head, foot = f"-- ringrun: {title} ".ljust(WIDTH, "-"), "-" * WIDTH
    facts += _rows("continuing", [going_on])
    if colour:
        head, foot = f"{_RED_BOLD}{head}{_RESET}", f"{_FAINT}{foot}{_RESET}"
    whose = "it" if gone is None else f"rank {cause.rank}"
    return [head, *facts, *evidence(cause, launcher_tail, whose), foot]


def _where(end: RankEnd) -> str:
    ran = "" if end.ran_s is None else f"ran for {duration(end.ran_s)}"
    return ", ".join(filter(None, [f"host {end.host}", f"pid {end.pid}" if end.pid else "", end.device, ran]))


def _rows(label: str, texts: Sequence[str]) -> list[str]:
    """Return `texts`, wrapped, next to the label of the first."""
    lines: list[str] = []
    for text in texts:
        if text:
            first = label.ljust(_LABEL) if not lines else " " * _LABEL
            wrapped = textwrap.wrap(text, WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
            lines += [first + wrapped[0], *(" " * (_LABEL + 2) + line for line in wrapped[1:])]
    return lines
