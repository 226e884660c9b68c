"""Copies into and out of memory that ranks share."""

import importlib
import importlib.util
import random
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.kernels import copying, half, optional, streaming_numba, sum_numba
from ringreduce.kernels.copying import GAIN, MEASURED_BYTES, PROBE_EVERY, SLOW_S, Reader, Writer

COUNTS = [0, 1, 7, 8, 9, 1023, 4096, 65536, 65537, 100003]


def bytes_of(count, seed):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("count", [1, 100, 5001, MEASURED_BYTES])
def test_reading_copies_all_bits_of_all_types(name, count):
    dtype = TABLE[name].storage
    source = bytes_of(count * dtype.itemsize, count).view(dtype)
    around = np.zeros(count + 2, dtype)
    reader = Reader()
    for reader.uses_other in (False, True):
        around[...] = 0
        reader.read(source, around[1:-1])
        assert around[1:-1].tobytes() == source.tobytes()
        assert not around[[0, -1]].view(np.uint8).any()


@pytest.mark.parametrize("count", COUNTS)
def test_streaming_stores_copy_every_byte_wherever_source_and_target_lie(count):
    for source_at, target_at in [(0, 0), (1, 0), (0, 3), (5, 4), (4, 12)]:
        memory = bytes_of(count + 16, count)
        before = bytes_of(count + 32, count + 1)
        target = before.copy()
        streaming_numba.copy(memory[source_at : source_at + count], target[target_at : target_at + count])
        expected = before.copy()
        expected[target_at : target_at + count] = memory[source_at : source_at + count]
        assert target.tobytes() == expected.tobytes()


def test_the_kernel_streams():
    kernel = streaming_numba.numba.njit(streaming_numba._copy_words.py_func)  # compiled anew: not out of the cache
    kernel(np.zeros(8, np.int64), np.zeros(8, np.int64))
    (code,) = kernel.inspect_asm().values()
    assert "movnt" in code or "stnp" in code


class Clock:
    """Time passes as fast as the stores, plain or streaming, are slow."""

    def __init__(self, monkeypatch, plain_s, streaming_s):
        self.now_s, self.plain_s, self.streaming_s, self.streamed = 0.0, plain_s, streaming_s, 0
        monkeypatch.setattr(copying.time, "perf_counter", self.perf_counter)
        monkeypatch.setattr(copying, "compiled_meanwhile", lambda name: self)

    def perf_counter(self):
        self.now_s += self.plain_s * MEASURED_BYTES  # between two looks, unless the copy was a streaming one
        return self.now_s

    def copy(self, source, target):
        target[...] = source
        self.streamed += 1
        self.now_s += (self.streaming_s - self.plain_s) * MEASURED_BYTES


def write(writer, times):
    for number in range(times):
        source = bytes_of(MEASURED_BYTES, number)
        target = np.zeros(MEASURED_BYTES, np.uint8)
        writer.write(source, target)
        assert target.tobytes() == source.tobytes()


@pytest.mark.parametrize(
    ("plain", "streaming", "streams"),
    [(4.0, 1.0, True), (4.0, 4.0 / GAIN * 1.01, False), (0.9, 0.1, False)],
    ids=["much faster", "not much faster", "plain is fast enough"],
)
def test_streaming_stores_are_taken_where_plain_ones_are_slow(monkeypatch, plain, streaming, streams):
    clock = Clock(monkeypatch, plain * SLOW_S, streaming * SLOW_S)
    writer = Writer()
    write(writer, PROBE_EVERY - 1)
    assert clock.streamed == 0
    write(writer, PROBE_EVERY)
    assert writer.uses_other is streams
    assert (clock.streamed > 0) is (plain > 1.0)


def test_a_reader_takes_the_kind_that_was_faster_in_the_last_trials(monkeypatch):
    reader, kinds = Reader(), []
    vectors_s, memcpy_s = 2.0, 1.0
    clock = [0.0]

    def copying_by(kind, cost):
        def copy(source, target):
            target[...] = source
            kinds.append(kind)
            clock[0] += cost()

        return copy

    monkeypatch.setattr(copying.time, "perf_counter", lambda: clock[0])
    reader._usual = copying_by("vectors", lambda: vectors_s)
    monkeypatch.setattr(copying, "_by_memcpy", copying_by("memcpy", lambda: memcpy_s))

    def read():
        kinds.clear()
        for _ in range(6 * PROBE_EVERY):
            reader.read(source, target)
        return {kind: kinds.count(kind) for kind in ("vectors", "memcpy")}

    source, target = bytes_of(MEASURED_BYTES, 1), np.zeros(MEASURED_BYTES, np.uint8)
    counts = read()
    assert counts["memcpy"] > 2 * PROBE_EVERY
    vectors_s = 0.5
    assert read()["vectors"] > 2 * PROBE_EVERY
    assert target.tobytes() == source.tobytes()


