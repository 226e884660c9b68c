"""Log messages, on stderr, through the logger `ringreduce` of Python's logging.

    warning   the default: stalls, shared memory that is too small
    info      what init() found and chose, on rank 0
    debug     each rank's host; each response of a coordinator; the algorithm of each batch
    trace     what this rank announces

`init()` configures it by the settings `log_level` and `log_timestamp`. Handlers and a level that the program has set on
the logger stay as they are.
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
"""Horovod's names."""
_DETAILS = {number: name for name, number in LEVELS.items() if number < logging.WARNING}


class _Handler(logging.Handler):
    """Writes `ringreduce: text` to the current sys.stderr; levels below warning as `ringreduce: debug: text`."""

    def __init__(self, sets_level: bool) -> None:
        super().__init__()
        self.sets_level = sets_level
        self.timestamps = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record in one piece."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # logging must not end the job
            with contextlib.suppress(Exception):  # stderr may be closed
                self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """The line for a record."""
        detail = _DETAILS.get(record.levelno)
        text = f"ringreduce: {f'{detail}: ' if detail else ''}{record.getMessage()}"
        if record.exc_info:
            text += f"\n{logging.Formatter().formatException(record.exc_info)}"
        if not self.timestamps:
            return text
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{seconds}.{int(record.msecs):03d} {text}"


def configure(level: str, timestamps: bool) -> None:
    """Set the logger's handler and level, unless the program has done so."""
    ours = next((each for each in LOGGER.handlers if isinstance(each, _Handler)), None)
    if ours is None:
        if LOGGER.handlers:
            return
        ours = _Handler(sets_level=LOGGER.level == logging.NOTSET)
        LOGGER.addHandler(ours)
        LOGGER.propagate = False  # a handler of the root logger would print it twice
    ours.timestamps = timestamps
    if ours.sets_level:
        LOGGER.setLevel(LEVELS[level])
