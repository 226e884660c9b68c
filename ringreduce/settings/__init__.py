"""All settings: names, units and defaults, parsed once by `init()`.

The variable `RINGREDUCE_RING_SEGMENT_BYTES` sets the field `ring_segment_bytes`. Some of Horovod's variables work too;
where both are set, ringreduce's wins.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from ringreduce.errors import SettingsError
from ringreduce.settings.log import LEVELS

PREFIX = "RINGREDUCE_"
HOROVOD = {
    "HOROVOD_FUSION_THRESHOLD": "fusion_buffer_bytes",
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
_BY_SIZE = "the algorithm is chosen by size; RINGREDUCE_ALGORITHM forces one"
_OVER_MPI = "ranks talk over MPI alone, with the threads that ringreduce needs"
_ONE_STREAM = "NCCL gets one stream per process set, and one kernel packs a bucket"
_NO_CHOICE = "there is nothing to choose"
NO_EFFECT = {
    "HOROVOD_AUTOTUNE": _BY_SIZE,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _BY_SIZE,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _BY_SIZE,
    "HOROVOD_TORUS_ALLREDUCE": _BY_SIZE,
    "HOROVOD_STALL_CHECK_DISABLE": "RINGREDUCE_STALL_CHECK_S=0 does it",
    "HOROVOD_CONTROLLER": _OVER_MPI,
    "HOROVOD_CPU_OPERATIONS": _OVER_MPI,
    "HOROVOD_GLOO_TIMEOUT_SECONDS": _OVER_MPI,
    "HOROVOD_MPI_THREADS_DISABLE": _OVER_MPI,
    "HOROVOD_NUM_NCCL_STREAMS": _ONE_STREAM,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _ONE_STREAM,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": _ONE_STREAM,
    "HOROVOD_THREAD_AFFINITY": _NO_CHOICE,
    "HOROVOD_DISABLE_GROUP_FUSION": _NO_CHOICE,
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": _NO_CHOICE,
    "HOROVOD_START_TIMEOUT": "ringrun --start-timeout does it",
    "HOROVOD_ELASTIC_TIMEOUT": "a job with fewer ranks than --min-np ends instead of waiting for hosts",
}
"""Horovod's variables that change nothing, and why; docs/settings.md says the same."""
LEAST_FUSION_BYTES = 8 << 20  # of the buffer, with slots as by default; also where Horovod's users want no fusion
MOST_FUSION_SLOTS = 1 << 16  # init() makes an array of each
MOST_CACHED = 1 << 24  # tensors, for which init() makes room
SHARED_SLOTS = 4  # slots of shared memory per process set; collectives/shared.py explains why 4 suffice
MOST_REGIONS = 32  # process sets that have flags in shared memory
PCI_BUS_ID = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"  # of a device: domain, bus, device, function
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
CHECKS_OF_NAN = ("report", "raise", "zero")
CHECKED_EVERY = {"divergence": 100, "sdc": 1000}  # steps, by default
CHECKS = "nan, nan:raise, nan:zero, divergence[:N], sdc[:N], with commas between them, such as nan,divergence:100"
PER_RANK = ("cuda_device", "error_file", "placed_gpu", "state_dir", "timeline", "log_level", "log_timestamp")
"""Settings that may differ by rank."""


