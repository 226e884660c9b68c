"""How long a test waits for what is promised within some seconds: other programs may have the cores."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def patient(seconds: float) -> float:
    """So many seconds on a machine of one's own, as many more as there are programs that want a core."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], object], within_s: float = 30) -> None:
    """Wait until the condition holds, or fail."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < patient(within_s), f"waited {within_s:g} s in vain"
        time.sleep(0.02)


@contextmanager
def no_commits_left() -> Iterator[None]:
    """Those of another test's job are gone soon, what was left stays."""
    before = kept_commits()
    yield
    left = kept_commits() - before
    wait_until(lambda: not left & kept_commits(), within_s=5)


def kept_commits() -> set[Path]:
    """The folders of commits, in shared memory."""
    return set(Path("/dev/shm").glob("ringrun-*.commits"))
