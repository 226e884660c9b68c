"""Stacks as faulthandler writes them, and what is shown of them."""

import faulthandler
import subprocess
import sys
import tempfile

import hypothesis
import hypothesis.strategies as st

from ringrun.connection.wire import Answer
from ringrun.report.answers import stacks_report
from ringrun.report.traces import Frame, describe, innermost, parse

DUMP = """Stack (most recent call first):
  File "/opt/ringreduce/engine/request.py", line 52 in wait
  File "/venv/lib/python3.12/site-packages/torch/nn.py", line 3 in forward
  File "/home/me/my code/train.py", line 41 in step
  File "/home/me/train.py", line ??? in <module>
"""
STACK = """\
  File "/home/me/train.py", line ?, in <module>
  File "/home/me/my code/train.py", line 41, in step
    source 41
  File "/venv/lib/python3.12/site-packages/torch/nn.py", line 3, in forward"""
ENGINE = '  File "/opt/ringreduce/engine/request.py", line 52, in wait'
LOADER = '  File "/home/me/load.py", line 9, in load'


def source(file, line):
    return f"source {line}" if line else ""


def test_frames_are_read_innermost_last():
    frames = parse(DUMP)
    assert frames[0] == Frame("/home/me/train.py", 0, "<module>")
    assert frames[1] == Frame("/home/me/my code/train.py", 41, "step")
    assert len(frames) == 4


def test_of_two_dumps_the_later_counts():
    later = 'Stack (most recent call first):\n  File "later.py", line 1 in f\n'
    assert parse(f"{DUMP}\n{later}") == [Frame("later.py", 1, "f")]


def test_a_dump_of_this_very_process_is_read():
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        frames = parse(file.read())
    assert frames[-1].function == "test_a_dump_of_this_very_process_is_read"
    assert innermost(frames).endswith(": faulthandler.dump_traceback(file, all_threads=False)")


def test_names_that_are_not_ascii_are_read_and_their_source_is_found(tmp_path):
    path = tmp_path / "用户 é \U0001f600 \udcff.py"
    path.write_text(
        "import faulthandler, sys\n\ndef wärten():\n    faulthandler.dump_traceback(sys.stdout)\n\nwärten()\n"
    )
    frames = parse(subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout)
    assert frames == [Frame(str(path), 6, "<module>"), Frame(str(path), 4, "wärten")]
    assert innermost(frames) == f"{path.name}:4, in wärten: faulthandler.dump_traceback(sys.stdout)"


def test_source_stands_with_the_users_frames_only():
    assert describe(parse(DUMP), "/opt/ringreduce", source) == [*STACK.splitlines(), ENGINE]


def test_inside_ringreduce_nothing_is_shown_of_a_wait_that_is_named():
    assert describe(parse(DUMP), "/opt/ringreduce", source, waits=True) == STACK.splitlines()[:3]
    alone = [Frame("/opt/ringreduce/runtime/lifecycle.py", 160, "_at_exit")]
    assert len(describe(alone, "/opt/ringreduce", source, waits=True)) == 1


def test_the_innermost_line_is_the_users():
    assert innermost(parse(DUMP), "/opt/ringreduce", source) == "train.py:41, in step: source 41"
    assert innermost(parse(DUMP), "", source) == "request.py:52, in wait: source 52"
    library = [Frame("/usr/lib/python3.11/threading.py", 982, "_shutdown")]
    assert innermost(library, "", source) == "threading.py:982, in _shutdown"
    assert innermost([], "", source) == ""


@hypothesis.given(st.text() | st.lists(st.sampled_from([*DUMP.splitlines(), "", "  ...", "x"])).map("\n".join))
def test_any_text_is_a_stack(text):
    frames = parse(text)
    assert all(isinstance(line, str) for line in describe(frames, "", lambda *_: ""))
    assert isinstance(innermost(frames, "", lambda *_: ""), str)


def test_equal_stacks_are_shown_once_with_their_ranks():
    wait = Answer(1, "allreduce 'w' (train.py:41)", STACK, "")
    silent = Answer(1, "", "", "it is stopped")
    answers = {0: wait, 2: wait, 3: Answer(1, "train.py:9, in load", LOADER, ""), 4: silent}
    hosts = {0: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    assert stacks_report({0, 2, 3, 4, 5}, answers, 8, hosts) == [
        "ranks 0,2 of 8 on 2 hosts: allreduce 'w' (train.py:41)",
        *STACK.splitlines(),
        "rank 3 of 8 on b: train.py:9, in load",
        *LOADER.splitlines(),
        "rank 4 of 8 on c: it is stopped",
        "rank 5 of 8 on c: did not answer in time",
        "ranks 1,6-7 of 8: not running",
    ]
