"""Machines made of files: what Linux and NVIDIA's driver would tell of them, below a root folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FakeGpu:
    """A PCI device; `minor` and `uuid` are what the driver tells, `minor` None if it does not hold the device."""

    address: str
    node: int = -1
    near: str = ""
    minor: int | None = 0
    uuid: str = ""
    accessible: bool = True
    vendor: str = "0x10de"
    kind: str = "0x030200"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_machine(
    root: Path,
    siblings: Sequence[Sequence[int]] = (),
    nodes: Mapping[int, str] | None = None,
    gpus: Sequence[FakeGpu] = (),
) -> Path:
    """Write the files below `root` and return it."""
    for threads in siblings:
        for cpu in threads:
            folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            write(folder / "thread_siblings_list", ",".join(map(str, threads)))
    for node, cpus in (nodes or {}).items():
        write(root / f"sys/devices/system/node/node{node}/cpulist", cpus)
    write(root / "sys/devices/system/node/possible", "0-1")
    for gpu in gpus:
        _write_gpu(root, gpu)
    return root


def _write_gpu(root: Path, gpu: FakeGpu) -> None:
    folder = root / "sys/bus/pci/devices" / gpu.address
    for name, text in (("vendor", gpu.vendor), ("class", gpu.kind), ("numa_node", str(gpu.node))):
        write(folder / name, text)
    write(folder / "local_cpulist", gpu.near)
    if gpu.minor is not None:
        uuid = gpu.uuid or "GPU-????????-????-????-????-????????????"  # what it tells before the first use
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {gpu.minor}"
        write(root / "proc/driver/nvidia/gpus" / gpu.address / "information", text)
        if gpu.accessible:
            write(root / f"dev/nvidia{gpu.minor}", "")


def two_sockets(root: Path, gpus: int = 0) -> Path:
    """Two nodes of 16 cores of two threads, CPUs c and c + 32; half of the GPUs on each.

    PCI addresses rise while the driver's own numbers fall, and node 0's bus 9 comes before bus 0x1a.
    """
    addresses = [f"0000:{bus:02x}:00.0" for bus in (0x09, 0x1A, 0x2B, 0x3C, 0x4D, 0x5E, 0x6F, 0xFA)][:gpus]
    cpus = {0: "0-15,32-47", 1: "16-31,48-63"}
    devices = []
    for index, address in enumerate(addresses):
        node = index * 2 // gpus
        uuid = f"GPU-{index:08x}-aaaa-bbbb-cccc-0123456789ab"
        devices.append(FakeGpu(address, node, cpus[node], gpus - 1 - index, uuid))
    return make_machine(root, [(core, core + 32) for core in range(32)], cpus, devices)
