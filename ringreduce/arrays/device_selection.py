"""Which GPU a rank uses: chosen in init() before MPI starts, since a CUDA-aware MPI uses the current one.

    the script's own, if it has made one other than number 0 current
    else the setting cuda_device
    else placed_gpu: the one to which ringrun has placed the rank, if CUDA shows it
    else by local rank, round robin, from the launcher's environment variable

Only libraries that the script has imported are used: a job of NumPy arrays on a host with GPUs creates no CUDA context.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ringreduce.arrays.cuda import cupy, runtime
from ringreduce.errors import SettingsError
from ringreduce.settings import Settings

LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALRANKID",  # MPICH's and Intel MPI's hydra
    "MV2_COMM_WORLD_LOCAL_RANK",  # MVAPICH2
    "PALS_LOCAL_RANKID",  # Cray's
    "LOCAL_RANK",  # ringrun
    "SLURM_LOCALID",  # srun; a Slurm job's shell has it too, so the launchers that may run from there come first
)
"""The launchers' variables for the local rank, in order of precedence."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The CUDA index of the GPU that init() has made current, or None; and the reason, for the log."""

    index: int | None
    why: str

    def __str__(self) -> str:
        return f"none ({self.why})" if self.index is None else f"{self.index} ({self.why})"


NOT_ASKED = Choice(None, "neither CuPy nor torch was imported before init()")


class _Library(NamedTuple):
    """CUDA, as CuPy or torch uses it."""

    bus_ids: list[str]  # of the GPUs
    current: Callable[[], int]
    use: Callable[[int], object]


def select(settings: Settings, environ: Mapping[str, str]) -> Choice:
    """Make this rank's GPU the calling thread's current one in CuPy and torch, where the script has imported them.

    Cost:   microseconds without these libraries or without a GPU; else their search for GPUs, and a context on one.
    Raises: SettingsError for a cuda_device that is not among the GPUs here.
    """
    imported = [library for name, library in _LIBRARIES.items() if name in sys.modules]
    if not imported:
        return NOT_ASKED
    try:
        libraries = [library for library in (of() for of in imported) if library.bus_ids]
        if not libraries:
            return Choice(None, "no GPU here")
        own = next((index for each in libraries if (index := each.current())), None)
        choice = chosen(settings, environ, libraries[0].bus_ids, own)
        if choice.index is not None:
            for each in libraries:
                each.use(choice.index)
    except SettingsError:
        raise
    except RuntimeError as exc:  # CuPy's or torch's, such as a GPU that another process uses exclusively
        return Choice(None, f"CUDA says: {exc}")  # a job that needs a GPU will get the error from CUDA; others go on
    return choice


def chosen(settings: Settings, environ: Mapping[str, str], bus_ids: Sequence[str], own: int | None = None) -> Choice:
    """The GPU of the rank with these variables, among `bus_ids` (empty: unknown), in CUDA's order.

    own: the one that the script has already made current; None: none, or number 0, the default.
    Raises: SettingsError for a cuda_device that does not exist.
    """
    asked, count = settings.cuda_device, len(bus_ids)
    if asked:
        index = int(asked) if asked.isdecimal() else _find(bus_ids, asked)
        if index is None or index >= count:
            raise SettingsError(_not_there(asked, bus_ids, environ))
        if own is None:
            return Choice(index, f"RINGREDUCE_CUDA_DEVICE={asked}")
    if own is not None:
        return Choice(own, "the script's own choice before init()")
    if (placed := _find(bus_ids, settings.placed_gpu)) is not None:
        return Choice(placed, f"ringrun has placed this rank on {settings.placed_gpu}")
    hidden = f", since CUDA does not show {settings.placed_gpu}" if settings.placed_gpu else ""
    for variable in LOCAL_RANKS:
        if environ.get(variable, "").isdecimal():
            rank = int(environ[variable])
            return Choice(rank % count, f"{variable}={rank}, of {count} GPU{'' if count == 1 else 's'}{hidden}")
    return Choice(None, "no launcher set the local rank: the current GPU stays")


def _find(bus_ids: Sequence[str], wanted: str) -> int | None:
    """The index of a PCI bus id; CUDA and Linux differ in case and in leading zeros."""
    if not wanted:
        return None
    return next((index for index, each in enumerate(bus_ids) if each and _numbers(each) == _numbers(wanted)), None)


def _numbers(bus_id: str) -> list[int]:
    return [int(part, 16) for part in bus_id.replace(".", ":").split(":")]


def _not_there(asked: str, bus_ids: Sequence[str], environ: Mapping[str, str]) -> str:
    listed = ", ".join(f"{index} ({each or 'of unknown bus id'})" for index, each in enumerate(bus_ids))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    within = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    return (
        f"RINGREDUCE_CUDA_DEVICE={asked}: the GPUs that this process sees{within} are {listed}; name one of these, or "
        "unset it, and the ranks of a host take the GPUs in turn"
    )


def _of_cupy() -> _Library:
    try:
        count = runtime().getDeviceCount()
    except runtime().CUDARuntimeError:  # no driver, or no GPU
        count = 0
    bus_ids = [str(runtime().deviceGetPCIBusId(index)) for index in range(count)]
    return _Library(bus_ids, runtime().getDevice, lambda index: cupy().cuda.Device(index).use())


def _of_torch() -> _Library:
    cuda = sys.modules["torch"].cuda
    count = cuda.device_count() if cuda.is_available() else 0
    properties = map(cuda.get_device_properties, range(count))
    return _Library(list(map(_bus_id, properties)), cuda.current_device, cuda.set_device)


def _bus_id(properties: Any) -> str:
    try:
        numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:  # an older torch lacks them
        return ""
    return "{:04X}:{:02X}:{:02X}.0".format(*numbers)


_LIBRARIES = {"cupy": _of_cupy, "torch": _of_torch}
