"""tests/mutants.py breaks lines of the sources: each text must still stand there, or nobody would notice."""

import pytest

from tests.mutants import MUTANTS, ROOT, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.why)
def test_the_line_that_a_mutant_breaks_is_there(mutant):
    before = (ROOT / mutant.file).read_text()
    assert mutated(before, mutant) != before
