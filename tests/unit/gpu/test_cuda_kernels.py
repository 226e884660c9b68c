"""The GPU's kernels, compiled for the host, where subnormal numbers are numbers: they have the bits of ops.Reduction,
except for complex products."""

import contextlib
import itertools
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.arrays.cuda import Device, Stream
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.ops import Average, Product, Reduction, Sum
from ringreduce.gpu import kernels as cuda_kernels
from ringreduce.gpu.kernels import TILE_BYTES, WORD_BYTES, Kernels, tiles
from tests.support import tiers
from tests.support.emulated_cuda import accesses, emulate
from tests.support.reference import FEW, MATRIX, assert_same_bits, readable

RANKS = [1, 2, 3, 5]
SCALES = [(1.0, 1.0), (0.3, 1.0), (1.0, 0.7), (0.3, 0.7), (3, 0.125)]
COUNTS = [0, 1, 15, 1000, 5003]
GUARD_BYTES = 64
GUARD = 0xA5


REDUCTIONS = [(name, op) for name, op in MATRIX if not Reduction(op, TABLE[name], 2).is_paired]
REDUCTIONS = tiers.parted(REDUCTIONS, lambda *pair: pair in FEW)


def scales_of(name):
    return SCALES if name != "bool" else SCALES[:1]


# ---- a host that looks like a GPU which does all at once


class Memory:
    """Bytes at an address that is `shift` bytes from a multiple of 256, with guards on both sides."""

    def __init__(self, nbytes, shift=0):
        self._everything = np.full(nbytes + 512 + 2 * GUARD_BYTES, GUARD, np.uint8)
        low = -(self._everything.ctypes.data + GUARD_BYTES) % 256 + GUARD_BYTES + shift
        self.array = self._everything[low : low + nbytes]
        self._outside = np.delete(np.arange(self._everything.size), np.arange(low, low + nbytes))
        self.pointer = self._everything.ctypes.data + low

    def is_guarded(self):
        return bool((self._everything[self._outside] == GUARD).all())


def memory_of(values, shift=0):
    memory = Memory(values.nbytes, shift)
    memory.array[:] = values.view(np.uint8)
    return memory


class FakeStream(contextlib.nullcontext):
    ptr = 1

    def __init__(self, non_blocking):
        assert non_blocking
        super().__init__(self)


class FakeModule:
    """As cupy.RawModule."""

    launched: list[tuple[str, tuple[float, ...]]] = []  # noqa: RUF012

    def __init__(self, code, options):
        self._module = emulate(code, options)

    def get_function(self, name):
        def launch(grid, block, args):
            FakeModule.launched.append((name, args))
            self._module.launch(name, *grid, *block, args)

        return launch


class FakeArray:
    """As cupy.ndarray, copied from an array of the host."""

    def __init__(self, values):
        self._memory = memory_of(values.reshape(-1))
        self._length = len(values)
        self.data = types.SimpleNamespace(ptr=self._memory.pointer)

    def __len__(self):
        return self._length


def fake_cupy():
    runtime = types.SimpleNamespace(getDevice=lambda: 0)
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(runtime=runtime, Stream=FakeStream), RawModule=FakeModule, asarray=FakeArray
    )


@pytest.fixture
def gpu(monkeypatch):
    """Kernels and a stream; every launch is recorded."""
    fake = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(FakeModule, "launched", [])
    device = Device(0)
    return types.SimpleNamespace(kernels=Kernels(device), stream=Stream(device), fake=fake)


# ---- elements


def values_of(name, count, rank, *, small=False):
    """Elements that differ by rank and index; `small`: integers that no scale factor here takes out of their range."""
    element = TABLE[name]
    rng = np.random.default_rng([rank, count])
    if element.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if element.kind in "iu":
        limits = np.iinfo(element.storage)
        low, high = (limits.min // 40, limits.max // 40) if small else (limits.min, limits.max)
        return rng.integers(low, high, count, element.storage, endpoint=True)
    parts = count * (2 if element.kind == "c" else 1)
    part = element.storage if element.kind == "f" and name != "bfloat16" else np.dtype(np.float32)
    if element.kind == "c":
        part = np.dtype(f"f{element.itemsize // 2}")
    wide = np.float64 if part.itemsize == 8 else np.float32
    values = rng.normal(size=parts).astype(wide) * wide(10) ** rng.integers(-4, 4, parts)
    if element.kind == "c":  # NumPy's arithmetic of complex infinities and zeros' signs is its own
        return values.astype(part).view(element.storage)
    info = np.finfo(part)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, float(info.max), -float(info.max), float(info.tiny) / 8, 1.0]
    at = rng.random(parts) < 0.15
    values[at] = rng.choice(np.array(special, wide), int(at.sum()))
    if element.is_half:
        return element.narrow(values.astype(np.float32))
    return values.astype(part).view(element.storage)


