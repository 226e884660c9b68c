"""What --check-build prints: which frameworks, MPIs and operations this installation has. Imports none of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from .engines import MPIS
from .engines.detect import find_launcher, probe_library
from .errors import MachineError

_FRAMEWORKS = {"NumPy": "numpy", "PyTorch": "torch", "JAX": "jax", "CuPy": "cupy"}
_KERNELS = {"numba": "numba", "PyTorch": "torch", "NumPy": "numpy"}


def build_table(python: str) -> str:
    """Return the table, in the form of `horovodrun --check-build`, for the interpreter `python`, which is this one."""
    import ringreduce

    operations = [
        ("MPI", ringreduce.mpi_built()),
        ("NCCL", ringreduce.nccl_built()),
        ("DDL", ringreduce.ddl_built()),
        ("CCL", ringreduce.ccl_built()),
        ("Gloo", ringreduce.gloo_built()),
    ]
    sections = [
        ("Available Frameworks", _found(_FRAMEWORKS)),
        ("Available Controllers", controllers(python)),
        ("Available Tensor Operations", _lines(operations)),
        ("Available Kernels for 16-bit Floats", _found(_KERNELS)),
    ]
    title = f"ringreduce v{ringreduce.__version__} ({python}):"
    return "\n".join([title, *(f"\n{name}:\n" + "\n".join(lines) for name, lines in sections)])


def controllers(python: str) -> list[str]:
    """Return a line for each MPI: crossed where mpi4py loads it and its launcher is there, else what is missing."""
    rows, missing = [], ""
    try:
        library = probe_library(python)
    except MachineError as error:
        return [*_lines([(engine.title, False) for engine in MPIS]), f"    {error}"]
    for engine in MPIS:
        if not engine.loaded_by(library.text):
            rows.append((engine.title, False))
            continue
        try:
            rows.append((f"{engine.title} ({find_launcher(engine, library).path})", True))
        except MachineError as error:
            rows.append((engine.title, False))
            missing = str(error)
    return [*_lines(rows), *([f"    {missing}"] if missing else [])]


def _found(modules: dict[str, str]) -> list[str]:
    return _lines([(title, importlib.util.find_spec(module) is not None) for title, module in modules.items()])


def _lines(rows: Sequence[tuple[str, bool]]) -> list[str]:
    return [f"    [{'X' if has else ' '}] {title}" for title, has in rows]
