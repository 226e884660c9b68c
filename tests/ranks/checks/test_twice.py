"""`ringrun --twice` on its ranks: what differs between two runs is named, with step, array, rank and where it began."""

import itertools
import re

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.collectives import compiled
from ringreduce.collectives.ops import Reduction
from ringreduce.errors import SettingsError
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

STEPS = 6


def program(run, wrong):
    for step in itertools.count():
        assert step <= STEPS, "it ends by itself"
        if wrong == "check" and step == 2:
            rr.check("divergence")
        for name, count in (("b", 5), ("w", 60_000)):
            array = np.sin(np.arange(count) + rr.rank() + step).astype("float32")
            if wrong == "own" and run == 2 and (rr.rank(), step, name) == (1, 4, "w"):
                array[77] += 1
            rr.allreduce(array, name=name)
        rr.allgather(array)
        members = [np.full(3, step + rr.rank()), np.full(4, step - rr.rank())]
        members[1][2] += wrong == "member" and run == 2 and step == 3
        rr.grouped_allreduce(members, name="g")
        rr.grouped_allreduce(members)
        rr.grouped_allreduce(members, names=["g.x", "g.y"])


def found(capsys, monkeypatch, tmp_path, wrong, steps=STEPS):
    """What is said of two runs, and how they end."""
    ends, reduce = [], Reduction.reduce_to_two

    def in_another_order(self, parts, *outs):
        reduce(self, [*parts[1:], parts[0]], *outs)

    for run in (1, 2):
        if wrong == "sum" and run == 2:
            monkeypatch.setattr(compiled, "can", lambda *_: False)
            monkeypatch.setattr(Reduction, "reduce_to_two", in_another_order)
        settings = Settings(twice=f"{run}:{steps}:{tmp_path}")
        with pytest.raises(SystemExit) as end:
            run_ranks(3, lambda run=run: program(run, wrong), settings=settings)
        ends.append(end.value.code)
    (said,) = re.findall("--twice: .*", capsys.readouterr().err)
    return said, ends


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("nothing", r"the same bits in 6 steps, in all arrays \(8\), on ranks 0-2"),
        ("check", r"the same bits in 6 steps, in all arrays \(8\), on ranks 0-2"),
        (
            "own",
            r"'w' differs in step 4, on rank 1 before it is reduced: look there for .*use_deterministic_algorithms\)",
        ),
        ("member", r"'g\.1' differs in step 3, on ranks 0-2 before it is reduced: look there for .*"),
        (
            "sum",
            r"'w' differs in step 0, though the ranks passed the same values: the order of the sum differs; RINGRED.*",
        ),
    ],
)
def test_the_first_difference_is_named(capsys, monkeypatch, tmp_path, wrong, expected):
    said, ends = found(capsys, monkeypatch, tmp_path, wrong)
    assert re.fullmatch(f"--twice: {expected}", said), said
    assert ends[0] == 0
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_too_short_is_refused(tmp_path):
    with pytest.raises(
        SettingsError, match=r"^--twice 9: no array was reduced that often in the first run; ask for fewer"
    ):
        run_ranks(2, rr.barrier, settings=Settings(twice=f"2:9:{tmp_path}"))