def assert_same(name, memory, dtype, expected, fuses=False):
    """fuses: NumPy makes these with FMA where the processor has it, and rounds once less."""
    assert memory.is_guarded(), "nothing is written outside"
    found = memory.array.view(dtype)
    if fuses:
        np.testing.assert_allclose(found, expected, rtol=1e-4 if name == "complex64" else 1e-12)
    else:
        assert_same_bits(found, expected, name)


def cases(name):
    for (prescale, postscale), count, shifted in itertools.product(scales_of(name), COUNTS, [False, True]):
        yield prescale, postscale, count, TABLE[name].itemsize if shifted else 0


def check_reduce(gpu, reduction, parts, shift=0, fuses=False):
    """Into memory of its own, where the parts stay as they are; then in place of the last part."""
    name, storage = reduction.element.name, reduction.element.storage
    expected = np.empty_like(parts[0])
    reduction.reduce_parts(parts, expected)
    sources, target = [memory_of(part, shift) for part in parts], Memory(expected.nbytes)
    pointers = [source.pointer for source in sources]
    gpu.kernels.reduce(reduction, pointers, target.pointer, len(expected), gpu.stream)
    assert_same(name, target, storage, expected, fuses)
    for source, part in zip(sources, parts, strict=True):
        np.testing.assert_array_equal(source.array, part.view(np.uint8))
    gpu.kernels.reduce(reduction, pointers, pointers[-1], len(expected), gpu.stream)
    assert_same(name, sources[-1], storage, expected, fuses)


@pytest.mark.parametrize("ranks", tiers.parted(RANKS, lambda ranks: ranks == 3))
@pytest.mark.parametrize(("name", "op"), REDUCTIONS, **readable)
def test_reduce_has_the_bits_of_the_host(gpu, op, name, ranks):
    element = TABLE[name]
    for prescale, postscale, count, shift in cases(name):
        small = (prescale, postscale) != (1.0, 1.0)
        parts = [values_of(name, count, rank, small=small) for rank in range(ranks)]
        if small and op is Product and element.kind in "iu":
            parts = [part % element.storage.type(3) for part in parts]
        reduction = Reduction(op, element, ranks, prescale, postscale)
        check_reduce(gpu, reduction, parts, shift, fuses=op is Product and element.kind == "c")


def test_blocks_take_more_than_one_part_when_there_are_too_few(gpu, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "MOST_BLOCKS", 3)
    parts = [values_of("float16", 50_001, rank) for rank in range(3)]
    check_reduce(gpu, Reduction(Average, TABLE["float16"], 3), parts)
    check_copies(gpu, "float16", *layout([50_001, 17], 2), 2)


def test_hundreds_of_sources(gpu):
    check_reduce(gpu, Reduction(Sum, TABLE["int32"], 300), [values_of("int32", 9, rank) for rank in range(300)])


# ---- slots


PIECES = [1, 7, 0, 5000, 64, 3, 16, 8192 + 1]


