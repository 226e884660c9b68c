"""Stacks as faulthandler writes them, and what is shown of them."""

import faulthandler
import tempfile
import threading

import hypothesis
import hypothesis.strategies as st

from ringrun.states import stacks_report
from ringrun.traces import Frame, Thread, describe_threads, innermost, parse
from ringrun.wire import State

DUMP = """Thread 0x00007f3088ffa6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00000000000000aa [loader] (most recent call first):
  File "/home/me/my data/load.py", line 7 in load
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00000000000000bb (most recent call first):
  File "/opt/ringreduce/engine/request.py", line 52 in wait
  File "/venv/lib/python3.12/site-packages/torch/nn.py", line 3 in forward
  File "/home/me/train.py", line 41 in step
  File "/home/me/train.py", line ??? in <module>
"""
MAIN = 0xBB


def source(file: str, line: int) -> str:
    return f"source {line}" if line else ""


def test_threads_and_frames_are_read_innermost_last() -> None:
    threads = parse(DUMP)
    assert [thread.ident for thread in threads] == [0x7F3088FFA6C0, 0xAA, MAIN]
    assert threads[1].frames[-1] == Frame("/home/me/my data/load.py", 7, "load")
    assert threads[2].frames[0] == Frame("/home/me/train.py", 0, "<module>")


def test_of_two_dumps_the_later_counts() -> None:
    later = 'Current thread 0xbb (most recent call first):\n  File "later.py", line 1 in f\n'
    assert parse(f"{DUMP}\n{later}")[-1] == Thread(MAIN, (Frame("later.py", 1, "f"),))


def test_a_dump_of_this_very_process_is_read() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        told = parse(file.read())
    own = next(thread for thread in told if thread.ident == threading.get_ident())
    assert own.frames[-1].function == "test_a_dump_of_this_very_process_is_read"
    assert innermost(told, own.ident).endswith(": faulthandler.dump_traceback(file)")


STACKS = """\
  File "/home/me/train.py", line ?, in <module>
  File "/home/me/train.py", line 41, in step
    source 41
  File "/venv/lib/python3.12/site-packages/torch/nn.py", line 3, in forward"""
LOADER = """\
another thread:
  File "/usr/lib/python3.11/threading.py", line 982, in run
  File "/home/me/my data/load.py", line 7, in load
    source 7"""


def test_the_main_thread_comes_first_and_threads_of_libraries_not_at_all() -> None:
    engine = '  File "/opt/ringreduce/engine/request.py", line 52, in wait'
    shown = describe_threads(parse(DUMP), MAIN, "/opt/ringreduce", source)
    assert shown == f"{STACKS}\n{engine}\n{LOADER}"


def test_inside_ringreduce_nothing_is_shown_of_a_wait_that_is_named() -> None:
    shown = describe_threads(parse(DUMP), MAIN, "/opt/ringreduce", source, waits=True)
    user_only = STACKS.splitlines()[:3]
    assert shown == "\n".join([*user_only, LOADER])


def test_the_innermost_line_is_the_users() -> None:
    assert innermost(parse(DUMP), MAIN, "/opt/ringreduce", source) == "train.py:41, in step: source 41"
    assert innermost(parse(DUMP), MAIN, "", source) == "request.py:52, in wait: source 52"
    assert innermost(parse(DUMP), 0x7F3088FFA6C0, "", source) == "threading.py:982, in run"
    assert innermost(parse(DUMP), 1, "", source) == ""


@hypothesis.given(st.text() | st.lists(st.sampled_from([*DUMP.splitlines(), "", "  ...", "x"])).map("\n".join))
def test_any_text_is_some_threads(text: str) -> None:
    described = describe_threads(parse(text), MAIN, "", lambda *_: "")
    assert isinstance(described, str)
    assert isinstance(innermost(parse(text), MAIN, "", lambda *_: ""), str)


def test_equal_stacks_are_shown_once_with_their_ranks() -> None:
    wait = State(1, "allreduce 'w' (train.py:41)", STACKS, "")
    silent = State(1, "", "", "it is stopped")
    states = {0: wait, 2: wait, 3: State(1, "train.py:9, in load", LOADER, ""), 4: silent}
    hosts = {0: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    assert stacks_report({0, 2, 3, 4, 5}, states, 8, hosts) == [
        "ranks 0,2 of 8 on 2 hosts: allreduce 'w' (train.py:41)",
        *STACKS.splitlines(),
        "rank 3 of 8 on b: train.py:9, in load",
        *LOADER.splitlines(),
        "rank 4 of 8 on c: it is stopped",
        "rank 5 of 8 on c: did not answer in time",
        "ranks 1,6-7 of 8: not running",
    ]
