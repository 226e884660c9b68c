"""Whatever somebody does to the bytes of a connection on their way is noticed, and nothing of it is read."""

import itertools

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ringrun.connection.frames import HEAD_BYTES, FrameReader, FrameWriter
from ringrun.connection.link import keys

NONCES = b"n" * 64
OURS, BACK = keys(b"this job's key", NONCES)
OTHER_KEYS = [BACK, keys(b"another job's key", NONCES)[0], keys(b"this job's key", b"m" * 64)[0]]
messages = st.lists(st.binary(max_size=40), min_size=1, max_size=6)
somewhere = st.integers(0, 10_000)


def frames(key: bytes, sent: list[bytes]) -> list[bytes]:
    return list(map(FrameWriter(key).frame, sent))


def read(reader: FrameReader, stream: bytes, cuts: list[int]) -> list[bytes]:
    """What is read of a stream that comes in pieces; ValueError if some of it is refused, with what came before."""
    found = []
    ends = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    try:
        for begin, end in itertools.pairwise(ends):
            reader.feed(stream[begin:end])
            found += iter(reader.next, None)
    except ValueError as error:
        error.args += (found,)
        raise
    return found


@given(messages, st.lists(somewhere, max_size=8))
@example([b""], [])
def test_messages_survive_however_they_are_cut(sent: list[bytes], cuts: list[int]) -> None:
    assert read(FrameReader(OURS), b"".join(frames(OURS, sent)), cuts) == sent


def change(made: list[bytes], sent: list[bytes], k: int, at: int, more: int) -> bytes:
    stream = bytearray(b"".join(made))
    stream[at % len(stream)] ^= 1 << more % 8
    return bytes(stream)


def cut_out(made: list[bytes], sent: list[bytes], k: int, at: int, more: int) -> bytes:
    stream = b"".join(made)
    at %= len(stream)
    return stream[:at] + stream[at + 1 + more % len(stream) :]


def put_in(made: list[bytes], sent: list[bytes], k: int, at: int, more: int) -> bytes:
    stream = b"".join(made)
    at, more = at % len(stream), more % len(stream)
    return stream[:at] + stream[more : more + 1 + k] + stream[at:]


def drop(made: list[bytes], sent: list[bytes], k: int, at: int, more: int) -> bytes:
    return b"".join(made[:k] + made[k + 1 :])


def repeat(made: list[bytes], sent: list[bytes], k: int, at: int, more: int) -> bytes:
    return b"".join(made[: k + 1] + made[at % (k + 1) : k + 1] + made[k + 1 :])


def swap(made: list[bytes], sent: list[bytes], k: int, at: int, more: int) -> bytes:
    at %= len(made)
    made[k], made[at] = made[at], made[k]
    return b"".join(made)


def from_elsewhere(made: list[bytes], sent: list[bytes], k: int, at: int, more: int) -> bytes:
    """The same message of the same number: of the other direction, of another job, of another connection of this."""
    made[k] = frames(OTHER_KEYS[at % len(OTHER_KEYS)], sent)[k]
    return b"".join(made)


@pytest.mark.parametrize("attack", [change, cut_out, put_in, drop, repeat, swap, from_elsewhere])
@given(messages, somewhere, somewhere, somewhere, st.lists(somewhere, max_size=4))
def test_whatever_was_not_sent_so_is_refused(attack, sent: list[bytes], k: int, at: int, more: int, cuts) -> None:
    stream = b"".join(frames(OURS, sent))
    attacked = attack(frames(OURS, sent), sent, k % len(sent), at, more)
    assume(attacked != stream)
    *_, later = frames(OURS, [*sent, b"." * len(stream)])  # a reader may wait for as much as was taken away, not longer
    with pytest.raises(ValueError, match="of this connection was changed, repeated, reordered, or put in") as refused:
        read(FrameReader(OURS), attacked + later, cuts)
    found = refused.value.args[1]
    assert found == sent[: len(found)], "no message is read that was not sent, or not as that one"


def test_a_key_and_a_tag_are_for_one_thing_only() -> None:
    assert len({OURS, *OTHER_KEYS}) == 1 + len(OTHER_KEYS)
    head = frames(OURS, [b"four"])[0][:HEAD_BYTES]
    with pytest.raises(ValueError, match="message 0 of this connection was changed"):
        read(FrameReader(OURS), head + head, [])


@given(messages, st.integers(0, HEAD_BYTES - 1), st.integers(1, 255))
def test_a_length_that_was_not_sent_is_not_waited_for(sent: list[bytes], at: int, by: int) -> None:
    head = bytearray(frames(OURS, sent)[0][:HEAD_BYTES])
    head[at] ^= by
    with pytest.raises(ValueError, match="message 0 of this connection was changed"):
        read(FrameReader(OURS), bytes(head), [])
