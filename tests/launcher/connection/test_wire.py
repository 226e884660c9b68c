"""What agents and ringrun say to each other survives the wire, and nothing else is accepted."""

import json
import os
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.connection.wire import Message, RankError, Setup, decode, encode, native, portable, rank_error


@pytest.mark.parametrize("kind", get_args(Message))
@given(st.data())
def test_messages_survive(kind, data):
    message = data.draw(st.builds(kind, **{name: st.from_type(of) for name, of in get_type_hints(kind).items()}))
    assert repr(decode(encode(message))) == repr(message)  # with NaN in it, too


def test_words_and_variables_that_are_no_utf_8_survive():
    command = ("/bin/echo", "", "a\nb", "caf\udce9", "é")
    message = Setup(command, "10.0.0.1", 2345, "/home/me", {"A": "é=\udc80"}, gives_stdin=True)
    assert decode(encode(message)) == message


def test_bytes_are_the_same_in_every_locale():
    """As between a host whose Python takes all for ASCII and one of UTF-8."""
    setup = Setup(("/bin/echo", "café"), "h", 1, "/home/é", {"Ä": "ö"}, gives_stdin=False, commits="/ü")
    code = """if True:
        import os, sys
        from ringrun.connection.wire import decode, encode, native, portable
        assert sys.getfilesystemencoding() == "ascii"
        message = decode(bytes.fromhex(sys.argv[1])).mapped(native)
        os.write(1, b"|".join(map(os.fsencode, (message.command[1], *message.variables, *message.variables.values()))))
        os.write(1, b"\\n" + encode(message.mapped(portable)).hex().encode())
    """
    ascii = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [sys.executable, "-c", code, encode(setup.mapped(portable)).hex()]
    has, sends = subprocess.run(argv, env=ascii, stdout=subprocess.PIPE, check=True).stdout.split(b"\n")
    assert has.decode() == "café|Ä|ö"
    assert decode(bytes.fromhex(sends.decode())).mapped(native) == setup


def test_an_unknown_frame_is_refused():
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
def test_whatever_does_not_decode_is_a_value_error(payload):
    with pytest.raises(ValueError, match="a message that ringrun does not understand: "):
        decode(b"j" + payload)


def test_an_error_file_may_lack_fields():
    assert rank_error({"exception": "KeyError"}) == RankError("KeyError", "", "", ())
    assert rank_error({"exception": "PeerLostError", "lost_ranks": [2]}) == RankError("PeerLostError", "", "", (2,))
    assert rank_error({}) is None
    assert rank_error(None) is None
