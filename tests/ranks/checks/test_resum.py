"""check=sdc: a flipped bit is found by another algorithm, and its rank is named; sums of all types are left alone."""

import itertools
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.view import as_buffers
from ringreduce.checks import resum
from ringreduce.collectives import compiled
from ringreduce.collectives.ops import Reduction
from ringreduce.errors import SettingsError
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Ended, Submission
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.ranks.checks.test_divergence import found
from tests.support.on_threads import known
from tests.support.patience import wait_until

STEPS, EVERY = 24, 4
SETTINGS = Settings(check=f"sdc:{EVERY}", deterministic=True)


def judge_the_rest():
    """Another algorithm's parts may come later than the results of what they are of."""
    (check,) = runtime.current("a test").inspectors
    rr.barrier()
    wait_until(lambda: not any(check._in_turn.values()))
    rr.allreduce(np.zeros(1))  # look at what has come


def reduces(dtypes=("float32",), elements=60_000, op=rr.Average):
    """Reduce two arrays of each type in every step, as a group and alone."""
    for step in range(STEPS):
        for dtype in dtypes:
            # of other exponents on each rank, so that one bit has another weight
            arrays = [(np.arange(n) % 97 + 1 + step % 2).astype(dtype) * 8 ** rr.rank() for n in (elements, 5)]
            arrays = [each.astype(dtype) for each in arrays]
            rr.grouped_allreduce(arrays, name=f"group {dtype}", op=op, names=["long", "short"])
            rr.allreduce(arrays[1], name=f"alone {dtype}", op=op)
    judge_the_rest()


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_what_is_right_is_left_alone(capsys, hosts, monkeypatch):
    judged, judge = [], resum.Resum._judge

    def counted(self, made, sample, rows):
        if sample.before.size > 1:
            judged.append((made.signature.name, sample.step // EVERY))
        judge(self, made, sample, rows)

    monkeypatch.setattr(resum.Resum, "_judge", counted)
    dtypes = ("float32", "float16", "float64", "int32", "complex64")
    run_ranks(3, lambda: [reduces(dtypes, 1000, op) for op in (rr.Sum, rr.Average)], hosts=hosts, settings=SETTINGS)
    assert "check=" not in capsys.readouterr().err
    assert set(judged) == {
        (f"{n} {d}", k) for n in ("group", "alone") for d in dtypes for k in range(2 * STEPS // EVERY)
    }


def test_a_rank_that_has_joined_ends_a_comparison_and_not_the_job(capsys):
    def program():
        for step in range(6 * (rr.rank() == 0)):
            rr.allreduce(np.full(3, step + 1.0), name="w")
        rr.join()

    assert not found(capsys, program, 2, Settings(check="sdc:1", deterministic=True))


def test_arrays_of_no_elements_are_left_alone(capsys):
    def program():
        for step in range(6):
            rr.allreduce(np.zeros((0, 3)), name="e")
            rr.grouped_allreduce([np.zeros((0, 3)), np.full(4, step + rr.rank())], name="group")
        rr.barrier()
        rr.allreduce(np.zeros(1))

    assert not found(capsys, program, 2, Settings(check="sdc:1", deterministic=True))


def uneven():
    yield from range(8 + 2 * rr.rank())
    rr.join()


def in_its_own_set():
    for step in range(3 * (rr.rank() == 0)):
        rr.allreduce(np.full(5, step + 1.0), name="w", process_set=known([0], 1))
    yield from ()


def after_a_join_of_its_own_set():
    yield from range(3)
    if rr.rank() == 0:
        rr.join(process_set=known([0], 1))


@pytest.mark.parametrize("before", [uneven, in_its_own_set, after_a_join_of_its_own_set])
def test_ranks_that_have_reduced_a_name_unequally_often_compare_the_same_steps(capsys, monkeypatch, before):
    judged, judge = [], resum.Resum._judge

    def counted(self, made, sample, rows):
        judged.append(sample.step)
        judge(self, made, sample, rows)

    monkeypatch.setattr(resum.Resum, "_judge", counted)

    def program():
        for step in itertools.chain(before(), range(10, 10 + STEPS)):
            rr.allreduce(np.arange(5) + step * (1.0 + rr.rank()), name="w")
        judge_the_rest()

    run_ranks(2, program, settings=SETTINGS, process_sets=[[0]])
    assert "check=" not in capsys.readouterr().err
    assert len(judged) >= 2 * STEPS // EVERY


def test_parts_of_a_name_are_gathered_in_turn():
    """A rank that left one out, as its last is not over, would compare another step than the others from then on."""
    thens, names = [], []

    def submit(_, name, __, *, then, **___):
        names.append(name)
        thens.append(then)
        return Ended(None)

    states = {0: SimpleNamespace(joins=0)}
    own = SimpleNamespace(
        checks=SimpleNamespace(sdc=EVERY),
        world=SimpleNamespace(size=2, rank=1),
        engine=SimpleNamespace(states=states, submit=submit),
    )
    check = resum.Resum(own)
    for step in range(3 * EVERY):
        array = as_buffers([np.full(3, 10.0 * step)])
        made = Submission(Signature("allreduce", "w"), 0, array, array, lambda _: None, None, "", False)
        check.begin(made, True, False)
        made.complete()
        array[0].flat[:] = -1.0  # the caller goes on with it
    gathered = []
    while thens:
        thens.pop()(None)
        gathered.append(len(names))
    assert gathered == [2, 3, 3]
    assert set(names) == {"w.sdc"}
    assert [sample.step // EVERY for _, sample, _ in check._pending] == [0, 1, 2]


def flip(array):
    array[-1:].view(np.uint8)[3] ^= 128


def in_the_part_of_rank_1(reduce, self, chunks, out, copy):
    if threading.current_thread().name.endswith(" 2"):  # which sums this chunk
        flip(chunks[1])
    reduce(self, chunks, out, copy)


def in_the_slot_of_rank_2(reduce, self, chunks, out, copy):
    reduce(self, chunks, out, copy)
    if threading.current_thread().name.endswith(" 2"):
        flip(copy)


def in_the_array_of_rank_2(reduce, self, chunks, out, copy):
    reduce(self, chunks, out, copy)
    if threading.current_thread().name.endswith(" 2"):
        flip(out)


def by_the_processor(reduce, self, chunks, out, copy):
    reduce(self, chunks, out, copy)
    out[-1] = copy[-1] = 3


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (in_the_part_of_rank_1, "all ranks got a wrong sum, as if one bit had flipped in the part of rank 1"),
        (in_the_slot_of_rank_2, "ranks 0-1 got different bits from rank 2, from whose memory they read them"),
        (in_the_array_of_rank_2, "rank 2 got bits that are not the sum, unlike ranks 0-1"),
        (by_the_processor, "all ranks got the same wrong sum; the rank that summed this element is not known"),
    ],
)
def test_a_flipped_bit_is_named_with_its_rank(capsys, monkeypatch, wrong, expected):
    reduce = Reduction.reduce_to_two
    monkeypatch.setattr(compiled, "can", lambda *_: False)
    monkeypatch.setattr(Reduction, "reduce_to_two", lambda *arguments: wrong(reduce, *arguments))
    said = found(capsys, reduces, 3, settings=SETTINGS)
    where = r"check=sdc: allreduce '(long|short)' \(test_resum.py:\d+\), step \d+, element \d+ of (60000|5) compared: "
    assert said, "a group's array is drawn"
    assert all(re.fullmatch(where + expected, each) for each in said), said


@pytest.mark.extended
def test_ten_thousand_clean_steps_raise_no_alarm(capsys):
    def program():
        params = {"b": np.zeros(30), "w": np.arange(1300.0)}
        optimizer = rr.DistributedOptimizer(
            lambda grads, params: {k: params[k] - 0.01 * each for k, each in grads.items()}
        )
        for step in range(10_000):
            params = optimizer({name: np.sin(each + step + rr.rank()) for name, each in params.items()}, params)

    assert not found(capsys, program, 2, Settings(check="divergence:7,sdc:11", deterministic=True))


def test_it_is_refused_where_bits_depend_on_fusion():
    expected = r"^check='sdc:1000' compares bits; it needs RINGREDUCE_DETERMINISTIC=1$"
    with pytest.raises(SettingsError, match=expected):
        Settings(check="sdc")
    with pytest.raises(SettingsError, match=expected):
        run_ranks(1, lambda: rr.check("sdc:1000"))
