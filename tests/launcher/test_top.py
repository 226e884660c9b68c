"""`ringrun top` and --metrics-port: what the ranks of a running job say of their steps, as a table and as metrics."""

import json
import os
import re
import sys
from collections import deque

import pytest

from ringrun import top
from ringrun.errors import LauncherError, UsageError
from ringrun.job.control_socket import RunningJob
from ringrun.run_report.live import row, table
from tests.support.jobs import run
from tests.support.patience import patient, wait_until

JOB = RunningJob(4711, 0.0, 4, ("python", "train.py"), "/nowhere/control")


def totals(rank, steps, late_ms=0.0, others_ms=0.0, **changes):
    """After so many steps of 200 ms: one that computes `late_ms` more than ranks that wait `others_ms` for others."""
    blocked_s = (20 + others_ms) / 1000 * steps
    return {
        "rank": rank,
        "host": "ab"[rank % 2],
        "at_s": 0.2 * steps,
        "age_s": 0.1,
        "step": steps,
        "step_s": 0.2 * steps,
        "blocked_s": blocked_s,
        "computing_s": 0.2 * steps - blocked_s,
        "moving_s": 0.08 * steps,
        "hidden_s": 0.06 * steps,
        "bytes": 4_000_000 * steps,
        "rss": 1_200_000_000,
        "lines": {"train.py:57": 3 * steps, f"load.py:{rank} (data loader)": 2 * steps * (late_ms > 0)},
    } | changes


def rows_of(size, late=()):
    """The ranks of a job, each of which waits 30 ms of a step for those that are late."""
    said = {r: (40.0, 0.0) if r in late else (0.0, 30.0) for r in range(size)}
    return [row(totals(r, 100, *said[r]), totals(r, 110, *said[r])) for r in range(size)]


def test_the_table_says_what_a_step_consists_of_and_who_is_late():
    assert table(rows_of(3, late={1}), 3, 200, 50) == [
        "step 110: 200.0 ms (5/s) = 160.0 computing + 20.0 waiting + 20.0 exposed",
        "rank 1 (b) is late, at load.py:1 (data loader): the others wait 30.0 ms a step for it",
        "RANK  HOST  STEP  MS/STEP  COMPUTING  WAITING  EXPOSED  MB/S  RSS MB  AT",
        "   0  a      110    200.0      150.0     30.0     20.0  20.0    1200  train.py:57",
        " > 1  b      110    200.0      180.0      0.0     20.0  20.0    1200  train.py:57",
        "   2  a      110    200.0      150.0     30.0     20.0  20.0    1200  train.py:57",
    ]
    assert not any("late" in line or ">" in line for line in table(rows_of(3), 3, 200, 50)), "all are alike"


def test_of_many_ranks_those_that_are_waited_for_most_are_shown_as_wide_as_the_terminal():
    lines = table(rows_of(512, late={77, 400}), 512, 41, 12)
    assert [len(line) for line in lines if len(line) > 41] == []
    assert [line.split()[:2] for line in lines if ">" in line] == [[">", "77"], [">", "400"]]
    assert len(lines) == 12
    assert lines[-1] == "and 507 more, for which others wait less"
    assert len(table(rows_of(512), 512, 80, 1)) == 4, "too low for anything: the sentence, the heads, a rank, the rest"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"step": 100, "step_s": 20.0}, " 100    200.0"),
        ({"age_s": 12.3}, "silent for 12 s"),
        ({"lines": {}}, "1200"),
    ],
    ids=["no step since: the average", "silent", "no samples"],
)
def test_a_rank_of_which_less_is_known(changes, shown):
    now = totals(0, 110, host="", **changes)
    assert shown in "\n".join(table([row(totals(0, 100), now)], 1, 200, 50))


def test_lines_are_those_of_the_time_between_two_messages():
    before, now = totals(0, 100), totals(0, 110)
    before["lines"], now["lines"] = (
        {"load.py:3": 900, "train.py:7": 50},
        {"load.py:3": 900, "train.py:7": 60, "eval.py:2": 30},
    )
    assert row(before, now).lines == {"load.py:3": 0, "train.py:7": 50, "eval.py:2": 150}


