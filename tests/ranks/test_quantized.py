"""All-reduces whose elements travel in 8 or 4 bits, on threads: errors, bits, bytes on the wire, what is refused."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of, known
from tests.support.reference import FLOATS, data
from tests.support.tiers import parted

INT8, INT4 = rr.Compression.int8, rr.Compression.int4
SMALL = Settings(fusion_slot_bytes=4096, shared_slot_bytes=4096, fusion_buffer_bytes=1 << 20)
WORLDS = {
    "two hosts": ([0, 1], INT8),
    "four hosts": ([0, 1, 2, 3], INT4),
    "hosts of two": ([0, 0, 1, 1], INT4),
    "uneven hosts": ([0, 1, 0, 2, 0], INT8),
    "one host": ([0, 0, 0], INT8.everywhere),
    "everywhere": ([0, 0, 1, 1], INT4.stochastic.everywhere),
}
COUNTS = [1, 255, 256, 257, 5, 0, 3000, 20000]


def error(mine, arrays):
    """The largest one of an average, in magnitudes: no element of `data` is above 1.5."""
    return np.abs(mine - np.mean([each.astype(np.float64) for each in arrays], axis=0)).max(initial=0) / 1.5


@pytest.mark.parametrize("settings", parted([Settings(), SMALL], lambda each: each is SMALL), ids=["long", "short"])
@pytest.mark.parametrize("dtype", parted(FLOATS, lambda dtype: dtype in ("float32", "bfloat16")))
@pytest.mark.parametrize("world", WORLDS)
def test_errors_and_the_same_bits_on_all_ranks(world, dtype, settings):
    hosts, wire = WORLDS[world]
    everyones = [[data(dtype, count, rank) for rank in range(len(hosts))] for count in COUNTS]

    def program():
        mine = [arrays[rr.rank()] for arrays in everyones]
        alone = [rr.allreduce(each.reshape(1, -1), compression=wire)[0] for each in mine]
        return alone, rr.grouped_allreduce(mine, compression=wire, op=rr.Sum)

    results = run_ranks(len(hosts), program, hosts=hosts, settings=settings)
    most = (2 if wire.is_stochastic else 1) / (127 if wire.bits == 8 else 7) + 2**-7
    for form, size in ((0, 1), (1, len(hosts))):
        for k, arrays in enumerate(everyones):
            first = results[0][form][k]
            assert (first.shape, first.dtype) == (arrays[0].shape, arrays[0].dtype)
            assert all(each[form][k].tobytes() == first.tobytes() for each in results)
            assert error(first.astype(np.float64) / size, arrays) <= most
    assert error(results[0][0][-1], everyones[-1]) > most / 8, "it was encoded"


@pytest.mark.parametrize("hosts", [[0, 1], [0, 1, 2, 3], [0, 0, 1, 1, 1], list(range(8))], ids=str)
def test_bytes_between_hosts(hosts):
    arrays = [data("float32", 100_003, rank) for rank in range(len(hosts))]

    def nbytes(**options):
        messages = []
        run_ranks(len(hosts), lambda: rr.allreduce(arrays[rr.rank()], **options), hosts=hosts, messages=messages)
        return sum(each.nbytes for each in messages if hosts[each.source] != hosts[each.destination])

    whole = nbytes()
    assert 0.25 * whole < nbytes(compression=INT8) <= 0.26 * whole
    assert 0.125 * whole < nbytes(compression=INT4) <= 0.135 * whole


@each_rank_of(4, hosts=[0, 0, 1, 1], process_sets=[[0, 1], [2, 3], [0], [1], [2], [3]])
def test_inside_a_host_nothing_is_encoded():
    first, mine = rr.rank() // 2 * 2, data("float32", 1000, rr.rank())
    own, alone = known([first, first + 1], 1 + rr.rank() // 2), known([rr.rank()], 3 + rr.rank())
    formats = rr.Compression.none, INT8, INT8.everywhere
    plain, far, near = (rr.allreduce(mine, compression=each, process_set=own) for each in formats)
    np.testing.assert_array_equal(plain, far)
    assert not np.array_equal(plain, near)
    np.testing.assert_array_equal(mine, rr.allreduce(mine, compression=INT8.everywhere, process_set=alone))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_rank_of(3, hosts=[0, 1, 1])
def test_what_is_not_finite_spoils_its_block_on_all_ranks(bad):
    mine = data("float32", 1000, rr.rank())
    mine[300] = bad if rr.rank() == 2 else 1
    result = rr.allreduce(mine, compression=INT8.everywhere)
    np.testing.assert_array_equal(np.isnan(result), np.arange(1000) // 256 == 1)
    return result


@each_rank_of(2, hosts=[0, 1])
def test_zeros_denormals_and_what_overflows():
    tiny, huge = np.full(300, 1e-40, np.float32), np.full(300, 3e38, np.float32)
    assert not rr.allreduce(np.zeros(300), compression=INT4).any()
    assert np.abs(rr.allreduce(tiny, compression=INT4)).max() < 1e-38
    assert np.isnan(rr.allreduce(huge, op=rr.Sum, compression=INT4)).all(), "the sum is infinite"
    assert np.isnan(rr.allreduce(np.full(300, 1e300), compression=INT4)).all(), "float32 cannot hold it"


@pytest.mark.parametrize("hosts", [None, [0, 1, 1]], ids=["one host", "two hosts"])
def test_ranks_that_pass_another_format_are_named(hosts):
    def program():
        wire, mine = (INT4.stochastic if rr.rank() == 1 else INT8), np.zeros(1000)
        channel = rr.ordered()
        for reduce in (rr.allreduce, channel.allreduce):
            text = r"compression=Compression\.int4\.stochastic, but rank 0 has compression=Compression\.int8 "
            with pytest.raises(rr.MismatchError, match=text):
                reduce(mine, compression=wire)
        with pytest.raises(rr.MismatchError, match=r"compression=None, but rank 0 has compression=Compression\.int8"):
            rr.allreduce(mine, compression=INT8 if rr.rank() == 0 else rr.Compression.none)
        return channel.allreduce(mine, compression=INT8).tolist()

    assert run_ranks(3, program, hosts=hosts) == [[0.0] * 1000] * 3


REFUSED = {
    "an op": (lambda x: rr.allreduce(x, op=rr.Max, compression=INT8), "op=Max with compression=Compression.int8; exp"),
    "Adasum": (
        lambda x: rr.allreduce(x, op=rr.Adasum, compression=INT8),
        "op=Adasum with compression=Compression.int8",
    ),
    "a scatter": (lambda x: rr.reducescatter(x, compression=INT8), "reducescatter: op=Average with compression=Compr"),
    "integers": (
        lambda x: rr.allreduce(x.astype(int), compression=INT4),
        "int64 elements cannot travel as Compression.int4",
    ),
    "complex": (lambda x: rr.allreduce(x * 1j, compression=INT4), "complex128 elements cannot travel as"),
    "bool": (lambda x: rr.allreduce(x > 0, op=rr.Sum, compression=INT4), "bool elements cannot travel as"),
    "a name": (lambda x: rr.allreduce(x, compression="int8"), "compression='int8'; expected Compression.none, .fp16, "),
    "8 bits": (lambda _: INT8.stochastic, "Compression.int8.stochastic: only 4 bits are rounded stochastically"),
    "in order": (
        lambda x: rr.allreduce(x, compression=INT4.stochastic),
        "int4.stochastic with RINGREDUCE_DETERMINISTIC",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_encoded_is_refused(what):
    call, message = REFUSED[what]

    def program():
        with pytest.raises(rr.InputError, match=message):
            call(np.ones(300))
        return rr.allreduce(np.zeros(300), compression=INT8)[0]

    assert run_ranks(2, program, hosts=[0, 1], settings=Settings(deterministic=what == "in order")) == [0.0, 0.0]
