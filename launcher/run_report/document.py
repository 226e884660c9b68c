"""report.json: what docs/run-report.md describes, made of what has been collected. Figures have three digits, as shown.

of the whole job          the time of steps, over_time, memory, events
since each rank began     algorithms, tensors
of the last minutes       links, lines and what else explains a straggler
of the last sampled steps where a step's time went, stragglers, timeline
"""

import math
import shlex
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from ..report.outcome import in_words
from .analyse import Shares, Step, average, behind, gains, in_common, shares, usual
from .causes import KINDS, Link, Links, Straggler, host_names, links, stragglers
from .collect import Bin, Collector, Event, Rank, seconds_of
from .live import STEP_ENDS, exposed_s

VERSION = 1
_MOST_TENSORS, _MOST_LINES = 50, 16
_FULL = 0.8  # of what a link can carry
_MUCH = 0.1  # of a step
_MORE_CORES = "use fewer ranks per host, or fewer threads per rank, and stop other programs there"
_NOBODY = -1  # no rank
_PARTS = ("computing", "exposed", "waiting", "hidden")

Json = dict[str, Any]


def document(collector: Collector) -> Json:
    """Return the report of a job that runs, or has ended. Takes some ms, for hundreds of ranks seconds."""
    job, everyone, bins, events = _snapshot(collector)
    ranks = {rank: each for rank, each in everyone.items() if not each.is_gone}
    steps = _steps(ranks)
    measured = shares(steps.values()) or {rank: _of_totals(each) for rank, each in ranks.items() if each.totals}
    all_links, hosts = links(ranks), {rank: each.host for rank, each in everyone.items()} | host_names(ranks)
    of_links = {pair: link for pair, link in all_links.items() if link.nbytes}
    late = stragglers(measured, gains(steps), ranks, all_links)
    first = next((each for each in ranks.values() if each.about.get("rank") == 0), Rank(deque()))
    no_overlap = first.totals.get("no_overlap") or ""
    mean = average(measured.values())
    parts = _parts(mean)
    return {
        "version": VERSION,
        "written": _iso(datetime.now(timezone.utc).timestamp()),
        "job": job | {"hosts": Counter(hosts.values())},
        "sentence": _sentence(parts, mean, late),
        "advice": _advice(late, of_links, mean, ranks, no_overlap),
        "step": _times(bins.values())
        | {f"{part}_ms": parts[part] for part in _PARTS}
        | {"examples_per_s": _examples_per_s(ranks)},
        "over_time": [{"t_s": at_s} | _times([each]) for at_s, each in bins.items() if each.steps],
        "ranks": [_rank_row(rank, each, measured.get(rank), hosts) for rank, each in sorted(everyone.items())],
        "stragglers": [_straggler_row(each) for each in late],
        "timeline": _timeline(steps, [rank for each in late for rank in each.ranks]),
        "links": [_link_row(pair, of_links[pair], first.recent("step")) for pair in sorted(of_links)],
        "algorithms": _algorithms(ranks, first.about.get("algorithms") or ()),
        "tensors": _tensors(ranks),
        "memory": [{"t_s": at_s, "rss_max": each.rss, "shm_max": each.shm} for at_s, each in bins.items() if each.rss],
        "versions": first.about.get("versions") or {},
        "settings": [
            {"name": name, "value": str(value), "default": str(default)}
            for name, (value, default) in (first.about.get("settings") or {}).items()
        ],
        "no_overlap": no_overlap,
        "stores": Counter(text for each in ranks.values() if (text := each.totals.get("stores"))),
        "failures": [
            {"rank": each.rank, "host": hosts.get(each.rank, ""), "text": each.text} for each in events["failures"]
        ],
        **{kind: [_event(each) for each in events[kind]] for kind in ("stalls", "elastic")},
        "findings": [_event(each) | {"rank": each.rank} for each in events["findings"]],
    }  # fmt: skip


def _snapshot(collector: Collector) -> tuple[Json, dict[int, Rank], dict[float, Bin], dict[str, list[Event]]]:
    """Return what is there now, which others go on to change."""
    with collector.lock:
        code = collector.exit_code
        job = {
            "command": shlex.join(collector.command),
            "size": collector.size,
            "started": _iso(collector.started_s),
            "duration_s": round(collector.age_s, 1),
            "state": "running" if code is None else "failed" if code else "finished",
            "exit_code": code,
            "card": list(collector.card),
        }
        ranks = {
            number: replace(rank, steps=rank.steps.copy(), marks=rank.marks.copy())
            for number, rank in collector.ranks.items()
        }
        bins = {
            number * collector.bins.width_s: Bin(Counter(each.steps), each.rss, each.shm)
            for number, each in sorted(collector.bins.by_number.items())
        }
        return job, ranks, bins, {kind: list(each) for kind, each in collector.events.items()}


