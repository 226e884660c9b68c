"""What agents and ringrun say to each other survives the wire, and nothing else is accepted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.connection.wire import (
    Ask,
    Died,
    End,
    Ended,
    Hello,
    Hosts,
    InInit,
    Initialized,
    Input,
    InputWanted,
    Left,
    Meeting,
    Membership,
    Message,
    Note,
    NotStarted,
    Output,
    RankError,
    Ready,
    Reformed,
    Setup,
    Signal,
    Stalled,
    Started,
    State,
    Suspects,
    Taken,
    decode,
    encode,
    rank_error,
)

ERROR = RankError("ValueError", "boom é", "Traceback …", (1, 3))


@pytest.mark.parametrize(
    "message",
    [
        Hello(3, 8, "node7", 2345),
        Setup("10.0.0.1", 2345, "/home/me", {"A": "é=\udc80"}, gives_stdin=True),
        Taken(65536),
        InputWanted(),
        Input(b"\x00j{"),
        Input(b""),
        Note("ringrun: 2 ranks on node7"),
        Started(4711),
        NotStarted("Permission denied"),
        Output("stdout", b"\xff\x00\n"),
        Output("stderr", b""),
        Ended(0, 12.5),
        Ended(-9, 12.5, (15, 9), ERROR, 3.25, "out of memory"),
        Started(4711, "GPU 3"),
        State(7, "allreduce 'w' (é.py:3)", '  File "é.py", line 3, in f\n    w', ""),
        Stalled("allreduce 'w': waiting"),
        InInit(10.0),
        Initialized(),
        Died(-9, 12.5),
        Suspects((2, 5), "waiting for 'w'"),
        Meeting(3),
        Reformed(3),
        Left("its script ended"),
        Ready("h3:2"),
        Hosts("h3:2"),
        Membership(3, (0, 1, 3), {"2": "was killed by SIGKILL"}),
        Ask(7),
        Signal(15),
        End(),
        End(keeps_commits=True),
    ],
)
def test_messages_survive(message: Message) -> None:
    decoded = decode(encode(message))
    assert (type(decoded), decoded) == (type(message), message)


def test_an_unknown_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown tag b'x'"):
        decode(b"xyz")


@given(
    st.one_of(
        st.binary(),
        st.sampled_from([b"", b"[]", b"7", b'{"kind": 1}', b'{"kind": "Hello"}', b"[" * 100_000]),
        st.sampled_from(
            [
                {"kind": "Hello", "rank": "0", "size": 1, "host": "h", "port": 1},
                {"kind": "Ended", "code": 0, "at_s": 1.0, "sent": 7, "error": None},
                {"kind": "Signal", "number": None},
                {"kind": "End", "more": 1},
                {"kind": ["End"]},
            ]
        ).map(lambda fields: json.dumps(fields).encode()),
    )
)
def test_whatever_does_not_decode_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="a message that ringrun does not understand: "):
        decode(b"j" + payload)


def test_an_error_file_may_lack_fields() -> None:
    assert rank_error({"exception": "KeyError"}) == RankError("KeyError", "", "", ())
    assert rank_error({"exception": "PeerLostError", "lost_ranks": [2]}) == RankError("PeerLostError", "", "", (2,))
    assert rank_error({}) is None
    assert rank_error(None) is None
