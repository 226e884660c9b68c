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
def nothing_left_in_shared_memory() -> Iterator[None]:
    """A block has a name for a moment only: that of another test is gone soon, one that was left stays."""
    before = named_blocks()
    yield
    left = named_blocks() - before
    wait_until(lambda: not left & named_blocks(), within_s=5)


def named_blocks() -> set[Path]:
    return {path for pattern in ("ringreduce_*", "ringrun-*.commits") for path in Path("/dev/shm").glob(pattern)}
