"""Sets of ranks as text: read, written, and refused in one clear line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.arguments import parse_ranks
from ringrun.errors import UsageError
from ringrun.text import format_spans, split_ranks
from tests.support.loops import in_a_loop

sets_of_ranks = st.frozensets(st.integers(0, 130), min_size=1)
# rich in what a list of ranks is made of
nearly_lists = st.text(st.sampled_from("0123456789,-- ٣²x"), max_size=12)


@given(sets_of_ranks)
def test_what_is_written_is_read_back(ranks):
    assert parse_ranks(format_spans(ranks), 131, "--ranks") == ranks


@given(st.one_of(nearly_lists, st.text()), st.integers(1, 12))
def test_any_text_gives_ranks_or_one_usage_error(text, size):
    complaint = ""
    ranks = frozenset([0])
    try:
        ranks = parse_ranks(text, size, "--ranks")
    except UsageError as error:
        complaint = str(error)
    assert ranks
    assert ranks <= set(range(size))
    assert not complaint or complaint.startswith("--ranks")
    assert "\n" not in complaint
    assert len(complaint) < 600


@given(sets_of_ranks, st.integers(1, 30))
def test_the_parts_name_all_ranks_once_and_are_short(ranks, max_characters):
    texts = split_ranks(ranks, max_characters)
    assert ",".join(texts) == format_spans(ranks)
    assert all(len(text) <= max_characters or "," not in text for text in texts)


RIGHT = [
    ("0", {0}),
    ("0,3-5", {0, 3, 4, 5}),
    (" 1 , 2 - 3 ", {1, 2, 3}),
    ("7,7,6-7", {6, 7}),
    ("2-2", {2}),
    ("007", {7}),
]


@in_a_loop(("text", "ranks"), RIGHT)
def test_lists(text, ranks):
    assert parse_ranks(text, 8, "--ranks") == ranks


EXPECTED = "expected ranks and ranges with commas between them, as in 0,3-5, got"
WRONG = [
    ("", f"--ranks '': {EXPECTED} ''"),
    ("0,,2", f"--ranks '0,,2': {EXPECTED} ''"),
    ("0,", f"--ranks '0,': {EXPECTED} ''"),
    ("0,x", f"--ranks '0,x': {EXPECTED} 'x'"),
    ("-1", f"--ranks '-1': {EXPECTED} '-1'"),
    ("3-", f"--ranks '3-': {EXPECTED} '3-'"),
    ("1-2-3", f"--ranks '1-2-3': {EXPECTED} '1-2-3'"),
    ("²", f"--ranks '²': {EXPECTED} '²'"),
    ("5-3", "--ranks '5-3': the range 5-3 is reversed; write 3-5"),
    ("8", "--ranks: there is no rank 8; with -np 8 the ranks are 0 to 7"),
    ("0-8", "--ranks: there is no rank 8; with -np 8 the ranks are 0 to 7"),
    ("9" * 5000, f"--ranks: there is no rank {'9' * 19}…; with -np 8 the ranks are 0 to 7"),
]


@in_a_loop(("text", "message"), WRONG)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(UsageError) as error:
        parse_ranks(text, 8, "--ranks")
    assert str(error.value) == message


def test_one_rank_has_one_number():
    with pytest.raises(UsageError, match="there is no rank 1; with -np 1 the only rank is 0"):
        parse_ranks("1", 1, "--ranks")
