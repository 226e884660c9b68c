"""The run report: what is in report.json, how it is written, and that no fault of it harms the job."""

import json
import re
import sys
import threading
import types
from collections import Counter, deque
from pathlib import Path

import pytest

from ringrun.errors import MachineError, UsageError
from ringrun.report.outcome import RankEnd
from ringrun.run_report import command, document, write
from ringrun.run_report.analyse import Shares
from ringrun.run_report.causes import Straggler
from ringrun.run_report.collect import Bin, Collector, Rank, seconds_of
from ringrun.run_report.page import quantity
from ringrun.run_report.write import Writer
from tests.support.made_steps import BUCKETS, MadeJob
from tests.support.patience import wait_until
from tests.support.tiers import extended

LATE = MadeJob(3, lambda rank, _, bucket: 0.005 * (rank == 1 and bucket < BUCKETS))


@pytest.fixture
def collector():
    return LATE.collected()


@pytest.fixture(autouse=True)
def page(monkeypatch):
    """A stand-in for the page; None: its extra is not installed."""

    def render(report):
        if page.missing:
            raise UsageError("report.html needs jinja2, which is not installed; pip install jinja2")
        return f"<p>{report['sentence']}"

    page = types.ModuleType("ringrun.run_report.page")
    page.render, page.missing = render, False
    page.MISSING, page.is_possible = "report.html needs jinja2: pip install jinja2", lambda: not page.missing
    monkeypatch.setitem(sys.modules, page.__name__, page)
    return page


def test_all_of_a_job_is_in_its_report(collector):
    collector.note("stalls", "rank 0 says: 'w' waits")
    collector.note("elastic", "ranks 0,2 resumed after 31 ms")
    collector.note("findings", "'w' is NaN", 2)
    collector.ended(RankEnd(1, "h0", 101, -9, 0.0, device="GPU 1"))
    collector.ended(RankEnd(2, "h0", 102, -15, 0.0, sent=(15,)))
    collector.card, collector.exit_code = ["-- ringrun: rank 1 of 3 failed first --"], 137
    found = json.loads(json.dumps(document.document(collector)))
    job, step = found["job"], found["step"]
    assert found["sentence"] == "of a step's 126 ms, 110 computing, 3 exposed communication, 13 waiting for rank 1"
    assert (job["size"], job["hosts"], job["command"]) == (3, {"h0": 3}, "python train.py")
    assert (job["state"], job["exit_code"], job["card"]) == ("failed", 137, collector.card)
    assert [step[name] for name in ("count", "computing_ms", "exposed_ms", "waiting_ms")] == [20, 110, 3, 13]
    assert step["p5_ms"] <= step["median_ms"] <= step["p95_ms"] == pytest.approx(126, rel=0.05)
    assert step["examples_per_s"] == pytest.approx((1 + 2 + 3) / 0.126, rel=0.02)
    assert [each["count"] for each in found["over_time"]] == [20]
    assert [(each["rank"], each["pid"], each["steps"], each["rss"] >> 30) for each in found["ranks"]] == [
        (rank, 100 + rank, 20, rank + 1) for rank in range(3)
    ]
    for each in found["ranks"]:
        parts = [each[f"{part}_ms"] for part in ("computing", "exposed", "waiting")]
        assert sum(parts) == pytest.approx(each["step_ms"], abs=1)
        assert each["waiting_ms"] == pytest.approx(0 if each["rank"] == 1 else 20, abs=0.5)
    ends = [(each["device"], each["end"][:18]) for each in found["ranks"]]
    assert ends == [("", ""), ("GPU 1", "killed by signal 9"), ("", "ended by ringrun")]
    (late,) = found["stragglers"]
    assert (late["who"], late["caused_ms"]) == ("rank 1", pytest.approx(40, rel=0.02))
    assert found["advice"][0]["text"].startswith("rank 1: give it less to do")
    assert found["timeline"]["step"] == 20
    assert [len(each["operations"]) for each in found["timeline"]["ranks"]] == [4] * 3
    assert found["algorithms"] == [
        {"algorithm": "ring", "up_to_bytes": 4096, "count": 80, "bytes": 200000, "ms": 240, "why": ""}
    ]
    assert found["tensors"] == [{"name": "b0", "count": 20, "bytes": 20000, "ms_per_step": 3}]
    assert [(each["rss_max"] >> 30, each["shm_max"]) for each in found["memory"]] == [(3, 1 << 20)]
    assert [(each["rank"], each["host"]) for each in found["failures"]] == [(1, "h0")]
    assert [found[kind][0]["text"] for kind in ("stalls", "elastic", "findings")] == [
        "rank 0 says: 'w' waits", "ranks 0,2 resumed after 31 ms", "'w' is NaN",
    ]  # fmt: skip
    assert found["findings"][0]["rank"] == 2


