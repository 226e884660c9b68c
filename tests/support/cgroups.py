"""A cgroup of a test's own."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.patience import wait_until


@contextlib.contextmanager
def cgroup_below(folder: Path, limits: str, set_up: Callable[[Path], object]) -> Iterator[Path]:
    """One that `set_up` gives such limits; skips, and says why, where none can be made."""
    group = folder / f"ringrun-test-{os.getpid()}"
    try:
        group.mkdir()
        set_up(group)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _is_removed(group)
        pytest.skip(f"no cgroup with a limit of {limits} can be made here ({error}): none is tried for real")
    try:
        yield group
    finally:
        wait_until(lambda: _is_removed(group), within_s=5)


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