def test_before_the_first_step_the_table_says_what_a_step_is():
    first = totals(0, 0, bytes=4_000_000)
    assert row(first, first).mb_s == 0
    now = totals(0, 10)
    assert row(first | {"bytes": 10 * now["bytes"]}, now) == row({"step": 99}, now), "its bytes are in no sum"
    assert table([row(first, first)], 2, 200, 50)[0] == "1 of 2 ranks record their steps; none has finished one yet"
    assert "rr.mark_step()" in table([], 2, 200, 50)[1]


def answer(*said):
    return "".join(f"{json.dumps(each)}\n" for each in said)


def test_speeds_are_those_of_the_last_answers_of_ranks_that_run():
    history = {}
    for steps in range(0, 120, 10):
        top.keep(history, answer(totals(0, steps), totals(1, steps)))
    assert [each["step"] for each in history[0]] == list(range(20, 120, 10))
    top.keep(history, answer(totals(1, 7)))
    assert history == {1: deque([totals(1, 7)])}, "rank 0 has ended, and rank 1 begins again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1", "2"], "ringrun top 1 2: expected at most one JOB, a process number"),
        (["--twice"], "ringrun top --twice: expected at most one JOB"),
        (["x", "--once"], "ringrun top x: JOB is the process number of a ringrun; your jobs are: 4711"),
    ],
)
def test_what_cannot_be_watched(arguments, message, monkeypatch):
    monkeypatch.setattr(top, "find_jobs", lambda: [JOB])
    with pytest.raises(UsageError, match=re.escape(message)):
        top.run(arguments)


def test_several_jobs_are_listed_and_one_that_ended_says_so(monkeypatch, capsys):
    monkeypatch.setattr(top, "find_jobs", lambda: [JOB, JOB])
    assert top.run([]) == 0
    assert capsys.readouterr().out.startswith("JOB ")
    monkeypatch.setattr(top, "find_jobs", lambda: [JOB])
    with pytest.raises(LauncherError, match="job 4711 ended before its ranks had answered"):
        top.run(["4711"])
    monkeypatch.setattr(top, "ask", lambda job, question: answer(totals(0, 10))[:30])
    with pytest.raises(LauncherError, match="job 4711 ended before its ranks had answered"):
        top.run(["4711"])


def test_a_terminal_without_escape_sequences_gets_the_table_once(monkeypatch):
    """As Emacs' shell."""
    monkeypatch.setattr(top, "find_jobs", lambda: [JOB])
    monkeypatch.setattr(top, "_once", lambda job: "once")
    monkeypatch.setattr(top, "_watch", lambda job: "watched")
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    for terminal, how in (("xterm", "watched"), ("dumb", "once")):
        monkeypatch.setenv("TERM", terminal)
        assert top.run([]) == how


def test_any_running_job_can_be_watched(start, program, tmp_path):
    """One that was started without --report records as long as somebody looks."""
    job = start("-np", 2, *program("steps"), tmp_path, 1)
    wait_until(lambda: (tmp_path / "trains").exists())
    ringrun_top = "import sys; from ringrun.top import run; sys.exit(run(sys.argv[1:]))"
    shown = run([sys.executable, "-c", ringrun_top, job.pid, "--once"], returncode=0).stdout
    head, step, late, heads, first, second = shown.splitlines()
    assert head.startswith(f"job {job.pid}: ")
    assert re.fullmatch(r"step \d+: .* ms \(.*/s\) = .* computing \+ .* waiting \+ .* exposed", step), shown
    assert re.fullmatch(r"rank 1 \(.*\) is late, at script.py:14: the others wait .* ms a step for it", late), shown
    assert heads.startswith("RANK  HOST")
    assert [first.split()[0], *second.split()[:2]] == ["0", ">", "1"]
    assert 0 < float(second.split()[7]) < 60, "MB/s of 8 kB a step"
    (tmp_path / "stop").touch()
    assert job.wait(patient(20)) == 0, job.stderr.read()
    assert job.stderr.read() == ""
