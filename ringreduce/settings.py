"""Every knob, parsed once by `init()`; what a knob is called, its unit and its default stand here and nowhere else.

A field `ring_segment_bytes` is set by the variable `RINGREDUCE_RING_SEGMENT_BYTES`. Some variables of Horovod's are
understood too; where both are set, ours counts.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping

from ringreduce.errors import SettingsError
from ringreduce.log import LEVELS, parse_level

PREFIX = "RINGREDUCE_"
HOROVOD = {
    "HOROVOD_CYCLE_TIME": "cycle_time_ms",
    "HOROVOD_CACHE_CAPACITY": "cache_capacity",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "stall_check_s",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "stall_abort_s",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "dynamic_process_sets",
    "HOROVOD_TIMELINE": "timeline",
    "HOROVOD_TIMELINE_MARK_CYCLES": "timeline_mark_cycles",
    "HOROVOD_LOG_LEVEL": "log_level",
    "HOROVOD_LOG_TIMESTAMP": "log_timestamp",
}
SHARED_SLOTS = 4
"""Slots of shared memory that a process set uses; collectives/shared.py tells why so many suffice."""
MOST_REGIONS = 32
"""Process sets for whose flags shared memory has room."""
PCI_BUS_ID = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
"""How Linux and CUDA name a device: domain, bus, device and function; CUDA in capitals."""
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one process; equal on all ranks but for `PER_RANK`."""

    algorithm: str = "auto"
    """How all-reduces move data: auto, or one of choose.ALGORITHMS."""

    costs: str = ""
    """The cost model's constants, such as wire_us=50,copy_gbs=8; on several hosts measured at the start by default."""

    deterministic: bool = False
    """Sum every element in rank order: the same bits whatever is fused, however data moves."""

    fusion_buffer_bytes: int = 16 << 20
    """Memory in which tensors are packed and summed, per rank; half of it shared with the host's other ranks."""

    shared_slot_bytes: int = 1 << 20
    """What moves through shared memory at a time; four of it for each process set that does."""

    fusion_slot_bytes: int = 2 << 20
    """What is packed together for messages at most; longer tensors go through in pieces of this size."""

    ring_segment_bytes: int = 60 << 10
    """A chunk travels between hosts in pieces of at most this size, so that summing one overlaps receiving the next;
    inside a host in pieces eight times as long. Over TCP, Open MPI sends up to 64 KiB without asking the receiver."""

    cache_capacity: int = 16384
    """Tensors that the ranks remember per process set, so that agreeing on one costs a bit; 0 remembers none."""

    cycle_time_ms: float = 50.0
    """So long the engine gathers tensors before it tells the other ranks, unless they fill 4 slots (on one host 16), or
    somebody waits. Where ranks take all cores of the only host 5 times as long, however many slots they fill."""

    stall_check_s: float = 10.0
    """A tensor that some ranks have given and others not is reported after so long; 0: never."""

    stall_abort_s: float = 0.0
    """And fails after so long; 0: never."""

    dynamic_process_sets: bool = False
    """add_process_set() and remove_process_set() are allowed."""

    cuda_device: str = ""
    """The GPU that init() makes the current one: its index, as CUDA counts, or its PCI bus id, such as 0000:3b:00.0; by
    default that of `placed_gpu`, or by local rank, in turn."""

    cuda_slot_bytes: int = 32 << 20
    """What moves through the GPUs' shared memory at a time; four of it on each rank's GPU for each process set that
    reduces GPU arrays."""

    cuda_nccl: bool = True
    """NCCL reduces GPU arrays where it is installed and every rank has a GPU of its own; 0: another path is taken."""

    cuda_ipc: bool = True
    """Ranks of one host map each other's GPU memory, where that is permitted; 0: copies go through the host."""

    cuda_aware_mpi: str = "auto"
    """Whether MPI gets GPU memory: auto (MPI is asked, then it is tried once in a child process), 1 (untried) or 0."""

    timeline: str = ""
    """Where rank 0 writes the timeline, from init() on; DYNAMIC: start_timeline() tells."""

    timeline_mark_cycles: bool = False
    """The timeline shows when the engine told the other ranks of new tensors."""

    log_level: str = "warning"
    """What is told on stderr: trace, debug, info, warning, error or fatal, each with what follows it."""

    log_timestamp: bool = False
    """With the local time before it."""

    restart_count: int = 0
    """How often ringrun has started this job again after a failure; set by ringrun, whether with --restarts or not."""

    error_file: str = ""
    """Where an uncaught exception is written as JSON for the launcher; set by ringrun for each rank."""

    placed_gpu: str = ""
    """The PCI bus id of the GPU that ringrun has placed this rank at; set by ringrun for each rank. Only advice: where
    CUDA does not show that GPU, the local rank counts."""

    def __post_init__(self) -> None:
        for name, slots in (("fusion_slot_bytes", 2), ("shared_slot_bytes", SHARED_SLOTS)):
            if self.fusion_buffer_bytes // 2 < slots * getattr(self, name):
                raise SettingsError(
                    f"half of fusion_buffer_bytes={self.fusion_buffer_bytes} holds less than {slots} slots of "
                    f"{name}={getattr(self, name)}; raise the first or lower the second"
                )
        if self.log_level not in LEVELS:
            raise SettingsError(f"log_level={self.log_level!r}: {_EXPECTED_LEVEL}")
        if self.shared_slot_bytes % 64:
            raise SettingsError(f"shared_slot_bytes={self.shared_slot_bytes}: expected a multiple of 64")
        if self.cuda_slot_bytes % 256:
            raise SettingsError(f"cuda_slot_bytes={self.cuda_slot_bytes}: expected a multiple of 256")
        if self.cuda_aware_mpi not in ("auto", "1", "0"):
            raise SettingsError(f"cuda_aware_mpi={self.cuda_aware_mpi!r}: expected auto, 1 or 0")
        if not re.fullmatch(f"|[0-9]+|{PCI_BUS_ID}", self.cuda_device):
            raise SettingsError(
                f"cuda_device={self.cuda_device!r}: expected an index, such as 0, or a PCI bus id, such as 0000:3b:00.0"
            )
        if not re.fullmatch(f"|{PCI_BUS_ID}", self.placed_gpu):
            raise SettingsError(f"placed_gpu={self.placed_gpu!r}: expected a PCI bus id, such as 0000:3b:00.0")

    @property
    def shared_regions(self) -> int:
        """Process sets with a rank in common that can move data through shared memory."""
        return min(MOST_REGIONS, self.fusion_buffer_bytes // 2 // (SHARED_SLOTS * self.shared_slot_bytes))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the RINGREDUCE_… variables; raises SettingsError for an unknown name or a value that does not parse."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        known = {PREFIX + name.upper(): name for name in fields}
        unknown = [variable for variable in environ if variable.startswith(PREFIX) and variable not in known]
        if unknown:
            raise SettingsError(_unknown(unknown[0], list(known)))
        values: dict[str, object] = {}
        for variable, name in {**HOROVOD, **known}.items():  # ours last, so that they count
            if variable in environ:
                values[name] = _parse(variable, environ[variable], fields[name].default)
        return cls(**values)  # type: ignore[arg-type]


def tuning_notice(environ: Mapping[str, str]) -> str:
    """What to tell a user who asks for Horovod's autotune; empty for one who does not."""
    if environ.get("HOROVOD_AUTOTUNE", "").lower() in FALSE:
        return ""
    return (
        "HOROVOD_AUTOTUNE has no effect, since nothing needs tuning: the algorithm of an all-reduce is chosen by its "
        "size, and the other defaults are as fast as what a search finds"
    )


PER_RANK = ("cuda_device", "error_file", "placed_gpu", "timeline", "log_level", "log_timestamp")
"""The settings that may differ from rank to rank."""


_EXPECTED_LEVEL = f"expected one of {', '.join(LEVELS)}"
_COUNTS = {"CAPACITY": (0, "tensors of 0 or more"), "RESTART_COUNT": (0, "restarts of 0 or more")}
"""Whole numbers that are no bytes, by how their variables end: the least of them, and what they count."""


def _parse(variable: str, text: str, default: object) -> object:
    """`text` in the type of `default`."""
    if variable.endswith("_LOG_LEVEL"):
        if (level := parse_level(text)) is None:
            raise SettingsError(f"{variable}={text!r}: {_EXPECTED_LEVEL}")
        return level
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() not in TRUE + FALSE:
            raise SettingsError(f"{variable}={text!r}: expected 1 or 0")
        return text.lower() in TRUE
    if isinstance(default, float):
        unit = "milliseconds" if variable.endswith(("_MS", "CYCLE_TIME")) else "seconds"
        return _number(variable, text, float, 0.0, f"a number of {unit} of 0 or more, such as {default}")
    lowest, what = next((each for ending, each in _COUNTS.items() if variable.endswith(ending)), (1, "bytes above 0"))
    return _number(variable, text, int, lowest, f"a whole number of {what}, such as {default}")


def _number(variable: str, text: str, kind: type, lowest: float, expected: str) -> object:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (lowest <= value < math.inf):
        raise SettingsError(f"{variable}={text!r}: expected {expected}")
    return value


def _unknown(variable: str, known: list[str]) -> str:
    names = [name.removeprefix(PREFIX) for name in known]
    nearest = difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1)
    hint = f"did you mean {PREFIX}{nearest[0]}?" if nearest else f"known are: {', '.join(sorted(known))}"
    return f"{variable} is no setting of ringreduce; {hint}"
