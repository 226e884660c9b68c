"""Made run reports of version 1, as `ringrun --report` writes them: what a page is drawn from without a job.

`python -m tests.support.made_reports FOLDER` writes report.json and report.html of each there, and pictures of them by
Chromium: light and dark, 390 and 1600 pixels wide.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from ringrun.run_report.page import render
from tests.support.browser import Browser

MIB = 1 << 20
HOSTILE = "</script><script>throw Error('not escaped')</script>\"'<b>&amp;"
PARTS = ("mlp.down_proj", "mlp.up_proj", "attention.qkv")
NAMES = [f"layers.{k}.{part}.weight" for k in reversed(range(24)) for part in PARTS]
MEMORY_ERROR = "RuntimeError: CUDA out of memory"
CARD = [
    "rank 7 on gpu-b failed: exit code 1",
    "",
    "    train.py:57 in step",
    "        loss.backward()",
    "",
    MEMORY_ERROR,
]


def rows(keys: str, *values: tuple) -> list[dict]:
    """Return a dict for each of `values`, with these keys."""
    return [dict(zip(keys.split(), each, strict=True)) for each in values]


def made(size: int, per_host: int, minutes: int, *, failed: bool = False, slow: int | None = None) -> dict:
    """Return a report of `size` ranks, `per_host` on each host, where rank `slow` gets its data late."""
    chance = random.Random(size)
    hosts = [f"gpu-{chr(97 + k)}" if size <= 64 else f"node{k:03}" for k in range(size // per_host)]
    ranks = [
        _rank(rank, hosts[rank // per_host], slow, "" if size == 2 else "exit code 0", chance) for rank in range(size)
    ]
    if failed:
        ranks[7]["end"] = "exit code 1"
    who = "other ranks" if slow is None else f"rank {slow} (host {hosts[slow // per_host]})"
    step = _step(ranks, minutes)
    return {
        "version": 1,
        "written": "2026-11-25T23:10:04+00:00",
        "job": _job(size, hosts, per_host, minutes, failed),
        "sentence": f"of a step's {step['median_ms']} ms, {step['computing_ms']} computing, {step['exposed_ms']} "
        f"exposed communication, {step['waiting_ms']} waiting for {who}",
        "advice": _advice(who, slow, step),
        "step": step,
        "over_time": _over_time(step, minutes, chance),
        "ranks": ranks,
        "stragglers": _stragglers(who, size, hosts) if slow is not None else [],
        "timeline": {"step": step["count"] - 3, "ranks": [_line(rank, slow, chance) for rank in _shown(size, slow)]},
        "links": _links(hosts, per_host, chance),
        "memory": [{"t_s": 60 * k, "rss_max": (4000 + 12 * k) * MIB, "shm_max": 64 * MIB} for k in range(minutes)],
        "settings": rows("name value default", ("RINGREDUCE_FUSION_THRESHOLD", "67108864", "33554432")),
        "versions": {"ringreduce": "0.1.0", "Python": "3.11.7", "torch": "2.13.0", "MPI": "Open MPI 5.0.11"},
        "no_overlap": "" if slow is not None else "train.py:88 reads p.grad before optimizer.step()",
        "stores": {"plain": size - 1, "plain; from 16 MiB on streaming": 1},
        **_moved(step["count"]),
        **_events(size, failed),
    }


def _job(size, hosts, per_host, minutes, failed):
    state, exit_code = ("failed", 1) if failed else ("finished", 0) if size > 2 else ("running", None)
    return {
        "command": f"ringrun -np {size} --report run/ python train.py --model gpt2-medium --batch-size 16",
        "size": size,
        "hosts": dict.fromkeys(hosts, per_host),
        "started": "2026-11-25T22:40:00+00:00",
        "duration_s": 60 * minutes + 4,
        "state": state,
        "exit_code": exit_code,
        "card": CARD if failed else [],
    }


def _step(ranks, minutes):
    mean = {key: sum(rank[key] for rank in ranks) / len(ranks) for key in ranks[0] if key.endswith("_ms")}
    median = round(mean.pop("step_ms"), 1)
    spread = {"median_ms": median, "p5_ms": round(median * 0.97, 1), "p95_ms": round(median * 1.12, 1)}
    parts = {key: round(value, 1) for key, value in mean.items() if key != "core_wait_ms"}
    return (
        {"count": int(60_000 * minutes / median), "examples_per_s": round(16_000 * len(ranks) / median, 1)}
        | spread
        | parts
    )


def _rank(rank, host, slow, end, chance):
    late = 4.0 if slow is None else 23.0
    times = {
        "computing_ms": round(180 + chance.uniform(-3, 3) + late * (rank == slow), 1),
        "waiting_ms": round(chance.uniform(0.2, 1.5) + late * (rank != slow), 1),
        "exposed_ms": round(chance.uniform(7, 10), 1),
    }
    about = {"rank": rank, "host": host, "pid": 4000 + 7 * rank, "device": f"cuda:{rank % 8}", "steps": 8400}
    total = {"step_ms": round(sum(times.values()), 1), "hidden_ms": round(chance.uniform(40, 46), 1)}
    memory = {"rss": (4000 + rank) * MIB, "shm": 64 * MIB, "fusion": 32 * MIB}
    return about | total | times | {"core_wait_ms": round(chance.uniform(0, 0.4), 1)} | memory | {"end": end}


def _advice(who, slow, step):
    if slow is None:
        return rows("text saves_ms", ("overlap is off since train.py:88: step before you read gradients", 6.1))
    return rows(
        "text saves_ms",
        (f"{who}: its data loader is late in each step; more workers, or a faster disk there", step["waiting_ms"]),
        ("the wire between hosts is 97 % used: compression=int4 sends an eighth", 5.6),
    )


def _over_time(step, minutes, chance):
    points = []
    for k in range(5 * minutes):
        median_ms = step["median_ms"] * (1 if k > minutes else 0.89) * chance.uniform(0.985, 1.015)
        spread = (round(median_ms * part, 1) for part in (1, 0.97, chance.uniform(1.05, 1.15)))
        points.append((12 * k, 56, *spread))
    return rows("t_s count median_ms p5_ms p95_ms", *points)


def _stragglers(who, size, hosts):
    late = "the data loader's next batch comes 22.6 ms later than the other ranks'"
    return rows(
        "who kind delay_ms caused_ms where text",
        (who, "data loader", 22.6, round(22.6 * (size - 1), 1), "train.py:41 (data loader)", late),
        (f"host {hosts[-1]}", "slow host", 1.2, round(1.2 * (size - 8), 1), "", "all its ranks compute longer"),
    )


def _shown(size, slow):
    """As `ringrun` chooses them: the stragglers, and the first ranks."""
    return sorted([*([] if slow is None else [slow]), *(rank for rank in range(size) if rank != slow)][:16])


def _line(rank, slow, chance):
    late, operations, waits, free = (22.6 if rank == slow else 0), [], [], 0.0
    for k in range(24):
        submitted, ready = 60 + 5 * k + chance.uniform(0, 2) + late, 84.6 + 5 * k
        begun = max(ready + 0.2, free)
        free = begun + 4.2
        name, times = (
            f"bucket {k} ({NAMES[3 * k]} and 5 more)",
            (round(each, 3) for each in (submitted, ready, begun, free)),
        )
        operations.append((name, "allreduce", 25 * MIB, *times, "hierarchical"))
        began = max(185 + late, waits[-1][2] if waits else 0)
        if free > began:
            waits.append((name, round(began, 3), round(free, 3)))
    return {
        "rank": rank,
        "from_ms": 0.0,
        "to_ms": round(free + 4, 3),
        "operations": rows("name kind bytes submitted_ms ready_ms begun_ms ended_ms algorithm", *operations),
        "waits": rows("name from_ms to_ms", *waits),
    }


def _links(hosts, per_host, chance):
    links = []
    for k, host in enumerate(hosts if len(hosts) > 1 else []):
        measured = round(1.18e9 * (0.5 if k == len(hosts) - 1 else chance.uniform(0.97, 1.0)))
        share = 0.6 if k % 5 else 0.97
        links.append((host, hosts[k - len(hosts) + 1], 600 * MIB // per_host, round(share * measured), measured, share))
    return rows("from to bytes_per_step used_bytes_s measured_bytes_s share", *links)


def _moved(steps):
    names = enumerate([NAMES[0], HOSTILE, *NAMES[1:48]])
    tensors = ((name, steps, (25 - k % 3) * MIB * steps, round(3.1 * 0.96**k, 2)) for k, name in names)
    algorithms = rows(
        "algorithm up_to_bytes count bytes ms why",
        (
            "hierarchical",
            32 * MIB,
            24 * steps,
            600 * MIB * steps,
            51 * steps,
            "cost model: 2.1 ms, ring would take 3.4",
        ),
        ("ring", 4 * MIB, 3 * steps, 9 * MIB * steps, 4 * steps, "cost model: 1.3 ms"),
        ("direct", 4096, steps, 8 * steps, steps, "below 4 KiB: fewest messages"),
    )
    return {"algorithms": algorithms, "tensors": rows("name count bytes ms_per_step", *tensors)}


def _events(size, failed):
    lost = ((900, "host node017 was lost (8 ranks); 504 go on after 2.1 s"), (1260, "host node017 is back; 512 ranks"))
    stall = (612, "allreduce 'layers.3.mlp.up_proj.weight': rank 9 had not submitted it for 61 s")
    finding = (1702, 7, f"the first NaN: gradient {HOSTILE} of rank 7, step 8201, before the sum (train.py:57)")
    return {
        "failures": rows("rank host text", *[(7, "gpu-b", f"exit code 1: {MEMORY_ERROR} (train.py:57)")] * failed),
        "stalls": rows("t_s text", *[stall] * failed),
        "elastic": rows("t_s text", *(lost if size > 64 else ())),
        "findings": rows("t_s rank text", *[finding] * failed),
    }


def of_nothing() -> dict:
    """Return the report of a job that has not ended its first step."""
    report = made(2, 2, 3)
    ranks = [each | {key: 0 for key in each if key.endswith("_ms") or key == "steps"} for each in report["ranks"]]
    report |= {key: type(value)() for key, value in report.items() if isinstance(value, list)} | {"ranks": ranks}
    step = dict.fromkeys(report["step"], 0) | {"examples_per_s": None}
    report["job"]["hosts"] = {}
    return report | {
        "step": step,
        "timeline": None,
        "versions": {},
        "no_overlap": "",
        "stores": {},
        "sentence": "no step has ended",
    }


REPORTS = {
    "2-ranks": lambda: made(2, 2, 3),
    "16-ranks-failed": lambda: made(16, 4, 30, failed=True, slow=3),
    "512-ranks": lambda: made(512, 8, 90, slow=301),
    "nothing": of_nothing,
}


def main(folder: Path) -> None:
    """Write them, and their pictures."""
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        for name, make in REPORTS.items():
            to = folder / name
            to.mkdir(parents=True, exist_ok=True)
            (to / "report.json").write_text(json.dumps(make()))
            (to / "report.html").write_text(render(make()))
            for width in (390, 1600):
                for scheme in ("light", "dark"):
                    browser.open(to / "report.html", width=width, dark=scheme == "dark")
                    browser.screenshot(to / f"{width}-{scheme}.png")
                    print(name, width, scheme, browser.complaints)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