def test_copies_that_were_interrupted_do_not_count(monkeypatch):
    """Three of four plain ones: as where ranks outnumber cores."""
    clock = Clock(monkeypatch, 0.5 * SLOW_S, 0.2 * SLOW_S)
    writer = Writer()
    for number in range(3 * PROBE_EVERY):
        clock.plain_s = (0.5 if number % 4 == 0 else 50) * SLOW_S
        write(writer, 1)
    assert not writer.uses_other
    assert clock.streamed == 0


def test_a_writer_goes_back_to_plain_stores_when_these_have_become_fast(monkeypatch):
    clock = Clock(monkeypatch, 4 * SLOW_S, SLOW_S)
    writer = Writer()
    write(writer, PROBE_EVERY)
    assert writer.uses_other
    clock.plain_s = 0.1 * SLOW_S
    write(writer, 3 * PROBE_EVERY)
    assert not writer.uses_other


def test_short_writes_are_plain(monkeypatch):
    Clock(monkeypatch, 4 * SLOW_S, SLOW_S)
    writer = Writer()
    write(writer, PROBE_EVERY)
    assert writer.uses_other
    monkeypatch.setattr(copying, "compiled_meanwhile", None)
    short = bytes_of(random.Random(1).randrange(1, MEASURED_BYTES), 1)
    target = np.zeros_like(short)
    writer.write(short, target)
    assert target.tobytes() == short.tobytes()


@pytest.fixture
def forgotten():
    """What was compiled is forgotten, before the test and after it."""
    caches = optional._compiling, optional._compiled
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("name", "kernel", "case"),
    [("streaming_numba", "copy", ()), ("sum_numba", "total", (2,)), ("half_numba", "_add", ())],
    ids=["copy", "sum", "half"],
)
@pytest.mark.parametrize("broken", ["absent", "does not compile", None])
def test_without_a_numba_that_works_other_kernels_do_it(monkeypatch, forgotten, name, kernel, case, broken):
    module = importlib.import_module(f"ringreduce.kernels.{name}")
    if broken == "absent":
        monkeypatch.setattr(optional, "imported", lambda name: None)
    elif broken:
        monkeypatch.setattr(module, kernel, lambda *arrays: importlib.import_module("no_such"))
    optional._compiling(name, *case).join()
    assert optional.compiled_meanwhile(name, *case) is (None if broken else module)


def test_stores_are_plain_until_the_kernel_is_compiled(monkeypatch, forgotten):
    clock, is_compiled = Clock(monkeypatch, 4 * SLOW_S, SLOW_S), threading.Event()
    monkeypatch.undo()
    monkeypatch.setattr(copying.time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(optional, "_compiled", lambda name: is_compiled.wait(30) and clock)
    writer = Writer()
    try:
        write(writer, 2 * PROBE_EVERY)
        assert not clock.streamed
    finally:
        is_compiled.set()
        optional._compiling("streaming_numba").join()
    write(writer, PROBE_EVERY)
    assert clock.streamed


def test_16_bit_floats_are_converted_by_others_until_numba_has_compiled(monkeypatch, forgotten):
    is_compiled, compiled = threading.Event(), SimpleNamespace(__name__="half_numba")
    monkeypatch.setattr(optional, "_compiled", lambda name: is_compiled.wait(30) and compiled)
    try:
        assert half.kernel_name() in ("numpy", "torch")
    finally:
        is_compiled.set()
        optional._compiling("half_numba").join()
    assert half.kernel_name() == "numba"


def test_sums_take_the_kernel_when_it_is_worth_compiling_and_plain_stores_do(monkeypatch):
    asked = []
    monkeypatch.setattr(copying, "COMPILED_AFTER_BYTES", 1000)
    monkeypatch.setattr(
        copying,
        "compiled_meanwhile",
        lambda name, count: asked.append((name, count)) or (sum_numba if count < 4 else None),
    )
    writer = Writer()
    assert writer.summing(3, 999) is None
    assert not asked
    assert writer.summing(3, 1) is sum_numba.total
    assert writer.summing(4, 1) is None
    assert asked == [("sum_numba", 3), ("sum_numba", 4)]
    writer.uses_other = True
    assert writer.summing(3, 1) is None


def test_the_sum_is_vectorised():
    kernel = streaming_numba.numba.njit(sum_numba.total.py_func)  # compiled anew: not out of the cache
    first, second, copy = np.ones((3, 8), np.float32)
    kernel((first, second), first, copy, np.float32(2), np.float32(0.5))
    (code,) = kernel.inspect_asm().values()
    assert re.search(r"addps|fadd\s+v", code)
