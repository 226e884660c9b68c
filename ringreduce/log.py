"""What ringreduce says by itself: on stderr, through the logger `ringreduce` of Python's logging.

    warning   a stall, shared memory that is too small: what there is to see by default
    info      what init() found and chose, on rank 0
    debug     where each rank is; each response of a coordinator; by which algorithm tensors go
    trace     what this rank announces

`init()` sets it up, by the settings `log_level` and `log_timestamp`, unless the program has given the logger handlers
of its own: then those stay, and its level. A level that the program has set stays, too.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time

LOGGER = logging.getLogger("ringreduce")
TRACE = 5
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""By the names that Horovod's users know."""
_DETAILS = {number: name for name, number in LEVELS.items() if number < logging.WARNING}


class _Handler(logging.Handler):
    """Writes to whatever sys.stderr is at the moment."""

    def __init__(self, sets_level: bool) -> None:
        super().__init__()
        self.sets_level = sets_level

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, whole."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # a log must not end what is logged
            with contextlib.suppress(Exception):  # stderr may be closed
                self.handleError(record)


class _Formatter(logging.Formatter):
    """`ringreduce: text`; what is no warning names its level, too."""

    def __init__(self, timestamps: bool) -> None:
        super().__init__()
        self.timestamps = timestamps

    def format(self, record: logging.LogRecord) -> str:
        detail = _DETAILS.get(record.levelno)
        text = f"ringreduce: {f'{detail}: ' if detail else ''}{record.getMessage()}"
        if not self.timestamps:
            return text
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{seconds}.{int(record.msecs):03d} {text}"


def configure(level: str, timestamps: bool) -> None:
    """Give the logger a handler and a level, unless the program has done so."""
    ours = next((each for each in LOGGER.handlers if isinstance(each, _Handler)), None)
    if ours is None:
        if LOGGER.handlers:
            return
        ours = _Handler(sets_level=LOGGER.level == logging.NOTSET)
        LOGGER.addHandler(ours)
        LOGGER.propagate = False  # a handler of the root logger's would say it twice
    ours.setFormatter(_Formatter(timestamps))
    if ours.sets_level:
        LOGGER.setLevel(LEVELS[level])


def parse_level(text: str) -> str | None:
    """The level's name in lower case; None where it is none."""
    name = text.lower()
    return name if name in LEVELS else None
