"""Prefixes, colours, whole lines, and the transient line of a terminal."""

import contextlib
import os
import pty
import select
import threading
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.output import display
from ringrun.output.display import Display, Output
from ringrun.output.files import OutputFiles
from ringrun.output.prefix import Prefix, local_time
from tests.support.loops import in_a_loop
from tests.support.patience import patient


@in_a_loop(
    ("size", "fold", "ranks", "line"),
    [
        (10, False, [3], b"[3] x"),
        (11, False, [3], b"[ 3] x"),
        (101, False, [42], b"[ 42] x"),
        (1, True, [0], b"[0] x"),
        (16, True, [3], b"[    3] x"),
        (16, True, range(16), b"[ 0-15] x"),
        (16, True, [0, 1, 7], b"[0-1,7] x"),
    ],
)
def test_prefixes_are_as_wide_as_the_largest_rank(size, fold, ranks, line):
    prefix = Prefix(size, colour=False, fold=fold)
    assert prefix.apply(ranks, b"x") == [line]
    assert prefix.apply(ranks, b"x", b"12:00") == [b"12:00 " + line], "the time stands first"
    assert prefix.apply(ranks, b"") == [line.removesuffix(b" x")], "no blank at the end of an empty line"
    assert prefix.apply(ranks, b"", b"12:00") == [b"12:00 " + line.removesuffix(b" x")]


def test_colours_differ_by_rank_and_end_with_the_prefix():
    prefix = Prefix(4, colour=True)
    prefixes = [prefix.of(rank)[0] for rank in range(4)]
    assert len({text[: text.index(b"m")] for text in prefixes}) == 4
    assert all(text.startswith(b"\x1b[") and text.endswith(b"[%d]\x1b[0m" % rank) for rank, text in enumerate(prefixes))


def test_a_prefix_too_long_to_read_is_cut_in_several():
    lines = Prefix(64, colour=False, fold=True).apply(range(0, 64, 2), b"x")
    assert lines[0] == b"[0,2,4,6,8,10,12,14] x"
    assert all(len(line) <= len("[] x") + 20 for line in lines)
    assert b",".join(line[1:-3] for line in lines) == b",".join(b"%d" % rank for rank in range(0, 64, 2))


def test_several_ranks_have_no_rank_s_colour():
    prefix = Prefix(4, colour=True, fold=True)
    assert prefix.of(1, 2) == [b"\x1b[1m[1-2]\x1b[0m"]
    assert prefix.of(1)[0].startswith(b"\x1b[33m[  1]")