@dataclasses.dataclass(frozen=True)
class Checks:
    """The setting `check`: which checks run, and how often.

        nan               report the first NaN or infinity in a gradient; nan:raise, nan:zero do more; nan:report is nan
        divergence[:N]    every N steps (100): have all ranks equal parameters and buffers?
        sdc[:N]           every N steps (1000): does another algorithm give the same sums?

    Commas between them; none of them twice; empty: no checks.
    """

    nan: str = ""  # one of CHECKS_OF_NAN; empty: not looked for
    divergence: int = 0  # every so many steps; 0: never
    sdc: int = 0  # as well

    @classmethod
    def parse(cls, text: str) -> Checks:
        """Raises SettingsError for anything else than the class's docstring names.

        >>> Checks.parse("nan:zero,divergence")
        Checks(nan='zero', divergence=100, sdc=0)
        """
        if not isinstance(text, str):
            raise SettingsError(f"check={text!r}: expected a string: {CHECKS}; or an empty string for no checks")
        found: dict[str, str | int] = {}
        for item in filter(None, (each.strip() for each in text.split(","))):
            name, _, option = item.partition(":")
            if name in found:
                raise SettingsError(f"check={text!r}: {name} is named twice")
            if name == "nan" and (option or CHECKS_OF_NAN[0]) in CHECKS_OF_NAN:
                found[name] = option or CHECKS_OF_NAN[0]
            elif name in CHECKED_EVERY and option.isascii() and (option or "1").isdecimal() and int(option or 1) > 0:
                found[name] = int(option or CHECKED_EVERY[name])
            else:
                raise SettingsError(f"check={text!r}: {item!r}; expected {CHECKS}")
        return cls(**found)  # type: ignore[arg-type]

    def require(self, deterministic: bool) -> None:
        """Raise SettingsError for what needs sums in the order of the ranks, where they are not."""
        if self.sdc and not deterministic:
            raise SettingsError(f"check='sdc:{self.sdc}' compares bits; it needs RINGREDUCE_DETERMINISTIC=1")

    def __str__(self) -> str:
        """The text that `parse` makes this of, with all options; equal for equal checks."""
        return ",".join(f"{name}:{option}" for name, option in vars(self).items() if option)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one process; equal on all ranks but for `PER_RANK`."""

    algorithm: str = "auto"  # how all-reduces move data: auto, or one of cost_model.ALGORITHMS
    costs: str = ""  # the cost model's, such as wire_us=50,copy_gbs=8; empty: measured by init() on several hosts
    deterministic: bool = False  # sum every element in rank order: the same bits for any fusion and any algorithm
    fusion_buffer_bytes: int = 16 << 20  # in which a rank packs and sums tensors; half of it is shared with its host
    shared_slot_bytes: int = 1 << 20  # of one slot of shared memory; a process set that uses shared memory has 4
    fusion_slot_bytes: int = 2 << 20  # most bytes of a bucket for messages; longer tensors are split into such
    ring_segment_bytes: int = 60 << 10
    """Most bytes of one segment between hosts, so that summing one segment overlaps receiving the next; inside a host
    segments are 8 times as long. Over TCP, Open MPI sends up to 64 KiB eagerly."""
    cache_capacity: int = 16384  # named tensors that a process set knows by number; 0: each is negotiated anew
    cycle_time_ms: float = 50.0
    """Longest time tensors are batched before negotiation; shorter when 4 fusion slots are full (16 on one host) or a
    thread is in synchronize(). Five times as long, at any size, where the ranks use all cores of the only host."""
    stall_check_s: float = 10.0
    """Report a tensor that some ranks have not submitted after this time, and again after 2, 4, … times; 0: never."""
    stall_abort_s: float = 0.0  # fail a stalled tensor after this time; 0: never
    dynamic_process_sets: bool = False  # allow add_process_set() and remove_process_set()
    cuda_device: str = ""
    """The GPU that init() makes current: a CUDA index, or a PCI bus id such as 0000:3b:00.0; by default `placed_gpu`,
    else chosen by local rank, round robin."""
    cuda_slot_bytes: int = 32 << 20  # of a slot of shared GPU memory; a process set has 4 on each rank's GPU
    cuda_nccl: bool = True  # reduce GPU arrays by NCCL where it is installed and every rank has a GPU of its own
    cuda_ipc: bool = True  # map the GPU memory of the host's other ranks where permitted; 0: copy through the host
    cuda_aware_mpi: bool = False  # pass GPU memory to MPI, which must be built for that
    timeline: str = ""  # the file that rank 0 writes, from init() on; DYNAMIC: wait for start_timeline()
    timeline_mark_cycles: bool = False  # mark each announcement in the timeline
    report: bool = False  # record what each step waits for; set by ringrun --report, to which ranks then send it
    check: str = ""  # what is looked for while the job trains, such as nan,divergence:100; see Checks
    log_level: str = "warning"  # least severe level logged to stderr: trace, debug, info, warning, error or fatal
    log_timestamp: bool = False  # begin log lines with the local time
    torch_backend: str = ""  # ring: torch.distributed's "gloo" and "mpi" mean it, too; see frameworks/torch_backend.py
    horovod: bool = False  # `import horovod` is ringreduce's in ranks and their children: frameworks/stand_in.py
    twice: str = ""  # RUN:STEPS:FOLDER, of two runs whose bits are compared; set by ringrun --twice
    restart_count: int = 0  # how often ringrun has restarted this job after a failure; set by ringrun
    elastic: bool = False  # ranks go on without those that fail; set by ringrun --elastic, as are the next two
    min_np: int = 1  # the fewest ranks with which an elastic job goes on
    spares: int = 0  # how many of the ranks, the last ones, train only in place of others that failed
    state_dir: str = ""  # where a host's first rank keeps commits of elastic states for a restart; set by ringrun
    servers: int = 0  # how many of the last ranks are parameter servers; see `ringreduce.ps`
    error_file: str = ""  # where an uncaught exception is written as JSON; set by ringrun for each rank
    placed_gpu: str = ""
    """PCI bus id of the GPU that ringrun chose for this rank; set by ringrun. Ignored where CUDA does not show it."""

    def __post_init__(self) -> None:
        for name, slots in (("fusion_slot_bytes", 2), ("shared_slot_bytes", SHARED_SLOTS)):
            if self.fusion_buffer_bytes // 2 < slots * getattr(self, name):
                raise SettingsError(
                    f"half of fusion_buffer_bytes={self.fusion_buffer_bytes} must hold at least {slots} slots of "
                    f"{name}={getattr(self, name)}; raise the former or lower the latter"
                )
        if self.fusion_buffer_bytes // 2 > MOST_FUSION_SLOTS * self.fusion_slot_bytes:
            raise SettingsError(
                f"half of fusion_buffer_bytes={self.fusion_buffer_bytes} holds more than {MOST_FUSION_SLOTS} slots of "
                f"fusion_slot_bytes={self.fusion_slot_bytes}; lower the first or raise the second"
            )
        if self.cache_capacity > MOST_CACHED:
            raise SettingsError(f"cache_capacity={self.cache_capacity}: expected at most {MOST_CACHED} tensors")
        if self.log_level not in LEVELS:
            raise SettingsError(f"log_level={self.log_level!r}: {_EXPECTED_LEVEL}")
        Checks.parse(self.check).require(self.deterministic)
        if self.torch_backend not in ("", "ring"):
            raise SettingsError(f"torch_backend={self.torch_backend!r}: expected ring, or nothing")
        for name, unit in (("shared_slot_bytes", 64), ("cuda_slot_bytes", 256)):
            if getattr(self, name) % unit:
                raise SettingsError(f"{name}={getattr(self, name)}: expected a multiple of {unit}")
        if not re.fullmatch(f"|[0-9]+|{PCI_BUS_ID}", self.cuda_device):
            raise SettingsError(
                f"cuda_device={self.cuda_device!r}: expected an index, such as 0, or a PCI bus id, such as 0000:3b:00.0"
            )
        if not re.fullmatch(f"|{PCI_BUS_ID}", self.placed_gpu):
            raise SettingsError(f"placed_gpu={self.placed_gpu!r}: expected a PCI bus id, such as 0000:3b:00.0")

    @property
    def shared_regions(self) -> int:
        """How many process sets with a rank in common can use shared memory."""
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
        for variable, name in {**HOROVOD, **known}.items():  # ours last: they win
            if variable in environ:
                values[name] = _parse(variable, name, environ[variable], fields[name].default)
        return cls(**values)  # type: ignore[arg-type]


def horovod_notice(environ: Mapping[str, str]) -> str:
    """The warning for a user who sets variables of Horovod's that have no effect here, else empty."""
    why: dict[str, list[str]] = {}
    for name, reason in NO_EFFECT.items():
        if environ.get(name, "").lower() not in FALSE:
            why.setdefault(reason, []).append(name)
    return "; ".join(
        f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect here ({reason})"
        for reason, names in why.items()
    )


