"""What --check-build prints: which frameworks, MPIs and operations this installation has, and what GPU arrays need.

Imports no framework but CuPy, which alone knows whether it finds NCCL; no GPU is touched.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from .engines import MPIS
from .engines.detect import detect
from .errors import MachineError
from .machine.topology import installed_cupy, read_topology
from .text import counted

_KERNELS = {
    "compiled (needs a C compiler and Python's headers when ringreduce is installed)": "ringreduce.kernels._native",
    "NumPy": "numpy",
}
_FRAMEWORKS = {
    "NumPy": "numpy",
    "PyTorch": "torch",
    "JAX": "jax",
    "Keras": "keras",
    "TensorFlow": "tensorflow",
    "CuPy": "cupy",
    "Optuna (sweeps)": "optuna",
    "PyYAML (--config-file)": "yaml",
    "prometheus_client (--metrics-port)": "prometheus_client",
}


def build_table(python: str) -> str:
    """Return the table, in the form of `horovodrun --check-build`, for the interpreter `python`, which is this one."""
    import ringreduce

    operations = [("MPI", ringreduce.mpi_built()), ("NCCL", bool(ringreduce.nccl_built()))]
    sections = [
        ("Available Frameworks", _found(_FRAMEWORKS)),
        ("Available Controllers", controllers(python)),
        ("Available Tensor Operations", _lines(operations)),
        ("Available for GPU Arrays", _lines(for_gpu_arrays())),
        ("Available Kernels", _found(_KERNELS)),
    ]
    title = f"ringreduce v{ringreduce.__version__} ({python}):"
    return "\n".join([title, *(f"\n{name}:\n" + "\n".join(lines) for name, lines in sections)])


def controllers(python: str) -> list[str]:
    """Return a line for each MPI: crossed where mpi4py loads it and its launcher is there, else what is missing."""
    rows, missing = {engine: (engine.title, False) for engine in MPIS}, []
    try:
        found = detect(python)
        rows[found.engine] = f"{found.engine.title} ({found.launcher.path})", True
    except MachineError as error:
        missing = [f"    {error}"]
    return [*_lines([*rows.values()]), *missing]


def for_gpu_arrays() -> list[tuple[str, bool]]:
    """Return what GPU arrays need, and whether it is there."""
    gpus = len(read_topology(os.environ).gpus)
    driver = driver_version()
    cupy = installed_cupy()
    return [
        (counted(gpus, "NVIDIA GPU") if gpus else "NVIDIA GPU", gpus > 0),
        (f"NVIDIA driver {driver}".rstrip(), bool(driver)),
        (cupy or "CuPy (pip install 'cupy-cuda12x[ctk]', or 'cupy-cuda13x[ctk]')", bool(cupy)),
    ]


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver; nothing if there is none."""
    try:
        found = re.search(r"^NVRM version:.*?\s(\d+\.\d+[\d.]*)\s", path.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _found(modules: dict[str, str]) -> list[str]:
    return _lines([(title, importlib.util.find_spec(module) is not None) for title, module in modules.items()])


def _lines(rows: Sequence[tuple[str, bool]]) -> list[str]:
    return [f"    [{'X' if has else ' '}] {title}" for title, has in rows]