@pytest.mark.parametrize("lost", [(0, 2), (0, 1, 2), (3,)])
def test_after_a_loss_the_figures_are_those_of_the_ranks_that_are_left(lost):
    """In the new world steps and ranks are numbered anew; one of its ranks is late, and examples are others."""
    left = [rank for rank in range(4) if rank not in lost]
    collector = MadeJob(4, hosts=4).collected()
    for rank in lost:
        collector.ended(RankEnd(rank, f"h{rank}", 101, -9, 0.0))
    of_world = MadeJob(len(left), lambda rank, *_: 0.005 * (rank == len(left) - 1), hosts=len(left))
    for rank, messages in enumerate(of_world.messages()):
        for message in messages:
            collector.measured(left[rank], json.dumps(message))
    found, expected = document.document(collector), document.document(of_world.collected())
    for part in ("computing_ms", "exposed_ms", "waiting_ms", "examples_per_s"):
        assert found["step"][part] == expected["step"][part]
    assert [each["delay_ms"] for each in found["stragglers"]] == [each["delay_ms"] for each in expected["stragglers"]]
    assert [each["who"].partition(" (")[0] for each in found["stragglers"]] == [f"rank {left[-1]}"] * (len(left) > 1)
    assert [each["rank"] for each in found["timeline"]["ranks"]] == left
    assert [(each["rank"], each["steps"], each["end"][:18]) for each in found["ranks"] if each["rank"] in lost] == [
        (rank, 20, "killed by signal 9") for rank in lost
    ]
    assert sum(found["job"]["hosts"].values()) == 4


def of_totals(**totals):
    return Rank(deque(), totals={"step": 10, **totals})


def test_an_algorithm_has_the_reason_for_messages_of_its_size():
    why = [[1024, "direct", "few bytes"], [65536, "ring", "of some size"], [None, "ring", "the most"]]
    sums = {
        "ring 65536": [10, 500, 0.5],
        "ring 4096": [2, 8, 0.1],
        "ring 131072": [1, 9, 0.2],
        "direct 512": [3, 6, 0.3],
    }
    found = document._algorithms({0: of_totals(by_algorithm=sums)}, why)
    assert [(each["algorithm"], each["up_to_bytes"], each["why"]) for each in found] == [
        ("direct", 512, "few bytes"),
        ("ring", 4096, "of some size"),
        ("ring", 65536, "of some size"),
        ("ring", 131072, "the most"),
    ]
    assert (found[2]["count"], found[2]["bytes"], found[2]["ms"]) == (10, 500, 500)


def test_of_many_tensors_those_that_take_longest_are_shown():
    sums = {f"w{number}": [10, 100 * number, 0.01 * (number * 37 % 80)] for number in range(80)}
    found = document._tensors({0: of_totals(by_name=sums), 1: of_totals(by_name=sums)})
    assert [each["ms_per_step"] for each in found] == list(range(79, 29, -1))
    assert {each["bytes"] for each in found} == {100 * int(each["name"][1:]) for each in found}


def test_a_changed_setting_is_shown_with_its_default(collector):
    collector.ranks[0].about["settings"] = {"cycle_time_ms": [5.0, 50.0]}
    expected = [{"name": "cycle_time_ms", "value": "5.0", "default": "50.0"}]
    assert document.document(collector)["settings"] == expected


def test_advice_saves_no_more_than_others_wait():
    late = [Straggler("rank 1", "computes longer", delay_s=0.02, caused_s=0.01, ranks=(1,))]
    ranks = {rank: of_totals() for rank in range(3)}
    (advice,) = document._advice(late, {}, Shares(step_s=0.1), ranks, "")
    assert advice["saves_ms"] == 5, "two others wait for 10 ms together, since they communicate meanwhile"


