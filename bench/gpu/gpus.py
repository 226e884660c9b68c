"""What the GPU benches and tests/gpu share: is there a GPU that works, which one, and a kernel that holds a stream up.

CuPy is imported when something of it is needed, so that a machine without it can say so.
"""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

DRIVER = Path("/proc/driver/nvidia/version")
HOLD = r"""
extern "C" __global__ void hold(unsigned long long nanoseconds)
{
#ifdef __CUDA_ARCH__
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
#endif
}
"""


@functools.cache
def why_not() -> str:
    """What is missing for GPU arrays in this process: CuPy, a driver, a device, a kernel that runs. Empty: nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # a warning of CuPy's is no reason
        try:
            import cupy
        except ImportError as exc:
            return f"CuPy cannot be imported ({exc}); pip install '.[cuda12]' or '.[cuda13]'"
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as exc:
            return f"CUDA finds no driver or no device: {exc}"
        if not count:
            return "CUDA finds no device"
        try:
            if int(cupy.arange(4).sum()) == 6:
                return ""
            return "a kernel of CuPy's gave a wrong sum"
        except Exception as exc:
            return f"CuPy cannot run a kernel here: {type(exc).__name__}: {exc}"


def hold(milliseconds: float) -> None:
    """Queue a kernel on CuPy's current stream that computes nothing for so long: what is queued later waits."""
    _hold()((1,), (1,), (int(milliseconds * 1e6),))


@functools.cache
def _hold() -> Any:
    import cupy

    return cupy.RawModule(code=HOLD).get_function("hold")


def finish() -> None:
    """Return when all that this process has queued on its GPU is done."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def place() -> str:
    """Which GPU of its host this rank uses, such as 0000:3B:00.0."""
    import cupy

    return str(cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id))


def about_gpu() -> dict[str, Any]:
    """The GPU, the driver, CUDA and CuPy: what a table of figures is worth nothing without."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    text = DRIVER.read_text() if DRIVER.exists() else ""
    found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", text)
    return {
        "gpu": properties["name"].decode(),
        "driver": found[1] if found else "unknown",
        "driver_cuda": _version(cupy.cuda.runtime.driverGetVersion()),
        "cuda": _version(cupy.cuda.runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
    }


def _version(number: int) -> str:
    """`12.9`, as CUDA writes it in 12090."""
    return f"{number // 1000}.{number % 1000 // 10}"