_EXPECTED_LEVEL = f"expected one of {', '.join(LEVELS)}"
_COUNTS = {
    "cache_capacity": (0, "tensors of 0 or more"),
    "restart_count": (0, "restarts of 0 or more"),
    "min_np": (1, "ranks of 1 or more"),
    "spares": (0, "ranks of 0 or more"),
    "servers": (0, "ranks of 0 or more"),
}
"""Integers that do not count bytes: the minimum, and what is counted."""


def _parse(variable: str, name: str, text: str, default: object) -> object:
    """`text` in the type of `default`, which the field `name` has."""
    if variable == "HOROVOD_FUSION_THRESHOLD":
        expected = "a whole number of bytes of 0 or more, such as 134217728"
        return max(LEAST_FUSION_BYTES, _number(variable, text, int, 0, expected))
    if name == "log_level":
        if text.lower() not in LEVELS:
            raise SettingsError(f"{variable}={text!r}: {_EXPECTED_LEVEL}")
        return text.lower()
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() not in TRUE + FALSE:
            raise SettingsError(f"{variable}={text!r}: expected 1 or 0")
        return text.lower() in TRUE
    if isinstance(default, float):
        unit = "milliseconds" if name.endswith("_ms") else "seconds"
        return _number(variable, text, float, 0.0, f"a number of {unit} of 0 or more, such as {default}")
    lowest, what = _COUNTS.get(name, (1, "bytes above 0"))
    return _number(variable, text, int, lowest, f"a whole number of {what}, such as {default}")


def _number(variable: str, text: str, kind: type, lowest: float, expected: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (lowest <= value < math.inf):
        raise SettingsError(f"{variable}={text!r}: expected {expected}")
    return value


def _unknown(variable: str, known: list[str]) -> str:
    import difflib

    names = [name.removeprefix(PREFIX) for name in known]
    nearest = difflib.get_close_matches(variable.removeprefix(PREFIX), names, n=1)
    hint = f"did you mean {PREFIX}{nearest[0]}?" if nearest else f"known are: {', '.join(sorted(known))}"
    return f"{variable} is not a setting of ringreduce; {hint}"