def test_the_slowest_of_twenty_steps_is_the_95th_percentile():
    found = document._times([Bin(Counter({-40: 80})), Bin(Counter({-60: 10, -20: 10}))])
    assert found["count"] == 100
    times = [found[name] for name in ("p5_ms", "median_ms", "p95_ms")]
    assert times == [pytest.approx(1000 * seconds_of(index), rel=0.01) for index in (-60, -40, -20)]


def test_before_a_step_was_sent_nobody_knows_for_whom_ranks_waited(collector):
    for rank in collector.ranks.values():
        rank.steps.clear()
    found = document.document(collector)
    sentence = "of a step's 126 ms, 110 computing, 3 exposed communication, 13 waiting for other ranks"
    assert found["sentence"] == sentence
    assert (found["stragglers"], found["timeline"]) == ([], None)


def test_before_a_step_has_ended_there_is_little_to_say(collector):
    sentence = "no step has ended: a step ends when a ringreduce optimizer steps, or the script calls rr.mark_step()"
    for rank in collector.ranks.values():
        rank.steps.clear()
        rank.totals |= {"step": 0, "step_s": 0.0, "blocked_s": 0.0, "moving_s": 0.0, "core_wait_s": 9.0}
    for each in (collector, Collector(["x"])):
        found = document.document(each)
        assert (found["sentence"], found["advice"]) == (sentence, [])


def test_a_wire_that_is_full_cores_that_are_too_few_and_what_prevents_overlap(collector):
    for rank, each in collector.ranks.items():
        each.about |= {"host": f"h{rank}", "links": [[f"h{rank}", f"h{other}", 1e9] for other in range(3)]}
        each.totals |= {"sent": {str((rank + 1) % 3): 200e6}, "send_s": {str((rank + 1) % 3): 0.206}}
        each.totals |= {"no_overlap": "train.py:88 reads a gradient", "core_wait_s": 20 * 0.015 * (1 + rank)}
        each.totals |= {"stores": "plain" if rank else "plain; from 4 MiB on streaming"}
    found = document.document(collector)
    shares = [(each["from"], each["to"], each["bytes_per_step"], each["share"]) for each in found["links"]]
    assert shares == [(f"h{rank}", f"h{(rank + 1) % 3}", 1e7, 0.971) for rank in range(3)]
    assert found["stores"] == {"plain": 2, "plain; from 4 MiB on streaming": 1}
    texts = [each["text"] for each in found["advice"]]
    assert "the link from h0 to h1 is 97 % used: compression=int4 sends an eighth" in texts
    assert "gradients are not reduced during backward: train.py:88 reads a gradient" in texts
    (cores,) = [each["saves_ms"] for each in found["advice"] if each["text"].startswith("all ranks wait for a CPU")]
    assert cores == 15, "the least that one waits"
    assert [each["saves_ms"] for each in found["advice"]] == sorted(
        (each["saves_ms"] for each in found["advice"]), reverse=True
    )


def test_a_rank_waits_for_its_core_no_longer_than_a_step_takes(collector):
    """The waits are those of the whole time, an evaluation's, too, and the step is a usual one."""
    for each in collector.ranks.values():
        each.totals |= {"core_wait_s": 2 * each.totals["step_s"]}
    found = document.document(collector)
    (cores,) = [each["saves_ms"] for each in found["advice"] if each["text"].startswith("all ranks wait for a CPU")]
    assert cores <= sum(found["step"][f"{part}_ms"] for part in ("computing", "exposed", "waiting"))
    assert all(0 < row["core_wait_ms"] <= row["step_ms"] for row in found["ranks"])


@pytest.fixture
def said():
    return []


def finished(folder, collector, said, code=0):
    Writer(str(folder), collector, said.append).finish(code)
    return json.loads((folder / "report.json").read_text())


def test_it_is_written_while_the_job_runs_and_at_its_end(tmp_path, collector, said, monkeypatch):
    monkeypatch.setattr(write, "_FIRST_S", 0.01)
    monkeypatch.setattr(write, "_EACH_S", 0.01)
    folder = tmp_path / "a" / "run"
    writer = Writer(str(folder), collector, said.append)
    wait_until((folder / "report.html").exists)
    assert json.loads((folder / "report.json").read_text())["job"]["state"] == "running"
    (folder / ".report.json.part").write_text("of one that was killed in the middle")
    writer.finish(0)
    found = json.loads((folder / "report.json").read_text())
    assert found["job"]["state"] == "finished"
    assert (folder / "report.html").read_text() == f"<p>{found['sentence']}"
    assert said == [f"ringrun: {folder}/report.html: {found['sentence']}"]
    assert {path.name for path in folder.iterdir()} == {"report.json", "report.html"}


