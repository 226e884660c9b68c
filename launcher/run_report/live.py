"""What the ranks of a running job do just now: a table made from what they say of their steps. Pure functions."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..text import columns, counted, shortened

Totals = Mapping[str, Any]
"""What a rank has said last, as `Collector.latest` has it."""

STEP_ENDS = "a step ends when a ringreduce optimizer steps, or the script calls rr.mark_step()"

_NOT_SENT = ("histogram", "by_algorithm", "by_name", "sent", "send_s")  # long, and not shown

_SILENT_S = 5.0
_WORTH_SAYING = 0.05  # of a step, that others wait for a rank
_LONGEST_HOST, _LONGEST_LINE = 20, 40
_HEAD = ("RANK", "HOST", "STEP", "MS/STEP", "COMPUTING", "WAITING", "EXPOSED", "MB/S", "RSS MB", "AT")


def encode(latest: Sequence[Totals]) -> list[str]:
    """Return a line of JSON for each rank, with what `row` needs."""
    return [json.dumps({name: said[name] for name in said if name not in _NOT_SENT}) for said in latest]


class Row(NamedTuple):
    """One rank, by step: `waiting_ms` for others to submit, `exposed_ms` while data moves.

    lines: how many ms of a step it is at which line of the script.
    """

    rank: int
    host: str
    step: int
    step_ms: float
    computing_ms: float
    waiting_ms: float
    exposed_ms: float
    mb_s: float
    rss_mb: float
    lines: Mapping[str, float]
    silent_s: float

    def cells(self, mark: str) -> list[str]:
        """What the table shows of it; numbers stand below the ends of their heads."""
        times = (self.step_ms, self.computing_ms, self.waiting_ms, self.exposed_ms, self.mb_s)
        shown = [f"{mark}{self.rank}", self.host, str(self.step), *(f"{each:.1f}" for each in times)]
        at = f"silent for {self.silent_s:.0f} s" if self.silent_s > _SILENT_S else _highest(self.lines)
        shown += [f"{self.rss_mb:.0f}", at]
        texts = ("HOST", "AT")
        return [text if head in texts else text.rjust(len(head)) for head, text in zip(_HEAD, shown, strict=True)]


def exposed_s(said: Totals) -> float:
    """Return how long data moved while training waited for it."""
    return float(said["moving_s"] - said["hidden_s"])


def row(before: Totals, now: Totals) -> Row:
    """Return what a rank did between two of its messages; if no step ended between them, since its recording began."""
    before = before if 0 < before["step"] < now["step"] else {}  # of the first step nothing is in the sums

    def since(name: str) -> float:
        return float(now[name] - before.get(name, 0))

    ms = 1000 / max(1.0, since("step"))
    moved_s = exposed_s(now) - (exposed_s(before) if before else 0.0)
    waiting_s = max(0.0, since("blocked_s") - moved_s)
    seconds, seen = since("step_s"), before.get("lines", {})
    seen = {line: max(0, count - seen.get(line, 0)) for line, count in now["lines"].items()}
    samples = max(1, sum(seen.values()))
    return Row(
        rank=now["rank"],
        host=shortened(now["host"], _LONGEST_HOST),
        step=now["step"],
        step_ms=seconds * ms,
        computing_ms=since("computing_s") * ms,
        waiting_ms=waiting_s * ms,
        exposed_ms=moved_s * ms,
        mb_s=since("bytes") / seconds / 1e6 if seconds else 0.0,
        rss_mb=now["rss"] / 1e6,
        lines={line: count / samples * seconds * ms for line, count in seen.items()},
        silent_s=now["age_s"],
    )


def _highest(lines: Mapping[str, float]) -> str:
    """Return the line with the highest number; nothing if there is none above 0."""
    line = max(lines, key=lines.__getitem__, default="")
    return shortened(line, _LONGEST_LINE) if line and lines[line] > 0 else ""


def late_ms(rows: Sequence[Row]) -> dict[int, float]:
    """Return how long others wait in a step for each rank that is late: so much less does it wait itself."""
    total, others = sum(each.waiting_ms for each in rows), max(1, len(rows) - 1)
    late = [(each, (total - each.waiting_ms) / others - each.waiting_ms) for each in rows]
    return {each.rank: ms for each, ms in late if ms > _WORTH_SAYING * each.step_ms}


def table(rows: Sequence[Row], size: int, width: int, height: int) -> list[str]:
    """Return the lines that show a job of `size` ranks, those of `rows`: as many ranks as fit, the latest first."""
    stepped = [each for each in rows if each.step]
    if not stepped:
        said = f"{len(rows)} of {counted(size, 'rank')} record their steps; none has finished one yet"
        return [said, STEP_ENDS]
    late = late_ms(stepped)
    lines = [line for text in _summary(stepped, late) for line in textwrap.wrap(text, width)]
    shown, place = list(rows), height - len(lines) - 1
    if len(shown) > place:
        shown = sorted(rows, key=lambda each: each.waiting_ms)[: max(1, place - 1)]
    lines += columns([_HEAD, *(each.cells("> " * (each.rank in late)) for each in shown)])
    if more := len(rows) - len(shown):
        lines.append(f"and {more} more, for which others wait less")
    return [shortened(line, width) for line in lines]


def _summary(rows: Sequence[Row], late: Mapping[int, float]) -> Iterator[str]:
    """Yield what a step consists of, on average over the ranks, and who is waited for most."""
    names = ("step_ms", "computing_ms", "waiting_ms", "exposed_ms")
    step_ms, *parts = (sum(getattr(each, name) for each in rows) / len(rows) for name in names)
    sum_of = "{:.1f} computing + {:.1f} waiting + {:.1f} exposed".format(*parts)
    yield f"step {max(each.step for each in rows)}: {step_ms:.1f} ms ({1000 / max(step_ms, 1e-3):.3g}/s) = {sum_of}"
    if late:
        worst = max((each for each in rows if each.rank in late), key=lambda each: late[each.rank])
        others = [each.lines for each in rows if each is not worst]
        more = {line: ms - sum(each.get(line, 0) for each in others) / len(others) for line, ms in worst.lines.items()}
        where = f", at {at}" if (at := _highest(more)) else ""
        who, ms = f"rank {worst.rank} ({worst.host})", late[worst.rank]
        yield f"{who} is late{where}: the others wait {ms:.1f} ms a step for it"
