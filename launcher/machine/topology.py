"""What this host has for ranks: the usable cores, their NUMA nodes, and the NVIDIA GPUs, as Linux reports them.

All is read from files below a root, so that a test can make a machine out of files; no NVIDIA tool or library is
asked. A file that is missing or makes no sense counts as "unknown" and never ends a job. What is done with it
stands in placement.py.
"""

import contextlib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .cpus import cpu_quota, usable_cpus

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE, BY_ADDRESS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
"""With this value of it, CUDA counts GPUs as this file does; by default the fastest comes first."""

_NVIDIA = 0x10DE
_GPU_CLASSES = (0x0300, 0x0302)  # VGA and 3D controllers
_PCI_ADDRESS = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_INDEX = re.compile(r"\s*\+?(\d{1,9})")


class Core(NamedTuple):
    """A physical core: its hardware threads (Linux calls them CPUs) that this process may use, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int | None = None


class Gpu(NamedTuple):
    """A GPU that CUDA shows: what CUDA_VISIBLE_DEVICES calls it, and the usable CPUs near it (none if unknown)."""

    name: str
    near: frozenset[int] = frozenset()
    bus_id: str = ""
    """Its PCI address, which is right however CUDA counts; empty if unknown."""


class Topology(NamedTuple):
    """The usable cores, by node and number (never none), the visible GPUs, in CUDA's order, and a limit of CPU time."""

    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...] = ()
    quota: float = math.inf
    """How many CPUs' time there is on these cores; infinite without a limit."""


class _Device(NamedTuple):
    """An NVIDIA GPU, visible or not."""

    uuid: str  # empty if unknown
    near: frozenset[int]
    bus_id: str


def read_topology(
    environ: Mapping[str, str], root: Path = Path("/"), usable: Collection[int] | None = None
) -> Topology:
    """Return what there is below `root` for ranks that may use the CPUs `usable`, by default this process's own.

    A CUDA_VISIBLE_DEVICES in `environ` chooses among the GPUs, as it does in CUDA.
    """
    cpus = usable_cpus() if usable is None else frozenset(usable)
    nodes = _read_nodes(root, cpus)
    devices = _read_devices(root, cpus, nodes)
    gpus = _visible(devices, environ.get(VISIBLE_VARIABLE), by_address=environ.get(ORDER_VARIABLE) == BY_ADDRESS)
    return Topology(_read_cores(root, cpus, nodes), gpus, cpu_quota(root))


def installed_cupy() -> str:
    """Return which CuPy is installed, such as `cupy-cuda12x 14.2.0`, without importing it; nothing if none is."""
    from importlib import metadata  # slow to import

    for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return ""


def parse_cpulist(text: str, among: Iterable[int]) -> frozenset[int]:
    """Return those of the CPUs `among` that a list like `0-3,8` names; a part that makes no sense names none.

    >>> sorted(parse_cpulist("0-3,8", range(2, 99)))
    [2, 3, 8]
    """
    spans = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            spans.append(range(int(first), int(last or first) + 1))
        except ValueError:
            continue
    return frozenset(cpu for cpu in among if any(cpu in span for span in spans))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _read_nodes(root: Path, cpus: frozenset[int]) -> dict[int, int]:
    """Return the NUMA node of each CPU whose node is known."""
    nodes: dict[int, int] = {}
    for folder in root.glob("sys/devices/system/node/node[0-9]*"):
        number = folder.name.removeprefix("node")
        if number.isdecimal():
            nodes |= dict.fromkeys(parse_cpulist(_read(folder / "cpulist"), cpus), int(number))
    return nodes


def _read_cores(root: Path, cpus: frozenset[int], nodes: Mapping[int, int]) -> tuple[Core, ...]:
    cores = []
    left = set(cpus)
    for cpu in sorted(cpus):
        if cpu in left:
            siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            own = parse_cpulist(_read(siblings), left) | {cpu}
            left -= own
            cores.append(Core(tuple(sorted(own)), nodes.get(cpu)))
    return tuple(sorted(cores, key=lambda core: (core.node is None, core.node or 0, core.cpus)))


def _read_devices(root: Path, cpus: frozenset[int], nodes: Mapping[int, int]) -> list[_Device]:
    """Return the GPUs that CUDA can use, by PCI address, which is its order if CUDA_DEVICE_ORDER is PCI_BUS_ID."""
    addressed = []
    for folder in root.glob("sys/bus/pci/devices/*"):
        address = _PCI_ADDRESS.fullmatch(folder.name)
        if address and _is_nvidia_gpu(folder):
            information = _read(root / "proc/driver/nvidia/gpus" / folder.name / "information")
            if _is_accessible(root, information):
                uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)$", information, re.MULTILINE)
                device = _Device(uuid[1] if uuid else "", _near(folder, cpus, nodes), folder.name)
                addressed.append(([int(part, 16) for part in address.groups()], device))
    return [device for _, device in sorted(addressed, key=lambda pair: pair[0])]


def _is_nvidia_gpu(folder: Path) -> bool:
    try:
        vendor, kind = int(_read(folder / "vendor"), 16), int(_read(folder / "class"), 16)
    except ValueError:
        return False
    return vendor == _NVIDIA and kind >> 8 in _GPU_CLASSES


def _is_accessible(root: Path, information: str) -> bool:
    """Return whether we may open the GPU that NVIDIA's driver describes so.

    /sys shows a container, and a Slurm job, all GPUs of the host. Those it was not given have no device file there, or
    one that may not be opened; those that the driver does not hold (given to a virtual machine, say) have no number.
    """
    minor = re.search(r"^Device Minor:\s*(\d+)$", information, re.MULTILINE)
    return minor is not None and os.access(root / f"dev/nvidia{minor[1]}", os.R_OK | os.W_OK)


def _near(folder: Path, cpus: frozenset[int], nodes: Mapping[int, int]) -> frozenset[int]:
    """Return the usable CPUs of the device's NUMA node; where that is unknown (-1), those Linux calls local."""
    node = _read(folder / "numa_node")
    of_node = frozenset(cpu for cpu, number in nodes.items() if str(number) == node)
    return of_node or parse_cpulist(_read(folder / "local_cpulist"), cpus)


def _visible(devices: Sequence[_Device], text: str | None, *, by_address: bool) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows where CUDA_VISIBLE_DEVICES is `text` (None: not set).

    by_address: CUDA counts by PCI address. If not, which GPU an index means is a guess, right if all are alike.

    As in CUDA: indices or (beginnings of) UUIDs; what is neither ends the list; what comes twice empties it.
    """
    if text is None:
        return tuple(Gpu(str(index), device.near, device.bus_id) for index, device in enumerate(devices))
    gpus: list[Gpu] = []
    for entry in text.split(","):
        gpu = _named(devices, entry, by_address=by_address)
        if gpu is None:
            break
        gpus.append(gpu)
    return tuple(gpus) if len(set(gpus)) == len(gpus) else ()


def _named(devices: Sequence[_Device], entry: str, *, by_address: bool) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES means, None if CUDA would find none."""
    if index := _INDEX.match(entry):
        number = int(index[1])
        if number >= len(devices):
            return None
        return Gpu(str(number), devices[number].near, devices[number].bus_id if by_address else "")
    name = entry.strip()
    if not devices or not name.startswith(("GPU-", "MIG-")):
        return None
    found = [device for device in devices if device.uuid.startswith(name)]
    if len(found) != 1:  # part of one (MIG), or the driver keeps UUIDs
        return Gpu(name)
    return Gpu(name, found[0].near, found[0].bus_id)
