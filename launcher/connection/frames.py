"""Frames: how a message travels, so that nobody on its way can change, repeat, reorder, drop or add any.

    length, 4 bytes · tag of it, 16 · message · tag of it, 16

A tag is an HMAC over what stands before it and the frame's number, under a key that one direction of one connection
has. So a frame fits at one place only, and no length is believed that its sender has not written: a reader does not
wait for bytes that were never sent.
"""

import hmac
import struct

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!cQ")
_TAG_BYTES = 16
HEAD_BYTES = _LENGTH.size + _TAG_BYTES


class FrameWriter:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def frame(self, message: bytes) -> bytes:
        """Return the next frame."""
        length = _LENGTH.pack(len(message))
        tags = [_tag(self._key, kind, self._number, data) for kind, data in ((b"l", length), (b"m", message))]
        self._number += 1
        return b"".join((length, tags[0], message, tags[1]))


class FrameReader:
    """Takes the frames of one direction apart, however they were cut on their way."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._unread = bytearray()
        self._frame_bytes = 0  # of the frame that has begun, once its length has come

    @property
    def missing(self) -> int:
        """How many bytes to feed it before it can go on, and no more than belong to the frame that has begun."""
        return (self._frame_bytes or HEAD_BYTES) - len(self._unread)

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        self._unread += data

    def next(self) -> bytes | None:
        """Return the next message, None if it has not come completely; ValueError for what nobody has sent so."""
        if not self._frame_bytes and self.missing <= 0:
            length = self._checked(b"l", 0, _LENGTH.size)
            self._frame_bytes = HEAD_BYTES + _LENGTH.unpack(length)[0] + _TAG_BYTES
        if not self._frame_bytes or self.missing > 0:
            return None
        message = self._checked(b"m", HEAD_BYTES, self._frame_bytes - _TAG_BYTES)
        del self._unread[: self._frame_bytes]
        self._number, self._frame_bytes = self._number + 1, 0
        return message

    def _checked(self, kind: bytes, begin: int, end: int) -> bytes:
        """Return what has come from `begin` to `end`, where its tag follows."""
        data = bytes(self._unread[begin:end])
        if not hmac.compare_digest(self._unread[end : end + _TAG_BYTES], _tag(self._key, kind, self._number, data)):
            raise ValueError(
                f"message {self._number} of this connection was changed, repeated, reordered or inserted on the way"
            )
        return data


def _tag(key: bytes, kind: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(kind, number) + data, "sha256")[:_TAG_BYTES]
