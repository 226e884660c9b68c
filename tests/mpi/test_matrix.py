"""Every collective in every form on real ranks, among all of them and among some. See tests/support/matrix.py."""

import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from tests.support import matrix, on_ranks
from tests.support.reference import MATRIX, all_but_one_of_each_extended, readable
from tests.support.tiers import parted

pytestmark = pytest.mark.mpi
FEW = ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex128"]
EVERY_TYPE = parted(TABLE, lambda dtype: dtype in ("bool", "bfloat16", "complex128"))


def of_few(pairs):
    return all_but_one_of_each_extended([pair for pair in pairs if pair[0] in FEW])


@pytest.fixture(scope="module", autouse=True)
def some_ranks():
    """A world with little memory, and a process set of some ranks."""
    some = matrix.SOME_RANKS[rr.size()]
    process_set = rr.ProcessSet(some)
    names = ("fusion_buffer_bytes", "fusion_slot_bytes", "shared_slot_bytes", "ring_segment_bytes")
    with on_ranks.worlds() as form:
        form([process_set] if some else [], **{name: getattr(matrix.SMALL, name) for name in names})
        assert rr.size() == 1 or rr.info().algorithm == "shared"
        yield process_set


@pytest.fixture(params=["all", "some"])
def check(request, some_ranks):
    """Run a program among all ranks, or among some, and compare what it returns on them."""

    def run(program, *args):
        process_set = rr.global_process_set if request.param == "all" else some_ranks
        if not process_set.ranks and process_set is not rr.global_process_set:
            pytest.skip("one rank: there is no smaller set")
        ranks = list(range(rr.size())) if process_set is rr.global_process_set else process_set.ranks
        if rr.rank() in ranks:
            told = program(*args, ranks, process_set)
            assert all(other == told for other in rr.allgather_object(told, process_set=process_set))

    return run


@pytest.mark.parametrize(("dtype", "op"), of_few(MATRIX), **readable)
def test_allreduce(check, dtype, op):
    check(matrix.allreduce_program, dtype, op)


@pytest.mark.parametrize(("dtype", "op"), of_few(matrix.SCALINGS), **readable)
def test_allreduce_with_prescale_and_postscale(check, dtype, op):
    check(matrix.scaled_program, dtype, op)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
def test_adasum(check, dtype):
    check(matrix.adasum_program, dtype)


@pytest.mark.parametrize("dtype", EVERY_TYPE)
@pytest.mark.parametrize("program", matrix.COPIES)
def test_copies(check, program, dtype):
    check(program, dtype)


@pytest.mark.parametrize(("dtype", "op"), of_few(matrix.SCATTERINGS), **readable)
def test_reducescatter(check, dtype, op):
    check(matrix.reducescatter_program, dtype, op)


def test_objects(check):
    check(matrix.objects_program)