def full(folder):
    (folder / ".report.json.part").symlink_to("/dev/full")


@pytest.mark.parametrize("counted", [None, [7, 1.0, 0.0]])
def test_nothing_is_written_while_steps_are_only_counted(counted, tmp_path, collector, said, monkeypatch):
    """To write takes time from the ranks, whose speed is measured just then."""
    looked = threading.Semaphore(0)
    latest = collector.latest
    monkeypatch.setattr(write, "_FIRST_S", 0.01)
    monkeypatch.setattr(write, "_EACH_S", 0.01)
    monkeypatch.setattr(collector, "latest", lambda: looked.release() or latest())
    for rank in collector.ranks.values():
        rank.totals["counted"] = counted
    writer = Writer(str(tmp_path), collector, said.append)
    assert all(looked.acquire(timeout=30) for _ in range(3))
    assert (tmp_path / "report.json").exists() == (counted is None)
    writer.finish(0)
    assert (tmp_path / "report.json").exists()


def gone(folder):
    folder.rmdir()


FAULTS = [(full, "No space left on device"), (gone, "No such file or directory")]


@pytest.mark.parametrize(("fault", "why"), FAULTS)
def test_a_report_that_cannot_be_written_costs_one_line(fault, why, tmp_path, collector, said, monkeypatch):
    writer = Writer(str(tmp_path / "run"), collector, said.append)
    fault(tmp_path / "run")
    writer._write()
    writer.finish(0)
    assert said == [f"ringrun: the report in {tmp_path}/run cannot be written: {why}; the job continues"]


def test_a_report_that_cannot_be_made_costs_one_line(tmp_path, collector, said):
    collector.ranks[1].steps[-1]["operations"].append(["of another version"])
    writer = Writer(str(tmp_path), collector, said.append)
    writer._write()
    writer.finish(0)
    (line,) = said
    assert line.startswith(f"ringrun: the report in {tmp_path} is lost, but the job continues: IndexError: ")


