import json

import pytest

from ringreduce.errors import PeerLostError
from ringreduce.monitor.excepthook import write_report

pytestmark = pytest.mark.usefixtures("log_as_after_init")


def raised(error):
    try:
        raise error
    except type(error) as exc:
        return type(exc), exc, exc.__traceback__


def test_a_report_holds_the_exception_and_its_traceback(tmp_path):
    path = tmp_path / "rank3.json"
    write_report(str(path), *raised(ValueError("bad – data")))
    report = json.loads(path.read_text())
    assert (report["exception"], report["message"], report["lost_ranks"]) == ("ValueError", "bad – data", [])
    assert report["traceback"].startswith("Traceback (most recent call last):")
    assert report["traceback"].endswith("ValueError: bad – data\n")


def test_a_lost_peer_is_blamed(tmp_path):
    path = tmp_path / "rank0.json"
    write_report(str(path), *raised(PeerLostError("rank 2 has left", [2])))
    assert json.loads(path.read_text())["lost_ranks"] == [2]


def test_a_report_that_cannot_be_written_is_told(tmp_path, capsys):
    write_report(str(tmp_path / "missing" / "rank0.json"), *raised(ValueError("x")))
    told = capsys.readouterr().err
    assert "ringreduce: the report of this failure could not be written" in told
    assert "it was ValueError: x" in told
