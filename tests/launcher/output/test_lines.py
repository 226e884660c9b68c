"""The line splitter: cuts do not matter, progress bars collapse, memory is bounded."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from ringrun.output.lines import LineSplitter

# bytes rich in newlines and carriage returns
streams = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bc", b"\xff", b"\xc3\xa9", b" "]), max_size=40)
any_stream = st.one_of(streams.map(b"".join), st.binary(max_size=200))


def split_whole(data, limit=1 << 20):
    splitter = LineSplitter(limit)
    return splitter.feed(data) + splitter.flush()


def last_frame(line):
    """What a line shows in the end, said another way than the code says it: the last frame that is not empty."""
    return next((frame for frame in reversed(line.split(b"\r")) if frame), b"")


@given(any_stream, st.lists(st.integers(0, 200)), st.sampled_from([3, 1 << 20]))
def test_any_chunking_gives_the_same_lines(data, cuts, limit):
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    splitter = LineSplitter(limit)
    lines = [line for low, high in itertools.pairwise(bounds) for line in splitter.feed(data[low:high])]
    assert lines + splitter.flush() == split_whole(data, limit)


@given(any_stream)
def test_each_line_is_its_last_frame(data):
    splitter = LineSplitter()
    *complete, rest = data.split(b"\n")
    assert splitter.feed(data) == [last_frame(line) for line in complete]
    assert splitter.pending == last_frame(rest)


@given(st.binary(max_size=300).filter(lambda data: not re.search(rb"[\r\n]", data)), st.integers(1, 50))
def test_a_long_line_is_cut_and_loses_nothing(data, limit):
    splitter = LineSplitter(limit)
    lines = splitter.feed(data)
    assert b"".join(lines) + splitter.pending == data
    assert len(splitter.pending) <= limit
    assert all(len(line) == limit for line in lines)


def test_a_progress_bar_without_end_takes_no_memory():
    splitter = LineSplitter(1000)
    assert all(splitter.feed(b"\r%3d%%" % (count % 100)) == [] for count in range(10000))
    assert splitter.pending == b" 99%"


def test_only_a_line_that_was_started_over_is_a_frame():
    splitter = LineSplitter()
    splitter.feed(b"loading ...")
    assert splitter.frame == b""
    splitter.feed(b"\r 10%")
    assert splitter.frame == b" 10%"
    splitter.feed(b"\r")
    assert splitter.frame == b" 10%"
    splitter.feed(b"\nnext")
    assert (splitter.frame, splitter.pending) == (b"", b"next")


def test_flush_gives_the_unfinished_line_once_and_drops_an_erased_bar():
    splitter = LineSplitter()
    assert splitter.feed(b"done\nhalf") == [b"done"]
    assert splitter.flush() == [b"half"]
    assert splitter.flush() == []
    assert splitter.feed(b"\r100%\r     \r") == []
    assert splitter.flush() == []