def test_a_file_system_that_hangs_is_not_waited_for(tmp_path, collector, said, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(write, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(write, "replace", lambda *_: hangs.wait(30))
    Writer(str(tmp_path), collector, said.append).finish(0)
    assert said == [f"ringrun: writing to {tmp_path} hangs; the report there may be up to a minute out of date"]
    hangs.set()


def test_without_the_extra_a_line_at_the_start_says_how_to_get_the_page_and_the_last_one_is_the_same(
    tmp_path, collector, said, page
):
    page.missing = True
    writer = Writer(str(tmp_path), collector, said.append)
    assert said == [
        "ringrun: report.html needs jinja2: pip install jinja2; "
        f"this job will leave {tmp_path}/report.json, for ringrun report {tmp_path}"
    ]
    writer._write()
    writer.finish(0)
    sentence = json.loads((tmp_path / "report.json").read_text())["sentence"]
    assert sentence.startswith("of a step's ")
    assert said[1:] == [f"ringrun: {tmp_path}/report.json: {sentence}"]


def test_a_page_that_cannot_be_made_takes_nothing_else_with_it(tmp_path, collector, said, page):
    """As with a Plotly of which a part is missing."""
    writer = Writer(str(tmp_path), collector, said.append)
    page.missing = True
    writer.finish(0)
    missing = "report.html needs jinja2, which is not installed; pip install jinja2"
    sentence = json.loads((tmp_path / "report.json").read_text())["sentence"]
    assert said == [
        f"ringrun: {tmp_path}/report.json is written, but {missing}; then: ringrun report {tmp_path}",
        f"ringrun: {tmp_path}/report.json: {sentence}",
    ]


def test_a_folder_that_cannot_be_used_is_refused_before_the_job_starts(tmp_path, said):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    full(tmp_path / "full")
    for directory, kind, why in [
        ("", UsageError, "--report '': expected a folder for the report"),
        (
            f"{tmp_path}/file",
            UsageError,
            "file is a file, not a folder; give a folder that this user can write to",
        ),
        (
            f"{tmp_path}/full",
            MachineError,
            "full cannot be made or written: No space left on device; make room there, or",
        ),
    ]:
        with pytest.raises(kind, match=re.escape(why)):
            Writer(directory, Collector(), said.append)


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_line_begins_with_what_was_found(count, tmp_path, collector, said):
    for _ in range(count):
        collector.note("findings", "'w' is NaN", 2)
    finished(tmp_path, collector, said)
    assert said[0].startswith(f"ringrun: {tmp_path}/report.html: {count} finding{'s' * (count > 1)} of --check; of a ")


def test_the_page_is_built_again(tmp_path, collector, said, capsys):
    report = finished(tmp_path, collector, said)
    (tmp_path / "report.html").unlink()
    for path in (tmp_path, tmp_path / "report.json"):
        assert command.run([str(path)]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/report.html: {report['sentence']}\n"
    assert (tmp_path / "report.html").read_text() == f"<p>{report['sentence']}"
    assert command.run(["--help"]) == 0
    assert capsys.readouterr().out.startswith("ringrun report: builds report.html")


@pytest.mark.parametrize(
    ("arguments", "text", "why"),
    [
        ([], None, "ringrun report : expected one DIR, that of ringrun --report DIR"),
        (["--all"], None, "ringrun report --all: expected one DIR"),
        (
            ["run"],
            None,
            "ringrun report run: run/report.json does not exist; it is written by a job that runs with",
        ),
        (["file"], None, "ringrun report file: file/report.json: Not a directory"),
        (["run"], "{", "ringrun report run: run/report.json is not a run report: JSONDecodeError("),
        (["run"], "[" * 100_000, "ringrun report run: run/report.json is not a run report: RecursionError("),
        (["run"], "[1]", "ringrun report run: run/report.json is not a run report: ValueError('expected a JSON object"),
        (["run"], "{}", "ringrun report run: run/report.json is not a run report: ValueError('expected a JSON object"),
        (
            ["run"],
            '{"version": 9}',
            "ringrun report run: run/report.json has version 9, but this ringrun reads version 1: "
            "use the ringrun that wrote it",
        ),
    ],
)
def test_where_there_is_no_report(arguments, text, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("file").touch()
    if text is not None:
        Path("run", "report.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(why)):
        command.run(arguments)


def test_a_report_with_an_infinite_time_is_none(tmp_path, monkeypatch):
    (tmp_path / "report.json").write_text('{"version": 1, "job": {"duration_s": Infinity}}')
    monkeypatch.setattr(command, "write_page", lambda _, report: quantity(report["job"]["duration_s"], "duration"))
    with pytest.raises(UsageError, match=r"report\.json is not a run report: OverflowError\("):
        command.run([str(tmp_path)])


# whole runs

TRAINS = """
    import os, sys, time
    import numpy as np
    import ringreduce as rr
    rr.init()
    for step in range(int(sys.argv[2])):
        time.sleep(float(sys.argv[1]) * (rr.rank() == 1))
        mine = [rr.allreduce_async(np.full(1000, rr.rank() + k, np.float32), name=f"g{k}") for k in range(2)]
        sums = [rr.synchronize(each) for each in mine]
        rr.mark_step(examples=4)
    if "raises" in sys.argv and rr.rank() == 1:
        raise ValueError("of rank 1")
    if "is killed" in sys.argv and rr.rank() == 0:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raises", 1), pytest.param("is killed", 137, marks=extended)])
def test_a_job_leaves_a_report_also_when_it_fails(end, code, ringrun, script, tmp_path):
    arguments = ["0.02", "100", end] if end else ["0.02", "12"]
    done = ringrun("-np", 2, "--report", "run", *script(TRAINS), *arguments, returncode=code)
    found = json.loads((tmp_path / "run" / "report.json").read_text())
    assert found["job"]["state"] == ("failed" if end else "finished")
    assert re.match("of a step's .* waiting for ", found["sentence"])
    assert found["timeline"] is not None
    assert {each["name"] for each in found["tensors"]} == {"g0", "g1"}
    assert found["step"]["examples_per_s"] > 0
    assert "ringrun: run/report" in done.stderr
    if end == "raises":
        assert "ValueError: of rank 1" in found["job"]["card"]
        assert found["failures"][0]["rank"] == 1
    elif not end:
        assert found["step"]["count"] == 11
        assert [len(each["operations"]) for each in found["timeline"]["ranks"]] == [2, 2]
