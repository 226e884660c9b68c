"""Prefixes, colours, whole lines, and the transient line of a terminal."""

import os
import pty
import select
import threading
from collections.abc import Iterator

import pytest

from ringrun.output import Output, Prefix


def test_prefixes_are_as_wide_as_the_largest_rank() -> None:
    assert Prefix(10, colour=False).apply(3, b"x") == b"[3] x"
    assert Prefix(11, colour=False).apply(3, b"x") == b"[ 3] x"
    assert Prefix(101, colour=False).apply(42, b"x") == b"[ 42] x"


def test_an_empty_line_has_no_trailing_blank() -> None:
    assert Prefix(2, colour=False).apply(1, b"") == b"[1]"


def test_colours_differ_by_rank_and_end_with_the_prefix() -> None:
    prefix = Prefix(4, colour=True)
    prefixes = [prefix.of(rank) for rank in range(4)]
    assert len({text[: text.index(b"m")] for text in prefixes}) == 4
    assert all(text.startswith(b"\x1b[") and text.endswith(b"[%d]\x1b[0m" % rank) for rank, text in enumerate(prefixes))


QUIET_S = 0.25  # nothing more is to come after so long without anything


class Ends:
    """An Output, and the far ends of its two descriptors."""

    def __init__(self, *, terminal: bool, environ: dict[str, str]) -> None:
        pairs = [pty.openpty() if terminal else os.pipe() for _ in range(2)]
        self.far = [pair[0] for pair in pairs]
        self.near = [pair[1] for pair in pairs]
        if terminal:
            import termios

            for descriptor in self.near:  # no \n → \r\n
                attributes = termios.tcgetattr(descriptor)
                attributes[1] &= ~termios.OPOST
                termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
        self.output = Output(4, environ, *self.near)

    def read(self, index: int) -> bytes:
        """Return all that has come: the kernel hands a terminal's bytes over later, and in pieces."""
        data = b""
        while select.select([self.far[index]], [], [], QUIET_S)[0]:
            data += os.read(self.far[index], 1 << 20)
        return data

    def close(self) -> None:
        for descriptor in self.far + self.near:
            os.close(descriptor)


@pytest.fixture
def pipes() -> Iterator[Ends]:
    ends = Ends(terminal=False, environ={"TERM": "xterm"})
    yield ends
    ends.close()


@pytest.fixture(params=[{}, {"NO_COLOR": "1"}])
def terminal(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(terminal=True, environ={"TERM": "xterm", **request.param})
    yield ends
    ends.close()


def test_each_stream_goes_to_its_own(pipes: Ends) -> None:
    pipes.output.write(1, "stdout", [b"one", b"two"])
    pipes.output.write(2, "stderr", [b"bad \xff byte"])
    assert pipes.read(0) == b"[1] one\n[1] two\n"
    assert pipes.read(1) == b"[2] bad \xff byte\n"


def test_off_a_terminal_an_unfinished_line_is_not_shown(pipes: Ends) -> None:
    pipes.output.write(1, "stdout", [], frame=b" 10%")
    assert pipes.read(0) == b""


def test_on_a_terminal_the_unfinished_line_is_erased_and_drawn_again(terminal: Ends) -> None:
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


def test_colour_on_a_terminal_unless_no_color(terminal: Ends, request: pytest.FixtureRequest) -> None:
    terminal.output.write(1, "stdout", [b"text"])
    coloured = terminal.read(0) != b"[1] text\n"
    assert coloured == ("NO_COLOR" not in request.node.callspec.params["terminal"])


def test_a_frame_cannot_move_the_cursor(terminal: Ends) -> None:
    terminal.output.write(1, "stdout", [], frame=b"\x1b[Aup\x1b[32mgreen\x07")
    drawn = terminal.read(0)
    assert b"up\x1b[32mgreen" in drawn
    assert b"\x1b[A" not in drawn
    assert b"\x07" not in drawn


def test_threads_do_not_interleave_their_lines(pipes: Ends) -> None:
    received = bytearray()
    reader = threading.Thread(target=lambda: [received.extend(iter_read) for iter_read in iter(read_some, b"")])

    def read_some() -> bytes:
        return os.read(pipes.far[0], 4096)

    def write(rank: int) -> None:
        for count in range(20):
            pipes.output.write(rank, "stdout", [b"%d" % rank * 200_000 + b" %d" % count])  # more than a pipe holds

    reader.start()
    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    os.close(pipes.near[0])
    reader.join()
    pipes.near[0] = os.dup(pipes.near[1])
    lines = bytes(received).splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(b"[%d] " % rank)]
        assert mine == [b"[%d] " % rank + b"%d" % rank * 200_000 + b" %d" % count for count in range(20)]
    assert len(lines) == 80


def test_a_reader_that_left_is_noticed(pipes: Ends) -> None:
    os.close(pipes.far[0])
    pipes.output.write(0, "stdout", [b"x"])
    pipes.far[0] = os.dup(pipes.far[1])
    assert pipes.output.closed
