"""tests/mutants.py breaks lines of the sources: each text must still stand there, or nobody would notice."""

from datetime import date, timedelta
from pathlib import Path

import pytest

import ringreduce
import ringrun
from tests.mutants import MUTANTS, ROOT, mutated, of_day

FOLDERS = {"ringreduce": Path(ringreduce.__file__).parent, "launcher": Path(ringrun.__file__).parent}


def test_the_line_that_each_mutant_breaks_is_there():
    for mutant in MUTANTS:
        folder, _, rest = mutant.file.partition("/")
        path = FOLDERS.get(folder, ROOT / folder) / rest
        if path.suffix == ".c" and not path.exists():
            continue  # ringreduce was installed from a wheel, which has no C source
        assert mutated(path.read_text(), mutant) != path.read_text(), mutant.why


@pytest.mark.parametrize("parts", [1, 5, 7])
def test_days_in_a_row_have_each_mutant_once(parts):
    days = [date(2026, 12, 29) + timedelta(number) for number in range(parts)]
    chosen = [each for day in days for each in of_day(MUTANTS, parts, day)]
    assert sorted(chosen) == sorted(MUTANTS)
    assert all(len(of_day(MUTANTS, parts, day)) <= -(-len(MUTANTS) // parts) for day in days)