def _steps(ranks: Mapping[int, Rank]) -> dict[int, dict[int, Step]]:
    """Return the steps that were sampled, by number and rank."""
    said = {number: rank.steps for number, rank in ranks.items()}
    ahead_s = {number: float(rank.about.get("clock_ahead_s") or 0.0) for number, rank in ranks.items()}
    steps = in_common(said, ahead_s)
    wrong_s = {rank: behind(rank, steps.values()) for rank in ranks}
    if any(wrong_s.values()):
        steps = in_common(said, {rank: ahead_s[rank] - wrong_s[rank] for rank in ranks})
    return usual(steps)


def _of_totals(rank: Rank) -> Shares:
    """Return where the time of a rank went that has sent no step yet: nobody knows for whom it waited."""
    said, steps = rank.totals, max(1, rank.totals["step"])
    moved_s = min(exposed_s(said), said["blocked_s"])
    waiting = {_NOBODY: (said["blocked_s"] - moved_s) / steps}
    return Shares(said["step_s"] / steps, moved_s / steps, said["hidden_s"] / steps, waiting)


def _parts(mean: Shares) -> dict[str, float]:
    """Return the whole step and its parts in ms, with as many digits as the whole has, so that the parts make it up."""
    digits = 2 - math.floor(math.log10(1e3 * mean.step_s or 1.0))
    names = ("step", "exposed", "waiting", "hidden")
    found = {name: _whole(round(1e3 * getattr(mean, f"{name}_s"), digits)) for name in names}
    return found | {"computing": _whole(round(found["step"] - found["exposed"] - found["waiting"], digits))}


def _sentence(parts: Mapping[str, float], mean: Shares, late: Sequence[Straggler]) -> str:
    """Return it; who is named is one of the stragglers, too."""
    if not parts["step"]:
        return f"no step has ended: {STEP_ENDS}"
    texts = [f"{parts['computing']} computing", f"{parts['exposed']} exposed communication"]
    if parts["waiting"]:
        waited = ((math.fsum(mean.waiting.get(rank, 0.0) for rank in one.ranks), one.who) for one in late)
        waited_s, who = max(waited, default=(0.0, ""))
        if waited_s < _FULL * mean.waiting_s:
            who = "other ranks" + (f", most of it for {who}" if waited_s > mean.waiting_s / 2 else "")
        texts.append(f"{parts['waiting']} waiting for {who}")
    return f"of a step's {parts['step']} ms, {', '.join(texts)}"


def _advice(
    late: Sequence[Straggler], of_links: Links, mean: Shares, ranks: Mapping[int, Rank], why: str
) -> list[Json]:
    """Return what would help, the most first."""
    saves = []
    for each in late:
        saves_s = min(each.delay_s, each.caused_s / max(1, len(ranks) - len(each.ranks)))
        saves.append((f"{each.who}{', at ' + each.where if each.where else ''}: {KINDS[each.kind][1]}", saves_s))
    for (from_host, to_host), link in of_links.items():
        who = f"link from {from_host} to {to_host}"
        if link.share and link.share >= _FULL and who not in {each.who for each in late}:
            used = f"the {who} is {100 * link.share:.0f} % used: compression=int4 sends an eighth"
            saves.append((used, 0.875 * min(mean.exposed_s, link.most_s)))
    core_wait_s = min((each.core_wait_s(mean.step_s) for each in ranks.values()), default=0.0)
    if core_wait_s >= _MUCH * mean.step_s > 0:
        saves.append((f"all ranks wait for a CPU core: {_MORE_CORES}", core_wait_s))
    if why:
        saves.append((f"gradients are not reduced during backward: {why}", min(mean.exposed_s, mean.computing_s)))
    worth = {text: saves_s for text, saves_s in saves if saves_s >= 0.01 * mean.step_s}
    return [
        {"text": text, "saves_ms": _rounded(worth[text], 1e3)} for text in sorted(worth, key=lambda text: -worth[text])
    ]


def _times(bins: Iterable[Bin]) -> Json:
    """Return how many steps there were, and how long they took."""
    steps: Counter[int] = sum((each.steps for each in bins), Counter())
    count, left = sum(steps.values()), 0
    quantiles: dict[str, float] = {}
    for index in sorted(steps):
        left += steps[index]
        for name, share in (("p5_ms", 0.05), ("median_ms", 0.5), ("p95_ms", 0.95)):
            if left >= share * count and name not in quantiles:
                quantiles[name] = _rounded(seconds_of(index), 1e3)
    return {"count": count, "median_ms": 0.0, "p5_ms": 0.0, "p95_ms": 0.0} | quantiles


def _examples_per_s(ranks: Mapping[int, Rank]) -> float | None:
    told = [each.totals for each in ranks.values() if each.totals.get("examples") and each.totals.get("step_s")]
    return _rounded(sum(each["examples"] / each["step_s"] for each in told)) if told else None


