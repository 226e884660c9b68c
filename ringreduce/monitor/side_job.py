"""A job beside the main one, such as the timeline: when it fails, it ends with a warning, and training goes on."""

from __future__ import annotations

from collections.abc import Callable

from ringreduce.errors import described
from ringreduce.settings.log import JOB


class SideJob:
    """name: for the warning;  rank: this one."""

    def __init__(self, name: str, rank: int) -> None:
        self.failed = False
        self._name, self._rank = name, rank

    def __call__(self, work: Callable[[], object]) -> bool:
        """Do some of its work, unless it has failed; returns False, as for a service that moves nothing."""
        if not self.failed:
            try:
                work()
            except Exception as exc:
                self.failed = True
                why = described(exc)
                JOB.warning(f"{self._name} of rank {self._rank} failed, and ends; the job continues: {why}")
        return False
