"""horovodrun's flags: which setting of ringreduce's each one means, and which have no effect here."""

import argparse

from ..arguments import Add

ALIASES = {
    "fusion-threshold-mb": "fusion_buffer_bytes",
    "timeline-filename": "timeline",
    "stall-check-warning-time-seconds": "stall_check_s",
    "stall-check-shutdown-time-seconds": "stall_abort_s",
}
"""Other names of settings."""

IN_MB = ("fusion-threshold-mb",)
"""Those in units of 2^20 bytes, the settings in bytes."""

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
    "elastic-timeout": "a job that falls below --min-np ends instead of waiting for hosts; see --restarts",
    "num-nccl-streams": "NCCL gets one stream per process set",
    "reset-limit": "lost ranks are limited by --max-failures, and restarts by --restarts",
    "thread-affinity": "the kernel places the engine's thread",
}
"""Flags with a value that have no effect here, and why."""

IGNORED_SWITCHES = {
    "autotune": TUNING,
    "no-autotune": TUNING,
    "gloo": _MPI,
    "mpi": "MPI is always used",
    "jsrun": "ranks are started by mpirun",
    "tcp": "MPI chooses; see --mpi-args",
    "disable-cache": "nothing about hosts is remembered from run to run",
    "hierarchical-allreduce": _CHOOSER,
    "no-hierarchical-allreduce": _CHOOSER,
    "hierarchical-allgather": _CHOOSER,
    "no-hierarchical-allgather": _CHOOSER,
    "torus-allreduce": _CHOOSER,
    "no-torus-allreduce": _CHOOSER,
    "mpi-threads-disable": "ringreduce asks MPI for the threads that it needs",
    "no-mpi-threads-disable": "ringreduce asks MPI for the threads that it needs",
}
"""Flags without a value that have no effect here, and why."""


OWN = """
-v --version -np --num-proc -cb --check-build --start-timeout --network-interfaces --network-interface --output-filename
--verbose --config-file -p --ssh-port -i --ssh-identity-file --cycle-time-ms --cache-capacity --timeline-mark-cycles
--no-timeline-mark-cycles --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --host-discovery-script
--blacklist-cooldown-range --mpi-args --log-level -prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile
--hostfile
"""
"""Those that ringrun has itself, or a setting of ringreduce's has, under the same name."""

_OF_ITS_FILE = ("controller", "ccl-bgt-affinity")
"""Keys of horovodrun's file that are no flags of its own."""


def flags() -> set[str]:
    """Return all flags of horovodrun 0.28.1."""
    names = {*ALIASES, *SWITCHES, *IGNORED_VALUES, *IGNORED_SWITCHES, STALL_CHECK, f"no-{STALL_CHECK}"}
    return {*OWN.split(), *(f"--{name}" for name in names.difference(_OF_ITS_FILE))}


def destination(flag: str) -> str:
    """Return the attribute in which argparse leaves one of these flags."""
    return f"horovod {flag}"


def add_flags(add: Add) -> None:
    """Add these flags."""
    for flag in (*ALIASES, *IGNORED_VALUES):
        add(f"--{flag}", dest=destination(flag), help=argparse.SUPPRESS)
    for flag in (*SWITCHES, *IGNORED_SWITCHES):
        add(f"--{flag}", dest=destination(flag), action="store_true", help=argparse.SUPPRESS)
    either = argparse.BooleanOptionalAction
    add(f"--{STALL_CHECK}", dest=destination(STALL_CHECK), action=either, help=argparse.SUPPRESS)
