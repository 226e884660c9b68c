"""Runs CUDA kernels on the host: g++ compiles them with a shim, and each thread of a grid runs after the other.

Enough for kernels whose threads do not wait for one another: no shared memory, no barriers. As on a GPU, what is longer
than a byte must be aligned.
"""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE

COMPILER = "g++"
# no contraction to FMA, wrapping integers and memory of any type: as the GPU's compiler has it
FLAGS = ("-O1", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fsanitize=alignment", "-w")
SHIM = """
#include <cstddef>
#include <utility>
#define __global__
#define __device__
struct Place { unsigned x; };
static thread_local Place blockIdx, threadIdx, blockDim, gridDim;
static thread_local std::size_t misaligned;
// what g++ calls before it reads or writes at an address that is not aligned
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void*, std::size_t) {
    ++misaligned;
}
"""
RUN = """
template <class... A, std::size_t... I>
static void run(void (*kernel)(A...), unsigned grid, unsigned block, void** arguments, std::index_sequence<I...>) {
    gridDim.x = grid, blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel(*static_cast<A*>(arguments[I])...);
}
template <class... A>
static std::size_t launch(void (*kernel)(A...), unsigned grid, unsigned block, void** arguments) {
    if (!arguments) return sizeof...(A);
    misaligned = 0;
    run(kernel, grid, block, arguments, std::index_sequence_for<A...>());
    return misaligned;
}
"""
WRAPPER = """
extern "C" std::size_t launch_{0}(unsigned grid, unsigned block, void** arguments) {{
    return launch({0}, grid, block, arguments);
}}
"""
COMPILING = threading.Lock()  # or each of several ranks, which are threads, compiles the same
KERNEL = re.compile(r'extern "C" __global__ void (\w+)')


class Module:
    """Compiled kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __contains__(self, name: str) -> bool:
        return hasattr(self._library, f"launch_{name}")

    def launch(self, name: str, grid: int, block: int, args: Sequence[object]) -> None:
        """Run `grid` blocks of `block` threads. args: integers (64 bits; addresses), floats (double), or NumPy's."""
        values = [_scalar(value) for value in args]
        pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        kernel = getattr(self._library, f"launch_{name}")
        kernel.restype = ctypes.c_size_t
        expected = kernel(0, 0, None)
        assert expected == len(values), f"kernel {name} takes {expected} arguments, not {len(values)}"
        misaligned = kernel(grid, block, pointers)
        assert misaligned == 0, f"kernel {name} has used {misaligned} misaligned addresses: a GPU would have failed"


def _scalar(value):
    """One value in memory, as CuPy passes it."""
    if isinstance(value, np.generic):
        return np.array(value)
    return np.array(value, np.float64 if isinstance(value, float) else np.int64)


@functools.cache
def emulate(code: str, options: tuple[str, ...]) -> Module:
    """Compile CUDA code for the host; what was compiled before is found in the folder for temporary files."""
    if shutil.which(COMPILER) is None:
        reason = f"there is no {COMPILER}, which compiles the GPU's kernels for the host"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    options = tuple(option for option in options if option != "--fmad=false")  # nvcc's name of -ffp-contract=off
    key = hashlib.sha256("\0".join([SHIM, RUN, WRAPPER, code, *FLAGS, *options]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), f"ringreduce-emulated-cuda-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is another user's"
    library = folder / f"{key}.so"
    with COMPILING:
        if not library.exists():
            _compile(code, options, library)
    return Module(ctypes.CDLL(str(library)))


def _compile(code, options, library):
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        source, compiled, built = (Path(scratch, f"kernels.{suffix}") for suffix in ("cpp", "o", "so"))
        source.write_text(code)
        names = KERNEL.findall(_run([COMPILER, *options, "-x", "c++", "-E", "-P", str(source)]))
        source.write_text("".join([SHIM, code, RUN, *(WRAPPER.format(name) for name in names)]))
        _run([COMPILER, *options, *FLAGS, "-c", "-o", str(compiled), str(source)])
        _run([COMPILER, "-shared", "-o", str(built), str(compiled)])
        built.replace(library)  # at once: other processes compile too


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout


OPS = "Sum", "Min", "Max", "Product"
Ranges = list[tuple[int, int]]


def accesses(name: str, args: Sequence[object]) -> tuple[Ranges, Ranges]:
    """The memory that a launch of one of ringreduce's kernels reads, and that it writes: addresses and lengths.

    Device memory must be the host's: tables and addresses are read there.
    """
    parts = name.split("_")
    sizes = [TABLE[part].itemsize for part in parts if part in TABLE]
    kernel = "_".join(part for part in parts if part not in TABLE and part not in OPS)
    return _ACCESSES[kernel](*args, *sizes)


def _tiles(address, count):
    rows = _at(address, np.int32, 4 * count).reshape(-1, 4)
    return [tuple(row) for row in rows.tolist()]


def _at(address, dtype, count):
    if count == 0:
        return np.empty(0, dtype)
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype)


def _listed(address, count):
    return _at(address, np.uint64, count).tolist()


def _moved(tiles, tile_count, pieces, slot, itemsize, slot_itemsize):
    """What tiles are of the pieces, and of the slot; and the table and the addresses, which are read."""
    cut = _tiles(tiles, tile_count)
    count = 1 + max((piece for piece, *_ in cut), default=-1)
    starts = _listed(pieces, count)
    in_pieces = [(starts[piece] + first * itemsize, length * itemsize) for piece, first, _, length in cut]
    in_slot = [(slot + start * slot_itemsize, length * slot_itemsize) for _, _, start, length in cut]
    return in_pieces, in_slot, [(tiles, 16 * tile_count), (pieces, 8 * count)]


def _scatter(tiles, tile_count, itemsize, slots, chunk_nbytes, pieces):
    in_pieces, in_slots, lists = _moved(tiles, tile_count, pieces, 0, itemsize, itemsize)
    owners = 1 + max(((low + nbytes - 1) // chunk_nbytes for low, nbytes in in_slots), default=-1)
    addresses = _listed(slots, owners)
    read = []
    for low, nbytes in in_slots:
        for owner in range(low // chunk_nbytes, (low + nbytes - 1) // chunk_nbytes + 1):
            first, last = max(low, owner * chunk_nbytes), min(low + nbytes, (owner + 1) * chunk_nbytes)
            read.append((addresses[owner] + first, last - first))
    return [*read, *lists, (slots, 8 * owners)], in_pieces


def _load(tiles, tile_count, pieces, slot, prescale, itemsize, slot_itemsize):
    in_pieces, in_slot, lists = _moved(tiles, tile_count, pieces, slot, itemsize, slot_itemsize)
    return in_pieces + lists, in_slot


def _store(tiles, tile_count, slot, pieces, divisor, postscale, itemsize, slot_itemsize):
    in_pieces, in_slot, lists = _moved(tiles, tile_count, pieces, slot, itemsize, slot_itemsize)
    return in_slot + lists, in_pieces


def _combine(sources, source_count, target, count, itemsize):
    read = [(address, count * itemsize) for address in _listed(sources, source_count)]
    return [*read, (sources, 8 * source_count)], [(target, count * itemsize)]


_ACCESSES = {
    "hold": lambda nanoseconds: ([], []),  # of bench/gpu: it only takes time
    "gather": lambda tiles, count, itemsize, pieces, slot: _load(tiles, count, pieces, slot, 1, itemsize, itemsize),
    "scatter": _scatter,
    "load_wide": _load,
    "load": lambda *args: _load(*args[:-1], args[-2]),
    "store_wide": _store,
    "store": lambda *args: _store(*args[:-1], args[-2]),
    "reduce": lambda *args: _combine(*args[:4], args[-2]),
}
