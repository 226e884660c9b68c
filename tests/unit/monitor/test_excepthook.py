import json
import sys

import pytest

from ringreduce.errors import NanError, PeerLostError
from ringreduce.monitor import excepthook
from ringreduce.monitor.excepthook import write_report

pytestmark = pytest.mark.usefixtures("log_as_after_init")


def raised(error):
    try:
        raise error
    except type(error) as exc:
        return exc


@pytest.mark.parametrize(
    ("error", "lost"), [(ValueError("bad – data"), []), (PeerLostError("bad – data", [2]), [2])], ids=["own", "peer"]
)
def test_a_report_holds_the_exception_its_traceback_and_who_is_blamed(tmp_path, error, lost):
    path, name = tmp_path / "rank3.json", type(error).__name__
    write_report(str(path), raised(error))
    report = json.loads(path.read_text())
    assert (report["exception"], report["message"], report["lost_ranks"]) == (name, "bad – data", lost)
    assert report["traceback"].startswith("Traceback (most recent call last):")
    assert report["traceback"].endswith(f"{name}: bad – data\n")


def wrapped(how):
    try:
        raise PeerLostError("gone", [2, 3])
    except PeerLostError as lost:
        try:
            exec(how, {"lost": lost})
        except ValueError as error:
            return error


@pytest.mark.parametrize("how", ["raise ValueError from lost", "raise ValueError", "raise ValueError from None"])
def test_an_error_that_follows_from_a_lost_rank_blames_it(tmp_path, how):
    """As a script, or its framework, raises errors of its own in handling ours."""
    path, error = tmp_path / "rank0.json", wrapped(how)
    error.__context__.__context__ = error  # a circle, as some libraries make
    write_report(str(path), error)
    report = json.loads(path.read_text())
    assert (report["exception"], report["lost_ranks"]) == ("ValueError", [2, 3])


@pytest.mark.parametrize(
    ("error", "is_folded", "culprit"),
    [
        (PeerLostError("gone", (2,)), True, -1),
        (NanError("rank 3 of 4, …", 3), True, 3),
        (KeyError("a bug of ours, or a user's object"), False, -1),
    ],
)
def test_where_an_error_is_ours_its_traceback_ends_at_the_user_s_line(tmp_path, error, is_folded, culprit):
    path, ours = tmp_path / "rank3.json", f"{excepthook._PACKAGE}engine/engine.py"
    called = {"error": error}
    exec(compile("def inner():\n    raise error\ndef outer():\n    inner()", ours, "exec"), called)
    try:
        called["outer"]()
    except type(error) as exc:
        try:
            raise ValueError("the user's") from exc
        except ValueError as last:
            write_report(str(path), last)
            assert json.loads(path.read_text())["traceback"].count(ours) == 2 * (not is_folded)
            assert json.loads(path.read_text())["culprit"] == -1
        write_report(str(path), exc)
    report = json.loads(path.read_text())
    assert (report["traceback"].count(ours), report["culprit"]) == (2 * (not is_folded), culprit)
    assert report["traceback"].count('called["outer"]()') == 1


def test_a_report_that_cannot_be_written_is_told(tmp_path, capsys):
    write_report(str(tmp_path / "missing" / "rank0.json"), raised(ValueError("x")))
    told = capsys.readouterr().err
    assert "ringreduce: the report of this failure could not be written" in told
    assert "it was ValueError: x" in told


def test_a_report_holds_an_exception_whose_own_text_raises(tmp_path):
    """As str() did here, the report was on that error, and the rank's output had a traceback of ringreduce's own."""

    class Odd(Exception):
        def __str__(self):
            raise ValueError("in __str__")

    path = tmp_path / "rank0.json"
    write_report(str(path), raised(Odd()))
    report = json.loads(path.read_text())
    assert report["exception"] == "Odd"
    assert "in __str__" not in report["message"] + report["traceback"]


class Broken:
    def flush(self):
        raise RuntimeError("the user's own")


@pytest.mark.parametrize("stream", [None, object(), Broken()], ids=["none", "without flush", "raises"])
def test_what_the_script_has_put_in_place_of_stdout_does_not_break_its_end(monkeypatch, capsys, stream):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        excepthook.flush()


def test_before_the_process_ends_there_is_a_last_report(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(excepthook.mpi, "abort", lambda code: None)  # which comes where os._exit returns
    monkeypatch.setattr(excepthook.os, "_exit", done.append)
    excepthook.install(str(tmp_path / "rank0.json"), lambda: done.append("reported"))
    error = raised(ValueError("x"))
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        excepthook.uninstall()
    assert done == ["reported", 1]


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [(ValueError("x"), 1, True), (KeyboardInterrupt(), 130, False), (PeerLostError("rank 2 died", [2]), 1, False)],
    ids=["an error", "Ctrl-C", "a lost rank"],
)
@pytest.mark.parametrize("by_ringrun", [True, False], ids=["ringrun", "mpirun"])
def test_how_the_process_ends_and_who_shows_the_traceback(tmp_path, monkeypatch, error, code, shown, by_ringrun):
    """ringrun shows an interrupt once, and not each rank's loss of another; without it each rank says all itself."""
    ended, said = [], []
    monkeypatch.setattr(excepthook.mpi, "is_alone", lambda: False)
    monkeypatch.setattr(excepthook.mpi, "abort", lambda code: ended.append(("mpi", code)))
    monkeypatch.setattr(excepthook.os, "_exit", lambda code: ended.append(("exit", code)))
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: said.append(kind))
    excepthook.install(str(tmp_path / "rank0.json") if by_ringrun else "")
    try:
        sys.excepthook(type(error), raised(error), error.__traceback__)
    finally:
        excepthook.uninstall()
    assert ended[0] == ("exit" if by_ringrun else "mpi", code)
    assert said == [type(error)] * (shown or not by_ringrun)
    assert (tmp_path / "rank0.json").exists() is by_ringrun


def test_a_report_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "rank3.json"

    def is_full(report, file):
        file.write('{"exception": ')
        file.flush()
        assert not path.exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(excepthook.json, "dump", is_full)
    write_report(str(path), raised(ValueError("x")))
    assert not path.exists()
