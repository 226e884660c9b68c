"""The GPU's kernels are compiled as CuPy does it, by the compilers of CUDA 12 and 13; no GPU is needed."""

import ctypes
import importlib.util
import os
import re
from pathlib import Path

import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.ops import Average, Max, Min, Product, Reduction, Sum
from ringreduce.errors import InputError
from ringreduce.gpu.kernels import COPIES, SOURCE, Variant
from tests.support import tiers

pytestmark = [tiers.extended, pytest.mark.xdist_group("cuda")]

LIBRARIES = {12: "cuda_nvrtc/lib/libnvrtc.so.12", 13: "cu13/lib/libnvrtc.so.13"}
"""Under the folder of the packages nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvrtc."""
ADDED_BY_CUPY = "-ftz=true"
"""Comes last, so that no option of ours takes it back: float32's subnormal numbers are zero."""
OLDEST, NEWEST = 75, 120
"""Architectures: the oldest that CUDA 13 knows, and the newest that CUDA 12 knows."""


@pytest.fixture(params=LIBRARIES, ids="CUDA {}".format, scope="module")
def compiler(request):
    """NVRTC, the compiler that CuPy uses."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else []
    found = [path for folder in folders if (path := Path(folder, LIBRARIES[request.param])).exists()]
    if not found:
        reason = f"the compiler of CUDA {request.param} is not installed: pip install '.[test]'"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))  # where CUDA 13.0's would not look for it
    return ctypes.CDLL(str(found[0]))


def compiled(nvrtc, variant, architecture):
    """PTX for an architecture such as compute_75, a GPU's code for sm_75."""
    program = ctypes.c_void_p()

    def text(kind):
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
        return buffer.raw

    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCE.read_bytes(), b"kernels.cu", 0, None, None) == 0
    options = [*variant.options, f"-arch={architecture}", ADDED_BY_CUPY]
    arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = text("ProgramLog").decode()
        assert status == 0, log
        assert "warning" not in log
        return text("PTX").decode() if architecture.startswith("compute") else text("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def variants_of(name):
    """All that kernels of an element type are compiled for."""
    variants = set()
    for op in (Sum, Average, Min, Max, Product):
        reduction = Reduction(op, TABLE[name], 2)
        try:
            reduction.check()
        except InputError:
            continue
        if reduction.is_paired:  # which the host reduces
            continue
        partial = reduction.sum_type.name
        variants |= {Variant(name, partial), Variant(name, partial, "Sum" if op is Average else op.value)}
    return sorted(variants)


def section(ptx, variant, kernel):
    """A kernel's code."""
    return ptx.partition(f".entry {variant.name(kernel)}(")[2].partition(".entry")[0]


@pytest.mark.parametrize("name", TABLE)
def test_every_variant_compiles_and_rounds_each_operation(compiler, name):
    for variant in variants_of(name):
        kernels = ["reduce"] if variant.op else ["load", "load_wide", "store", "store_wide"]
        ptx = compiled(compiler, variant, f"compute_{OLDEST}")
        assert all(section(ptx, variant, kernel) for kernel in kernels)
        assert ".approx" not in ptx
        assert "fma." not in ptx, "each operation is rounded"
        assert ".local" not in ptx, "nothing that registers should hold is in memory"


def test_copies_compile(compiler):
    ptx = compiled(compiler, COPIES, f"compute_{OLDEST}")
    assert section(ptx, COPIES, "gather")
    assert section(ptx, COPIES, "scatter")


@pytest.mark.parametrize("architecture", [OLDEST, 90, 100, NEWEST])
def test_they_become_a_gpu_s_code(compiler, architecture):
    for variant in (COPIES, Variant("bfloat16", "float32"), Variant("float32", "float32", "Sum")):
        assert compiled(compiler, variant, f"sm_{architecture}").startswith(b"\x7fELF")


def test_sixteen_bytes_are_read_and_written_at_once(compiler):
    summing = Variant("float32", "float32", "Sum")
    for variant, kernel in ((COPIES, "gather"), (COPIES, "scatter"), (summing, "reduce")):
        code = section(compiled(compiler, variant, "compute_75"), variant, kernel)
        assert re.search(r"ld(.global)?.v4.[bfu]32", code)
        assert re.search(r"st(.global)?.v4.[bfu]32", code)