@given(st.integers(0, 4_000_000_000_000))
def test_the_local_time_is_that_of_datetime(milliseconds):
    expected = datetime.fromtimestamp(milliseconds // 1000) + timedelta(milliseconds=milliseconds % 1000)
    at_s = milliseconds / 1000 + 0.0001  # not just below it, as the float may be
    assert local_time(at_s).decode() == expected.isoformat(sep=" ", timespec="milliseconds")


QUIET_S = 0.25  # nothing more is to come after so long without anything


_PLAIN = Display()


class Ends:
    """An Output, and the far ends of its two descriptors."""

    def __init__(self, *, terminal, environ, display=_PLAIN):
        pairs = [pty.openpty() if terminal else os.pipe() for _ in range(2)]
        self.far = [pair[0] for pair in pairs]
        self.near = [pair[1] for pair in pairs]
        if terminal:
            import termios

            for descriptor in self.near:  # no \n → \r\n
                attributes = termios.tcgetattr(descriptor)
                attributes[1] &= ~termios.OPOST
                termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
        self.output = Output(4, environ, *self.near, display=display)

    def read(self, index):
        """Return all that has come: the kernel hands a terminal's bytes over later, and in pieces."""
        assert self.output.finish(patient(10))
        data = b""
        while select.select([self.far[index]], [], [], QUIET_S)[0]:
            data += os.read(self.far[index], 1 << 20)
        return data

    def close(self):
        self.output.begin(4)  # nothing is due any more
        assert self.output.finish(patient(10))
        for descriptor in self.far + self.near:
            os.close(descriptor)


@pytest.fixture
def pipes():
    ends = Ends(terminal=False, environ={"TERM": "xterm"})
    yield ends
    ends.close()


@pytest.fixture(params=[{}, {"NO_COLOR": "1"}])
def terminal(request):
    ends = Ends(terminal=True, environ={"TERM": "xterm", **request.param})
    yield ends
    ends.close()


def test_each_stream_goes_to_its_own(pipes):
    pipes.output.write(1, "stdout", [b"one", b"two"])
    pipes.output.write(2, "stderr", [b"bad \xff byte"])
    assert pipes.read(0) == b"[1] one\n[1] two\n"
    assert pipes.read(1) == b"[2] bad \xff byte\n"


def test_off_a_terminal_an_unfinished_line_is_not_shown(pipes):
    pipes.output.write(1, "stdout", [], frame=b" 10%")
    assert pipes.read(0) == b""


def test_on_a_terminal_the_unfinished_line_is_erased_and_drawn_again(terminal):
    terminal.output.write(1, "stdout", [], frame=b" 10%")
    drawn = terminal.read(0)
    assert b" 10%" in drawn
    assert b"\n" not in drawn
    terminal.output.write(2, "stdout", [b"between"])
    above = terminal.read(0)
    assert above.startswith(b"\r\x1b[K")
    assert above.index(b"between\n") < above.index(b" 10%")
    terminal.output.write(1, "stdout", [b"100%"])
    last = terminal.read(0)
    assert last.startswith(b"\r\x1b[K")
    assert last.endswith(b"100%\n")


def test_colour_on_a_terminal_unless_no_color(terminal, request):
    terminal.output.write(1, "stdout", [b"text"])
    coloured = terminal.read(0) != b"[1] text\n"
    assert coloured == ("NO_COLOR" not in request.node.callspec.params["terminal"])


def test_a_frame_cannot_move_the_cursor(terminal):
    terminal.output.write(1, "stdout", [], frame=b"\x1b[Aup\x1b[32mgreen\x07")
    drawn = terminal.read(0)
    assert b"up\x1b[32mgreen" in drawn
    assert b"\x1b[A" not in drawn
    assert b"\x07" not in drawn


@pytest.fixture
def folding():
    ends = Ends(terminal=False, environ={}, display=Display(frozenset([0, 1, 2]), fold=True))
    yield ends
    ends.close()


def test_lines_that_fold_wait_and_are_shown_in_time(folding):
    folding.output.write(0, "stdout", [b"x"])
    folding.output.write(2, "stdout", [b"x"])
    folding.output.write(3, "stdout", [b"x"])  # hidden
    assert not select.select([folding.far[0]], [], [], 0.1)[0]
    assert select.select([folding.far[0]], [], [], 5.0)[0]
    assert folding.read(0) == b"[0,2] x\n"
    folding.output.write(1, "stdout", [b"y"])  # the thread that shows them has slept in between
    assert select.select([folding.far[0]], [], [], 5.0)[0]
    assert folding.read(0) == b"[  1] y\n"


def test_a_message_comes_below_the_lines_that_wait(folding):
    os.dup2(folding.near[1], folding.near[0])
    folding.output.write(0, "stdout", [b"x"])
    folding.output.message(["ringrun: the end"])
    assert folding.read(1) == b"[  0] x\nringrun: the end\n"


def test_lines_wait_for_none_of_a_rank_that_has_ended(folding):
    folding.output.rank_ended(1)
    folding.output.rank_ended(3)  # hidden
    folding.output.write(0, "stdout", [b"x"])
    folding.output.write(2, "stdout", [b"x"])
    assert os.read(folding.far[0], 100) == b"[0,2] x\n"


def test_another_attempt_of_another_size_has_other_prefixes(pipes):
    pipes.output.write(4, "stdout", [b"no rank of 4"])
    pipes.output.begin(11)
    pipes.output.write(4, "stdout", [b"x"])
    assert pipes.read(0) == b"[ 4] x\n"


def test_a_bar_is_shown_while_lines_wait_and_its_end_is_folded():
    ends = Ends(
        terminal=True, environ={"TERM": "xterm", "NO_COLOR": "1"}, display=Display(frozenset([0, 1]), fold=True)
    )
    ends.output.write(0, "stdout", [], frame=b" 10%")
    assert b"[  0]  10%" in ends.read(0)
    ends.output.write(0, "stdout", [b"100%"])
    ends.output.write(1, "stdout", [b"100%"])
    assert ends.read(0) == b"\r\x1b[K[0-1] 100%\n"
    ends.close()


def test_a_reader_that_left_is_noticed(pipes):
    noticed = threading.Event()
    pipes.output.on_closed = noticed.set
    os.close(pipes.far[0])
    pipes.output.write(0, "stdout", [b"x"])
    pipes.far[0] = os.dup(pipes.far[1])
    assert noticed.wait(patient(10))
    assert pipes.output.closed


def test_a_full_disk_costs_one_line_and_what_was_to_be_written(tmp_path):
    full, errors = os.open("/dev/full", os.O_WRONLY), tmp_path / "errors"
    output = Output(1, {}, full, os.open(errors, os.O_WRONLY | os.O_CREAT))
    for _ in range(3):
        output.write(0, "stdout", [b"lost"])
    output.message(["ringrun: still here"])
    assert output.finish(patient(10))
    assert not output.closed
    assert errors.read_text() == (
        "ringrun: stdout cannot be written: No space left on device; its lines are lost while that lasts, but the job "
        "continues\nringrun: still here\n"
    )


@pytest.mark.parametrize("broken", ["_write", "_show_in_time"])
def test_an_error_in_the_thread_that_writes_is_one_line_and_it_goes_on(broken, monkeypatch):
    def fail(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(Output, broken, fail)
    ends = Ends(terminal=False, environ={})
    for _ in range(2):
        ends.output.write(0, "stdout", [b"x"])
    ends.output.message(["ringrun: the end"])
    lines = ends.read(1).splitlines()
    lost = b"ringrun: output is lost, but the job continues: MemoryError: no more"
    assert sorted(lines) == [lost, b"ringrun: the end"]
    assert ends.read(0) == (b"" if broken == "_write" else b"[0] x\n[0] x\n")
    ends.close()


def test_what_nobody_reads_is_dropped_in_the_end_and_the_other_stream_is_not(pipes):
    pipes.output.write(0, "stdout", [b"x" * 1_000_000])
    pipes.output.message(["ringrun: the end"])
    assert not pipes.output.finish(0.01)
    pipes.output.close(patient(10))
    assert pipes.read(1) == b"ringrun: the end\n"


def test_files_on_a_file_system_that_hangs_keep_back_no_message(pipes, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    hangs = os.open(tmp_path / "fifo", os.O_RDWR)  # and nobody reads it
    (tmp_path / "rank.1").mkdir()
    (tmp_path / "rank.1" / "stdout").symlink_to(tmp_path / "fifo")
    with contextlib.closing(OutputFiles(str(tmp_path), 2)) as files:
        output, taken = Output(2, {}, *pipes.near, files=files), []
        for each in (output, pipes.output):
            each.begin(2)
        monkeypatch.setattr(threading.Thread, "start", None)  # no more threads can be had in mid-job
        for _ in range(3):
            output.keep(1, "stdout", b"x" * 60_000, lambda: taken.append(1))
        output.message(["ringrun: the end"])
        output.close(0.1)
        assert pipes.read(1) == b"ringrun: the end\n"
        assert len(taken) < 3
        while not output.finish(0.01):  # let its thread end
            os.read(hangs, 1 << 16)
    os.close(hangs)


def test_elsewhere_the_state_of_a_progress_bar_becomes_a_line_now_and_then(pipes, monkeypatch):
    monkeypatch.setattr(display, "BAR_S", 0.02)
    for state in (b" 10%", b"\x1b[A 20%"):
        pipes.output.write(1, "stderr", [], frame=state)
        line = os.read(pipes.far[1], 100)
    assert line == b"[1]  20%\n"
    assert pipes.read(1) == b"", "only when there is another"
    pipes.output.write(1, "stderr", [b"100%"])
    assert pipes.read(1) == b"[1] 100%\n"