def _rank_row(number: int, rank: Rank, own: Shares | None, hosts: Mapping[int, str]) -> Json:
    own, totals, end = own or Shares(), rank.totals, rank.end
    return {
        "rank": number,
        "host": hosts[number],
        "pid": rank.about.get("pid") or (end.pid if end else 0),
        "device": end.device if end else "",
        "steps": totals.get("step") or 0,
        "steps_s": totals.get("step_s") or 0.0,
        "examples": totals.get("examples"),
        "step_ms": _rounded(own.step_s, 1e3),
        **{f"{part}_ms": _rounded(getattr(own, f"{part}_s"), 1e3) for part in _PARTS},
        "core_wait_ms": _rounded(rank.core_wait_s(own.step_s), 1e3),
        **{name: totals.get(name) or 0 for name in ("rss", "shm", "fusion")},
        "end": "" if end is None else in_words(end) if end.failed or not end.code else "ended by ringrun",
    }


def _straggler_row(each: Straggler) -> Json:
    times = {"delay_ms": _rounded(each.delay_s, 1e3), "caused_ms": _rounded(each.caused_s, 1e3)}
    return {"who": each.who, "kind": each.kind, "where": each.where, "text": KINDS[each.kind][0]} | times


def _timeline(steps: Mapping[int, Mapping[int, Step]], late: Sequence[int]) -> Json | None:
    """Return the last step that was sampled: of the stragglers and the first ranks."""
    if not steps:
        return None
    number, by_rank = max(steps.items())
    shown = sorted(list(dict.fromkeys([*(rank for rank in late if rank in by_rank), *sorted(by_rank)]))[:_MOST_LINES])
    begin_s = min(by_rank[rank].from_s for rank in shown)
    return {"step": number, "ranks": [{"rank": rank} | _line(by_rank[rank], begin_s) for rank in shown]}


def _line(step: Step, begin_s: float) -> Json:
    """Return a step by the time since `begin_s`."""

    def ms(**times_s: float) -> Json:
        return {f"{name}_ms": round(1e3 * (at_s - begin_s), 3) for name, at_s in times_s.items()}

    operations = [
        {"name": name, "kind": kind, "bytes": nbytes, "algorithm": algorithm}
        | ms(submitted=submitted_s, ready=ready_s, begun=begun_s, ended=ended_s)
        for name, kind, nbytes, submitted_s, ready_s, begun_s, ended_s, algorithm in step.operations.values()
    ]
    waits = [{"name": name} | ms(**{"from": from_s, "to": to_s}) for (name, _), from_s, to_s in step.waits]
    return ms(**{"from": step.from_s, "to": step.to_s}) | {"operations": operations, "waits": waits}


def _link_row(pair: tuple[str, str], link: Link, steps: float) -> Json:
    used = _rounded(link.rate) if link.busy_s else None
    share = None if link.share is None else _rounded(link.share)
    row = {"from": pair[0], "to": pair[1], "bytes_per_step": round(link.nbytes / max(1.0, steps))}
    return row | {"used_bytes_s": used, "measured_bytes_s": link.measured and _rounded(link.measured), "share": share}


def _summed(ranks: Mapping[int, Rank], name: str) -> dict[str, list[float]]:
    """Return counts, bytes and seconds by name: the average of the ranks that have any."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for rank in ranks.values():
        for key, sums in (rank.totals.get(name) or {}).items():
            found[key].append(sums)
    return {key: [sum(column) / len(each) for column in zip(*each, strict=True)] for key, each in found.items()}


def _algorithms(ranks: Mapping[int, Rank], why: Sequence[Sequence[Any]]) -> list[Json]:
    rows = []
    for key, (count, nbytes, seconds) in _summed(ranks, "by_algorithm").items():
        name, _, up_to = key.rpartition(" ")
        reasons = [
            reason for most, algorithm, reason in why if algorithm == name and int(up_to) <= (most or int(up_to))
        ]
        row = {"algorithm": name, "up_to_bytes": int(up_to), "count": round(count), "bytes": round(nbytes)}
        rows.append(row | {"ms": _rounded(seconds, 1e3), "why": "".join(reasons[:1])})
    return sorted(rows, key=lambda row: (row["algorithm"], row["up_to_bytes"]))


def _tensors(ranks: Mapping[int, Rank]) -> list[Json]:
    steps = max([1, *(each.totals.get("step") or 0 for each in ranks.values())])
    found = sorted(_summed(ranks, "by_name").items(), key=lambda each: -each[1][2])[:_MOST_TENSORS]
    return [
        {"name": name, "count": round(count), "bytes": round(nbytes), "ms_per_step": _rounded(seconds / steps, 1e3)}
        for name, (count, nbytes, seconds) in found
    ]


def _event(each: Event) -> Json:
    return {"t_s": round(each.at_s, 1), "text": each.text}


def _rounded(number: float, scale: float = 1.0) -> float:
    """Return so much of a number as is shown: three digits."""
    return _whole(float(f"{scale * number:.3g}"))


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="seconds")
