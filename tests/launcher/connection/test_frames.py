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


def frames(key, sent):
    return list(map(FrameWriter(key).frame, sent))


def read(reader, stream, cuts):
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
def test_messages_survive_however_they_are_cut(sent, cuts):
    assert read(FrameReader(OURS), b"".join(frames(OURS, sent)), cuts) == sent


def assert_refused(attacked, sent, cuts):
    """A reader may wait for as much as was taken away, and not longer."""
    stream = b"".join(frames(OURS, sent))
    assume(attacked != stream)
    *_, later = frames(OURS, [*sent, b"." * len(stream)])
    with pytest.raises(ValueError, match="of this connection was changed, repeated, reordered or inserted") as refused:
        read(FrameReader(OURS), attacked + later, cuts)
    found = refused.value.args[1]
    assert found == sent[: len(found)], "no message is read that was not sent, or not as that one"


ATTACKS = {
    "cut out": lambda units, i, j: units[:i] + units[j:],
    "repeat": lambda units, i, j: units[:j] + units[i:],
    "swap": lambda units, i, j: units[:i] + units[j : j + 1] + units[i + 1 : j] + units[i : i + 1] + units[j + 1 :],
}


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@given(messages, somewhere, somewhere, st.lists(somewhere, max_size=4))
def test_what_was_not_sent_there_is_refused(attack, in_bytes, sent, i, j, cuts):
    made = frames(OURS, sent)
    units = [bytes([each]) for each in b"".join(made)] if in_bytes else made
    i, j = sorted((i % len(units), j % (len(units) + 1)))
    assert_refused(b"".join(attack(units, i, j)), sent, cuts)


@given(messages, somewhere, st.integers(1, 255), st.lists(somewhere, max_size=4))
def test_what_was_not_sent_so_is_refused(sent, at, by, cuts):
    stream = bytearray(b"".join(frames(OURS, sent)))
    stream[at % len(stream)] ^= by
    assert_refused(bytes(stream), sent, cuts)


@given(messages, somewhere, st.sampled_from(OTHER_KEYS), st.lists(somewhere, max_size=4))
def test_what_was_sent_elsewhere_is_refused(sent, k, key, cuts):
    """The same message of the same number: of the other direction, of another job, of another connection of this."""
    made, k = frames(OURS, sent), k % len(sent)
    assert_refused(b"".join([*made[:k], frames(key, sent)[k], *made[k + 1 :]]), sent, cuts)


def test_a_key_and_a_tag_are_for_one_thing_only():
    assert len({OURS, *OTHER_KEYS}) == 1 + len(OTHER_KEYS)
    head = frames(OURS, [b"four"])[0][:HEAD_BYTES]
    with pytest.raises(ValueError, match="message 0 of this connection was changed"):
        read(FrameReader(OURS), head + head, [])


@given(messages, st.integers(0, HEAD_BYTES - 1), st.integers(1, 255))
def test_a_length_that_was_not_sent_is_not_waited_for(sent, at, by):
    head = bytearray(frames(OURS, sent)[0][:HEAD_BYTES])
    head[at] ^= by
    with pytest.raises(ValueError, match="message 0 of this connection was changed"):
        read(FrameReader(OURS), bytes(head), [])
