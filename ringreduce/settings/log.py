"""Log messages, on stderr, through the logger `ringreduce` of Python's logging.

    warning   the default: stalls, shared memory that is too small
    info      what init() found and chose, on rank 0
    debug     each rank's host; each response of a coordinator; the algorithm of each batch
    trace     what this rank announces

`init()` configures it by the settings `log_level` and `log_timestamp`. Handlers and a level that the program has set on
the logger stay as they are; an error of these ends nothing.

What is said of the job, and not of one rank, goes to JOB: ringrun shows it, once, whichever ranks' output it shows.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

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


class _Logger(logging.LoggerAdapter):  # type: ignore[type-arg] # not generic before Python 3.11
    """The logger as this package uses it: its threads survive what a filter or a handler of the program raises."""

    def log(self, level: int, msg: object, *args: Any, stacklevel: int = 1, **kwargs: Any) -> None:
        """See logging.Logger.log."""
        try:
            super().log(level, msg, *args, stacklevel=stacklevel + 1, **kwargs)
        except Exception:
            with contextlib.suppress(Exception):  # stderr may be closed
                traceback.print_exc()


LOGGER = _Logger(logging.getLogger("ringreduce"), {})
JOB = _Logger(logging.getLogger("ringreduce.job"), {})


def nobody(_: str) -> bool:
    """Tell no launcher."""
    return False


class _Handler(logging.Handler):
    """Writes `ringreduce: text` to the current sys.stderr; levels below warning as `ringreduce: debug: text`.

    What is said of the job is shown by the launcher, if `tell` returns that it is there.
    """

    def __init__(self, sets_level: bool) -> None:
        super().__init__()
        self.sets_level = sets_level
        self.timestamps = False
        self.tell: Callable[[str], bool] = nobody

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record in one piece."""
        try:
            line = self.format(record)
            if record.name != JOB.logger.name or not self.tell(line):
                sys.stderr.write(f"{line}\n")
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


def configure(level: str, timestamps: bool, tell: Callable[[str], bool] = nobody) -> None:
    """Set the logger's handler and level, unless the program has done so.

    tell: passes a line to the launcher, which shows it; False if there is none.
    """
    logger = LOGGER.logger
    ours = next((each for each in logger.handlers if isinstance(each, _Handler)), None)
    if ours is None:
        if logger.handlers:
            return
        ours = _Handler(sets_level=logger.level == logging.NOTSET)
        logger.addHandler(ours)
        logger.propagate = False  # a handler of the root logger would print it twice
    ours.timestamps, ours.tell = timestamps, tell
    if ours.sets_level:
        logger.setLevel(LEVELS[level])
