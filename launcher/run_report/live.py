"""What the ranks of a running job do just now: a table made from what they say of their steps. Pure functions."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..text import columns, counted, shortened

Totals = Mapping[str, Any]
"""What a rank has said last, as `Collector.latest` has it."""

_SENT = (
    *("rank", "host", "age_s", "step", "step_s", "computing_s", "blocked_s", "moving_s", "hidden_s", "bytes", "rss"),
    "lines",
)

_SILENT_S = 5.0
_WORTH_SAYING = 0.05  # of a step, that others wait for a rank
_LONGEST_HOST, _LONGEST_LINE = 20, 40
_HEAD = ("RANK", "HOST", "STEP", "MS/STEP", "COMPUTING", "WAITING", "EXPOSED", "MB/S", "RSS MB", "AT")


def encode(latest: Sequence[Totals]) -> list[str]:
    """Return a line of JSON for each rank, with what `row` needs."""
    return [json.dumps({name: said[name] for name in _SENT}) for said in latest]


class Row(NamedTuple):
    """One rank, by step: `waiting_ms` for others to submit, `exposed_ms` for data that moves meanwhile."""

    rank: int
    host: str
    step: int
    step_ms: float
    computing_ms: float
    waiting_ms: float
    exposed_ms: float
    mb_s: float
    rss_mb: float
    at: str

    def cells(self, mark: str) -> list[str]:
        """What the table shows of it; numbers stand below the ends of their heads."""
        times = (self.step_ms, self.computing_ms, self.waiting_ms, self.exposed_ms, self.mb_s)
        shown = [f"{mark}{self.rank}", self.host, str(self.step), *(f"{each:.1f}" for each in times)]
        shown += [f"{self.rss_mb:.0f}", self.at]
        return [
            text if head in ("HOST", "AT") else text.rjust(len(head)) for head, text in zip(_HEAD, shown, strict=True)
        ]


def exposed_s(said: Totals) -> float:
    """Return how long data moved while training waited for it."""
    return float(said["moving_s"] - said["hidden_s"])


def row(before: Totals, now: Totals) -> Row:
    """Return what a rank did between two of its messages; if no step ended between them, since its recording began."""
    before = before if before["step"] < now["step"] else {}

    def since(name: str) -> float:
        return float(now[name] - before.get(name, 0))

    ms = 1000 / max(1.0, since("step"))
    moved_s = exposed_s(now) - (exposed_s(before) if before else 0.0)
    waiting_s = max(0.0, since("blocked_s") - moved_s)
    seconds = since("step_s")
    return Row(
        rank=now["rank"],
        host=shortened(now["host"], _LONGEST_HOST),
        step=now["step"],
        step_ms=seconds * ms,
        computing_ms=since("computing_s") * ms,
        waiting_ms=waiting_s * ms,
        exposed_ms=moved_s * ms,
        mb_s=since("bytes") / max(seconds, 1e-9) / 1e6,
        rss_mb=now["rss"] / 1e6,
        at=_where(before.get("lines", {}), now),
    )


def _where(before: Mapping[str, int], now: Totals) -> str:
    """Return the line at which a rank was seen most often, or that it says no more."""
    if now["age_s"] > _SILENT_S:
        return f"silent for {now['age_s']:.0f} s"
    seen = {line: count - before.get(line, 0) for line, count in now["lines"].items()}
    return shortened(max(seen, key=seen.__getitem__), _LONGEST_LINE) if seen else ""


def late_ms(rows: Sequence[Row]) -> list[float]:
    """Return by how much less each rank waits than the others do: so long they wait for it, in each step."""
    total, others = sum(each.waiting_ms for each in rows), max(1, len(rows) - 1)
    return [(total - each.waiting_ms) / others - each.waiting_ms for each in rows]


def table(rows: Sequence[Row], size: int, width: int, height: int) -> list[str]:
    """Return the lines that show a job of `size` ranks, those of `rows`: as many ranks as fit, the latest first."""
    stepped = [each for each in rows if each.step]
    if not stepped:
        said = f"{len(rows)} of {counted(size, 'rank')} record their steps, and none has ended one yet"
        return [said, "a step ends when an optimizer of ringreduce's has stepped, or with rr.mark_step()"]
    late = dict(zip(stepped, late_ms(stepped), strict=True))
    lines = [line for text in _summary(stepped, late) for line in textwrap.wrap(text, width)]
    place = height - len(lines) - 1
    shown = list(rows)
    if len(shown) > place:
        shown = sorted(rows, key=lambda each: -late.get(each, 0.0))[: max(1, place - 1)]
    marks = ["> " if _is_late(each, late.get(each, 0.0)) else "" for each in shown]
    lines += columns([_HEAD, *(each.cells(mark) for each, mark in zip(shown, marks, strict=True))])
    if more := len(rows) - len(shown):
        lines.append(f"and {more} more, for which others wait less")
    return [shortened(line, width) for line in lines]


def _is_late(row: Row, late_ms: float) -> bool:
    return late_ms > _WORTH_SAYING * row.step_ms


def _summary(rows: Sequence[Row], late: Mapping[Row, float]) -> list[str]:
    """Return what a step consists of, on average over the ranks, and who is waited for most."""

    def mean(name: str) -> float:
        return float(sum(getattr(each, name) for each in rows) / len(rows))

    step_ms = mean("step_ms")
    parts = (
        f"{mean('computing_ms'):.1f} computing + {mean('waiting_ms'):.1f} waiting + {mean('exposed_ms'):.1f} exposed"
    )
    speed = f" ({1000 / step_ms:.3g}/s)" if step_ms else ""
    lines = [f"step {max(each.step for each in rows)}: {step_ms:.1f} ms{speed} = {parts}"]
    worst = max(rows, key=late.__getitem__)
    if _is_late(worst, late[worst]):
        at = f", at {worst.at}" if worst.at else ""
        lines.append(
            f"rank {worst.rank} ({worst.host}) is late{at}: the others wait {late[worst]:.1f} ms a step for it"
        )
    return lines