def layout(counts, itemsize):
    """Pieces, where each starts, and how long the slot is."""
    alignment = WORD_BYTES // itemsize
    starts, length = [], 0
    for count in counts:
        starts.append(length)
        length += -(-count // alignment) * alignment
    return counts, starts, length


def check_copies(gpu, name, counts, starts, length, ranks, shift=0):
    """Gather every rank's pieces into its slot; scatter each chunk out of its owner's slot."""
    element, alignment = TABLE[name], WORD_BYTES // TABLE[name].itemsize
    table = gpu.kernels.table(starts, counts, element.itemsize, gpu.stream)
    slots = [Memory(length * element.itemsize) for _ in range(ranks)]
    everyone = [[values_of(name, count, 10 * rank + n) for n, count in enumerate(counts)] for rank in range(ranks)]
    for slot, values in zip(slots, everyone, strict=True):
        sources = [memory_of(each, shift) for each in values]
        gpu.kernels.gather(table, [each.pointer for each in sources], slot.pointer, gpu.stream)
        expected = np.full(slot.array.size, GUARD, np.uint8)
        for each, start in zip(values, starts, strict=True):
            expected[start * element.itemsize :][: each.nbytes] = each.view(np.uint8)
        np.testing.assert_array_equal(slot.array, expected, "what lies between the pieces is left alone")
        assert slot.is_guarded()
    chunk = -(-length // (ranks * alignment)) * alignment
    targets = [Memory(each.nbytes, shift) for each in everyone[0]]
    pointers = [each.pointer for each in targets]
    gpu.kernels.scatter(table, [each.pointer for each in slots], chunk, pointers, gpu.stream)
    for number, target in enumerate(targets):
        owners = (starts[number] + np.arange(counts[number])) // chunk
        expected = np.array([everyone[owner][number][k] for k, owner in enumerate(owners)], element.storage)
        assert target.is_guarded()
        np.testing.assert_array_equal(target.array, expected.view(np.uint8))


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_are_gathered_and_each_chunk_scattered_out_of_its_owner_s_slot(gpu, ranks, shift):
    check_copies(gpu, "uint8", *layout(PIECES, 1), ranks, shift)


@pytest.mark.parametrize("name", TABLE)
def test_elements_of_every_type_are_gathered_and_scattered(gpu, name):
    check_copies(gpu, name, *layout(PIECES, TABLE[name].itemsize), 3, TABLE[name].itemsize)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("name", "op"), [each for each in REDUCTIONS if each.values[1] in (Sum, Average)], **readable)
def test_pieces_are_loaded_and_stored_with_the_bits_of_the_host(gpu, op, name, wide):
    element = TABLE[name]
    for (prescale, postscale), ranks, shift in itertools.product(scales_of(name), [1, 4, 6], [0, element.itemsize]):
        reduction = Reduction(op, element, ranks, prescale, postscale)
        in_slot = reduction.sum_type if wide else element.storage
        in_slot_name = reduction.sum_type.name if wide else name
        pieces, starts, length = layout(PIECES, element.itemsize)
        values = [values_of(name, count, n, small=True) for n, count in enumerate(pieces)]
        table = gpu.kernels.table(starts, pieces, element.itemsize, gpu.stream)
        slot = Memory(length * in_slot.itemsize)
        sources = [memory_of(each, shift) for each in values]
        gpu.kernels.load(table, [s.pointer for s in sources], slot.pointer, reduction, gpu.stream, wide=wide)
        targets = [Memory(each.nbytes, shift) for each in values]
        pointers = [target.pointer for target in targets]
        loaded = slot.array.copy().view(in_slot)
        gpu.kernels.store(table, slot.pointer, pointers, reduction, gpu.stream, wide=wide)
        assert slot.is_guarded()
        for each, start, target in zip(values, starts, targets, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                partial = reduction.start(each.copy())
            got = loaded[start : start + len(each)]
            expected = partial if wide or reduction.in_place else element.narrow(partial).astype(element.storage)
            assert_same_bits(got, expected, in_slot_name)
            with np.errstate(over="ignore", invalid="ignore"):
                summed = got.copy() if wide or reduction.in_place else reduction.widen(got)
                finished = summed if reduction.in_place else np.empty_like(each)
                reduction.finish(summed, finished)
            assert_same(name, target, element.storage, finished)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_float_is_widened_and_float32_of_all_kinds_rounded(gpu, name):
    element, reduction = TABLE[name], Reduction(Sum, TABLE[name], 2)
    every = np.arange(1 << 16, dtype=np.uint16).view(element.storage)
    table = gpu.kernels.table([0], [every.size], 2, gpu.stream)
    pieces, slot = memory_of(every), Memory(4 * every.size)
    gpu.kernels.load(table, [pieces.pointer], slot.pointer, reduction, gpu.stream, wide=True)
    assert_same("float32", slot, np.float32, element.widen(every))
    near = slot.array.view(np.uint32).copy()
    nans = np.arange(0x7F800001, 0x7F800001 + every.size * 127, 127, dtype=np.uint32)
    for wide in (near + 1, near + 0x8000, near + 0x0FFF, near + 0x1000, near ^ 0x3FFF, nans, nans | 0x80000000):
        slot.array[:] = wide.astype(np.uint32).view(np.uint8)
        gpu.kernels.store(table, slot.pointer, [pieces.pointer], reduction, gpu.stream, wide=True)
        assert_same(name, pieces, element.storage, element.narrow(wide.astype(np.uint32).view(np.float32)))


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 16))
def test_tiles_cover_every_piece_once(counts, length):
    starts = np.cumsum([0, *[count + 3 for count in counts]])[:-1]
    cut = tiles(starts, counts, length)
    assert cut.dtype == np.int32
    assert all(0 < count <= length for _, _, _, count in cut)
    covered = [(piece, k, start + k - first) for piece, first, start, count in cut for k in range(first, first + count)]
    assert covered == [(n, k, starts[n] + k) for n, count in enumerate(counts) for k in range(count)]


# ---- what is uploaded


