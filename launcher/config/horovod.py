"""horovodrun's flags: which setting of ringreduce's each one means, and which have no meaning here."""

import argparse
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class Alias:
    """Another name of a setting."""

    setting: str
    is_in_mb: bool = False
    """Its unit is 2^20 bytes, the setting's is one."""

    def value(self, text: str) -> str:
        """Return `text` in the setting's unit; UsageError where it is no number."""
        if not self.is_in_mb:
            return text
        try:
            return str(int(text) << 20)
        except ValueError:
            raise UsageError(f"{text!r}: expected a whole number of MB (2^20 bytes), such as 16") from None


ALIASES = {
    "fusion-threshold-mb": Alias("fusion_buffer_bytes", is_in_mb=True),
    "timeline-filename": Alias("timeline"),
    "stall-check-warning-time-seconds": Alias("stall_check_s"),
    "stall-check-shutdown-time-seconds": Alias("stall_abort_s"),
}

STALL_CHECK = "stall-check"
"""A switch: --no-stall-check is a time of 0."""

SWITCHES = {
    "log-with-timestamp": ("log_timestamp", True),
    "log-without-timestamp": ("log_timestamp", False),
    "log-hide-timestamp": ("log_timestamp", False),
    "no-log-hide-timestamp": ("log_timestamp", True),
}
"""Flags without a value that turn a setting on or off."""

_MPI = "ranks talk over MPI alone"
TUNING = (
    "nothing needs tuning: the algorithm is chosen by size, and the other defaults are as fast as what a search finds"
)
_CHOOSER = "the fastest algorithm is chosen for each size; see --algorithm"
IGNORED_VALUES = {
    "autotune-log-file": TUNING,
    "autotune-warmup-samples": TUNING,
    "autotune-steps-per-sample": TUNING,
    "autotune-bayes-opt-max-samples": TUNING,
    "autotune-gaussian-process-noise": TUNING,
    "binding-args": "it is for jsrun; see --mpi-args",
    "ccl-bgt-affinity": _MPI,
    "controller": _MPI,
    "gloo-timeout-seconds": _MPI,
    "num-nccl-streams": "NCCL is not used",
    "thread-affinity": "the engine's thread runs where the system puts it",
}
"""Flags with a value that have no meaning here, and why."""

IGNORED_SWITCHES = {
    "autotune": TUNING,
    "no-autotune": TUNING,
    "gloo": _MPI,
    "mpi": "it is always so",
    "jsrun": "ranks are started by mpirun",
    "tcp": "MPI chooses; see --mpi-args",
    "disable-cache": "nothing about hosts is remembered from run to run",
    "hierarchical-allreduce": _CHOOSER,
    "no-hierarchical-allreduce": _CHOOSER,
    "hierarchical-allgather": _CHOOSER,
    "no-hierarchical-allgather": _CHOOSER,
    "mpi-threads-disable": "ringreduce asks MPI for the threads that it needs",
    "no-mpi-threads-disable": "ringreduce asks MPI for the threads that it needs",
}
"""Flags without a value that have no meaning here, and why."""


def destination(flag: str) -> str:
    """Return the attribute in which argparse leaves one of these flags."""
    return f"horovod {flag}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Make `parser` accept these flags."""
    for flag in (*ALIASES, *IGNORED_VALUES):
        parser.add_argument(f"--{flag}", dest=destination(flag), help=argparse.SUPPRESS)
    for flag in (*SWITCHES, *IGNORED_SWITCHES):
        parser.add_argument(f"--{flag}", dest=destination(flag), action="store_true", help=argparse.SUPPRESS)
    action = argparse.BooleanOptionalAction
    parser.add_argument(f"--{STALL_CHECK}", dest=destination(STALL_CHECK), action=action, help=argparse.SUPPRESS)
