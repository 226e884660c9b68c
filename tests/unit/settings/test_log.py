"""The logger: what init() gives it, and what it leaves to a program that has set it up itself."""

import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings, log
from ringreduce.testing import run_ranks


def told(capsys, level, *, timestamps=False):
    """What is seen of one message of each level."""
    log.configure(level, timestamps)
    for number in log.LEVELS.values():
        log.LOGGER.log(number, f"{number} of 50, 100 %")
    return capsys.readouterr().err.splitlines()


SEEN = [
    *("ringreduce: trace: 5 of 50, 100 %", "ringreduce: debug: 10 of 50, 100 %", "ringreduce: info: 20 of 50, 100 %"),
    *(f"ringreduce: {number} of 50, 100 %" for number in (30, 40, 50)),
]


@pytest.mark.parametrize(
    ("level", "count"), [("trace", 6), ("debug", 5), ("info", 4), ("warning", 3), ("error", 2), ("fatal", 1)]
)
def test_a_level_is_seen_with_what_follows_it(fresh_log, capsys, level, count):
    """A warning looks as it did before there were levels."""
    assert told(capsys, level) == SEEN[-count:]


def test_the_time_stands_before_it_if_asked(fresh_log, capsys):
    line = told(capsys, "fatal", timestamps=True)[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ringreduce: 50 of 50, 100 %", line)


def test_a_later_init_changes_level_and_form_and_adds_no_second_handler(fresh_log, capsys):
    assert len(told(capsys, "debug", timestamps=True)) == 5
    assert told(capsys, "error") == ["ringreduce: 40 of 50, 100 %", "ringreduce: 50 of 50, 100 %"]


def test_handlers_of_the_program_stay_alone(fresh_log, capsys):
    stream = io.StringIO()
    fresh_log.addHandler(logging.StreamHandler(stream))
    assert told(capsys, "trace") == []
    assert stream.getvalue().splitlines() == [f"{number} of 50, 100 %" for number in (30, 40, 50)]
    assert fresh_log.propagate


def test_a_level_of_the_program_stays(fresh_log, capsys):
    fresh_log.setLevel(logging.INFO)
    assert len(told(capsys, "fatal")) == 4
    assert len(told(capsys, "fatal")) == 4


def test_the_root_loggers_handlers_do_not_say_it_twice(fresh_log, capsys):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        assert len(told(capsys, "warning")) == 3
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("adding", ["addFilter", "addHandler"])
def test_what_the_programs_own_raise_reaches_no_thread_of_ours(fresh_log, capsys, adding):
    """Ranks' threads log, which others wait for."""

    class Broken(logging.Handler):
        def filter(self, record):
            raise LookupError(f"no {record.filename}, line {record.lineno}")

    log.configure("warning", False)
    getattr(fresh_log, adding)(broken := Broken())
    try:
        line = sys._getframe().f_lineno + 1
        log.LOGGER.warning("a stall")
    finally:
        fresh_log.removeFilter(broken)
    assert f"LookupError: no test_log.py, line {line}\n" in capsys.readouterr().err


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_said_of_the_job_is_shown_by_the_launcher_or_else_by_the_rank(fresh_log, capsys, is_there):
    shown = []
    log.configure("info", False, lambda text: shown.append(text) or is_there)
    log.LOGGER.warning("of this rank")
    log.JOB.warning("of the job")
    log.JOB.info("of the job")
    log.JOB.debug("of the job")
    told = ["ringreduce: of the job", "ringreduce: info: of the job"]
    assert shown == told
    assert capsys.readouterr().err.splitlines() == ["ringreduce: of this rank", *told * (not is_there)]


def test_the_import_sets_nothing_up():
    program = (
        "import logging, ringreduce; logger = logging.getLogger('ringreduce'); print(logger.handlers, logger.level)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[] 0\n"


def test_the_settings_names_of_levels():
    for text in ("debug", "DEBUG", "Debug"):
        assert Settings.from_environment({"RINGREDUCE_LOG_LEVEL": text}).log_level == "debug"
    assert Settings.from_environment({"HOROVOD_LOG_LEVEL": "fatal"}).log_level == "fatal"
    assert Settings.from_environment({"HOROVOD_LOG_TIMESTAMP": "1"}).log_timestamp
    expected = "expected one of trace, debug, info, warning, error, fatal"
    for variable in ("RINGREDUCE_LOG_LEVEL", "HOROVOD_LOG_LEVEL"):
        with pytest.raises(rr.SettingsError, match=f"^{variable}='loud': {expected}$"):
            Settings.from_environment({variable: "loud"})
    with pytest.raises(rr.SettingsError, match=f"^log_level='loud': {expected}$"):
        Settings(log_level="loud")


def reduce_two():
    handles = [rr.allreduce_async(np.full(100, rr.rank() + 1.0), name=name, op=rr.Sum) for name in ("a", "b")]
    return [rr.synchronize(each)[0] for each in handles]


def test_debug_tells_responses_and_algorithms_trace_announcements_too(fresh_log, capsys):
    settings = Settings(log_level="debug", algorithm="ring")
    assert run_ranks(2, reduce_two, settings=settings) == [[3.0, 3.0]] * 2
    told = capsys.readouterr().err
    assert re.search(r"^ringreduce: debug: rank [01], process set 0, response \d+: allreduce 'a'", told, re.MULTILINE)
    assert re.search(
        r"^ringreduce: debug: allreduce of [12] tensors, \d+ B of float64: ring, in 1 buckets$", told, re.M
    )
    assert "trace" not in told
    run_ranks(2, reduce_two, settings=Settings(log_level="trace"))
    assert re.search(r"^ringreduce: trace: rank 1 announces allreduce 'a'", capsys.readouterr().err, re.MULTILINE)


def test_by_default_nothing_is_told(fresh_log, capsys):
    assert run_ranks(2, reduce_two) == [[3.0, 3.0]] * 2
    assert capsys.readouterr().err == ""


OF_ONE_RANK = {
    "engine/engine.py",
    "runtime/lifecycle.py",
    "monitor/excepthook.py",
    "monitor/launcher_link.py",
    "monitor/stall_report.py",
}


def test_what_is_said_of_the_job_does_not_depend_on_which_ranks_are_shown():
    """A warning goes to JOB, unless the report of a failure has it, or ringrun hears of it otherwise."""
    package = Path(rr.__file__).parent
    told = {each for each in package.rglob("*.py") if re.search(r"\bLOGGER\.(warning|error|log)\(", each.read_text())}
    assert {str(each.relative_to(package)) for each in told} - {"engine/negotiation.py"} == OF_ONE_RANK