def test_what_is_known_is_not_uploaded_again(gpu, monkeypatch):
    uploads = []
    monkeypatch.setattr(gpu.fake, "asarray", lambda values: uploads.append(values) or FakeArray(values))
    slot, one, other = Memory(64), memory_of(np.arange(4.0)), memory_of(np.arange(4.0) + 7)
    for pointers in ([one.pointer], [other.pointer], [one.pointer]):
        table = gpu.kernels.table([0], [4], 8, gpu.stream)
        gpu.kernels.gather(table, pointers, slot.pointer, gpu.stream)
    assert slot.array[:32].view(np.float64).tolist() == [0, 1, 2, 3]
    assert len(uploads) == 3, "the table once, and the two addresses"


def test_what_is_held_stays_when_it_is_no_longer_cached(gpu):
    tables = [gpu.kernels.table([0], [n + 1], 1, gpu.stream) for n in range(cuda_kernels.KEPT + 9)]
    gathered = memory_of(np.arange(len(tables), dtype=np.uint16).view(np.uint8))
    for n, table in enumerate(tables):
        slot = Memory(2048)
        gpu.kernels.gather(table, [gathered.pointer], slot.pointer, gpu.stream)
        assert slot.array[: n + 2].tolist() == [*gathered.array[: n + 1].tolist(), GUARD]


def test_each_stream_has_memory_of_its_own(gpu):
    one, two = (gpu.kernels.table([0], [4], 8, stream) for stream in (gpu.stream, Stream(gpu.stream.device)))
    assert one.tiles.data.ptr != two.tiles.data.ptr


def test_nothing_is_launched_for_nothing(gpu):
    reduction = Reduction(Sum, TABLE["float32"], 2)
    table = gpu.kernels.table([], [], 4, gpu.stream)
    gpu.kernels.gather(table, [], 0, gpu.stream)
    gpu.kernels.scatter(table, [], 4, [], gpu.stream)
    gpu.kernels.reduce(reduction, [256, 512], 256, 0, gpu.stream)
    assert FakeModule.launched == []


# ---- what a launch reads and writes, as tests of races are told


def test_the_ranges_that_launches_read_and_write(gpu):
    counts, starts, length = layout([5, 3000], 4)
    table = gpu.kernels.table(starts, counts, 4, gpu.stream)
    pieces, slots = [Memory(4 * count) for count in counts], [Memory(4 * length) for _ in range(2)]
    wide = Memory(8 * length)
    pointers, slot_pointers = [each.pointer for each in pieces], [each.pointer for each in slots]
    kernels, stream = gpu.kernels, gpu.stream
    average = Reduction(Average, TABLE["int32"], 2)
    kernels.gather(table, pointers, slot_pointers[0], stream)
    kernels.scatter(table, slot_pointers, 1504, pointers, stream)
    kernels.load(table, pointers, slot_pointers[1], average, stream, wide=False)
    kernels.load(table, pointers, wide.pointer, average, stream, wide=True)
    kernels.store(table, wide.pointer, pointers, average, stream, wide=True)
    kernels.reduce(average, slot_pointers, slot_pointers[1], length, stream)
    named = {"p0": pieces[0], "p1": pieces[1], "s0": slots[0], "s1": slots[1], "w": wide}

    def found(ranges):
        """By memory: the lowest and highest byte, and how many."""
        told = {}
        for name, memory in named.items():
            offsets = [(address - memory.pointer, nbytes) for address, nbytes in ranges]
            inside = [(low, low + nbytes) for low, nbytes in offsets if 0 <= low < memory.array.size]
            if inside:
                told[name] = min(inside)[0], max(high for _, high in inside), sum(high - low for low, high in inside)
        return told

    whole = {"p0": (0, 20, 20), "p1": (0, 12000, 12000)}
    in_slot = (0, 4 * length, 20 + 12000)
    assert [tuple(map(found, accesses(*launched))) for launched in FakeModule.launched] == [
        (whole, {"s0": in_slot}),
        ({"s0": (0, 1504 * 4, 20 + (1504 - 8) * 4), "s1": (1504 * 4, 4 * length, (length - 1504) * 4)}, whole),
        (whole, {"s1": in_slot}),
        (whole, {"w": (0, 8 * length, 2 * 12020)}),
        ({"w": (0, 8 * length, 2 * 12020)}, whole),
        ({"s0": (0, 4 * length, 4 * length), "s1": (0, 4 * length, 4 * length)}, {"s1": (0, 4 * length, 4 * length)}),
    ]
    tables = [nbytes for address, nbytes in accesses(*FakeModule.launched[0])[0] if address == table.tiles.data.ptr]
    assert tables == [16 * len(table.tiles)], "the table is read too"
    assert len(table.tiles) == 1 + -(-3000 * 4 // TILE_BYTES)
