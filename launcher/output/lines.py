r"""Cuts a byte stream into lines, as a terminal would show them: `\r` starts the current line over."""

MAX_LINE_BYTES = 1 << 20
"""A longer line is cut here, so that a stream without newlines does not fill memory."""


class LineSplitter:
    r"""Collects the bytes of one stream and gives back whole lines, without their newlines.

    Of a line in several frames (`\r 10%\r 20%\n`, a progress bar) only the last is kept. `pending` is the
    line so far, `frame` the same if it has been started over. How the bytes were cut into `feed` calls makes no
    difference to the lines.

        >>> splitter = LineSplitter()
        >>> splitter.feed(b"one\ntw"), splitter.feed(b"o\n 10%\r 20%"), splitter.pending
        ([b'one'], [b'two'], b' 20%')
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._line = bytearray()
        self._at_start = False  # a \r came last: what follows replaces the line
        self._has_frames = False

    @property
    def pending(self) -> bytes:
        """The line that has not ended yet."""
        return bytes(self._line)

    @property
    def frame(self) -> bytes:
        """The line that has not ended yet, if it is a progress bar's; else nothing."""
        return bytes(self._line) if self._has_frames else b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes."""
        lines: list[bytes] = []
        *complete, rest = data.split(b"\n")
        for part in complete:
            self._add(part, lines)
            lines.append(self._take())
        self._add(rest, lines)
        return lines

    def flush(self) -> list[bytes]:
        """Return the line that never got its newline, if there is one; the stream ends or pauses here."""
        line = self._take()
        return [line] if line.strip() else []

    def _add(self, part: bytes, lines: list[bytes]) -> None:
        first, *frames = part.split(b"\r")
        self._append(first, lines)
        for frame in frames:
            self._at_start = self._has_frames = True
            self._append(frame, lines)

    def _append(self, text: bytes, lines: list[bytes]) -> None:
        if not text:
            return
        if self._at_start:
            self._line.clear()
            self._at_start = False
        self._line += text
        while len(self._line) > self._max_line_bytes:
            lines.append(bytes(self._line[: self._max_line_bytes]))
            del self._line[: self._max_line_bytes]

    def _take(self) -> bytes:
        line = bytes(self._line)
        self._line.clear()
        self._at_start = self._has_frames = False
        return line
