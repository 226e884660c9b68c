"""Which GPU a rank gets: chosen in init() before MPI starts, since an MPI that knows CUDA takes the current one.

    the script's own, if another than number 0 is current
    else the setting cuda_device
    else placed_gpu: the one to which ringrun has placed the rank, if CUDA shows it
    else by local rank, in turn, as the rank's launcher tells it

Only libraries that the script has imported are asked and told. A job of NumPy arrays on a host with GPUs makes no
context there, and nobody needs a GPU that nobody has asked for.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from ringreduce.errors import SettingsError
from ringreduce.gpu.runtime import cupy, runtime
from ringreduce.settings import Settings

LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALRANKID",  # MPICH's and Intel MPI's hydra
    "MV2_COMM_WORLD_LOCAL_RANK",  # MVAPICH2
    "PALS_LOCAL_RANKID",  # Cray's
    "LOCAL_RANK",  # ringrun
    "SLURM_LOCALID",  # srun; the shell of a Slurm job has it too, so whoever started ranks from there comes first
)
"""Who tells a rank its number on its host."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which GPU init() has made the current one, by CUDA's index, or None; and why, in words."""

    index: int | None
    why: str

    def __str__(self) -> str:
        return f"none ({self.why})" if self.index is None else f"{self.index} ({self.why})"


NOT_ASKED = Choice(None, "neither CuPy nor torch was imported before init()")


def select(settings: Settings, environ: Mapping[str, str]) -> Choice:
    """Make this rank's GPU the calling thread's current one in CuPy and torch, where the script has imported them.

    Cost:   without them microseconds, and without a GPU; else what they need to find GPUs, and a context on one.
    Raises: SettingsError for a cuda_device that is not among the GPUs here.
    """
    imported = [library for library in (_Cupy, _Torch) if library.name in sys.modules]
    if not imported:
        return NOT_ASKED
    try:
        return _select(settings, environ, [library() for library in imported])
    except SettingsError:
        raise
    except RuntimeError as exc:  # of CuPy or torch, such as a GPU that another process has for itself
        return Choice(None, f"CUDA says: {exc}")  # a job that needs it will hear it from CUDA, others go on


def _select(settings: Settings, environ: Mapping[str, str], imported: Sequence[_Cupy | _Torch]) -> Choice:
    libraries = [library for library in imported if library.bus_ids]
    if not libraries:
        return Choice(None, "no GPU here")
    own = next((index for each in libraries if (index := each.current())), None)
    choice = chosen(settings, environ, libraries[0].bus_ids, own)
    if choice.index is not None:
        for each in libraries:
            each.use(choice.index)
    return choice


def chosen(settings: Settings, environ: Mapping[str, str], bus_ids: Sequence[str], own: int | None = None) -> Choice:
    """The GPU of the rank with these variables, which sees those of `bus_ids` (empty texts: unknown), in CUDA's order.

    own: the one that the script has made current already; None: it has not, or number 0, where all scripts begin.
    Raises: SettingsError for a cuda_device that is not there.
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
        return Choice(placed, f"ringrun has placed this rank at {settings.placed_gpu}")
    hidden = f", since CUDA does not show {settings.placed_gpu}" if settings.placed_gpu else ""
    for variable in LOCAL_RANKS:
        if environ.get(variable, "").isdecimal():
            rank = int(environ[variable])
            return Choice(rank % count, f"{variable}={rank}, of {count} GPU{'' if count == 1 else 's'}{hidden}")
    return Choice(None, "no launcher tells the local rank: the current one stays")


def _find(bus_ids: Sequence[str], wanted: str) -> int | None:
    """The index of a PCI bus id, which CUDA writes in capitals, Linux not, and each with zeros of its own."""
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
        "unset it, and each rank of a host gets the next one"
    )


class _Cupy:
    """What CuPy shows and does."""

    name = "cupy"

    def __init__(self) -> None:
        try:
            count = runtime().getDeviceCount()
        except runtime().CUDARuntimeError:  # no driver, or no GPU
            count = 0
        self.bus_ids = [str(runtime().deviceGetPCIBusId(index)) for index in range(count)]

    def current(self) -> int:
        return int(runtime().getDevice())

    def use(self, index: int) -> None:
        cupy().cuda.Device(index).use()


class _Torch:
    """What torch shows and does."""

    name = "torch"

    def __init__(self) -> None:
        self._cuda = sys.modules["torch"].cuda
        self.bus_ids = [self._bus_id(index) for index in range(self._count())]

    def _count(self) -> int:
        return self._cuda.device_count() if self._cuda.is_available() else 0

    def _bus_id(self, index: int) -> str:
        properties = self._cuda.get_device_properties(index)
        try:
            numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        except AttributeError:  # an older torch does not tell them
            return ""
        return "{:04X}:{:02X}:{:02X}.0".format(*numbers)

    def current(self) -> int:
        return int(self._cuda.current_device())

    def use(self, index: int) -> None:
        self._cuda.set_device(index)
