"""The failure card: what stands on it, and how it looks."""

import pytest

from ringrun.connection.wire import Answer, RankError
from ringrun.report.answers import NO_ANSWER, waiting
from ringrun.report.card import WIDTH, card
from ringrun.report.outcome import RankEnd
from ringrun.text import duration
from tests.support.loops import in_a_loop


def end(rank, code, **facts):
    return RankEnd(rank, "node7", 1000 + rank, code, facts.pop("at_s", 0.0), **facts)


def answer(doing, silent=""):
    return Answer(1, doing, "", silent)


ALLREDUCE = "allreduce 'layer3.w' (train.py:41)"
TRACEBACK = "Traceback (most recent call last):\n  " + "x" * 200 + "\nValueError: boom\n"


def test_a_card_in_full():
    error = RankError("ValueError", "boom", TRACEBACK)
    cause = end(1, 1, error=error, device="GPU 3", ran_s=125.0)
    ends = [cause, end(5, 3, at_s=2.0), end(0, 0)]
    answers = {0: answer(ALLREDUCE), 2: answer(ALLREDUCE), 3: answer(ALLREDUCE), 4: answer("", "it is stopped")}
    assert card(cause, ends, 6, asked={0, 2, 3, 4, 6}, answers=answers) == [
        "-- ringrun: rank 1 of 6 failed first -------------------------------------------",
        "how         exit code 1",
        "where       host node7, pid 1001, GPU 3, ran for 2 min 5 s",
        "failed too  rank 5 on host node7: exit code 3",
        "the others  ranks 0,2-3: allreduce 'layer3.w' (train.py:41)",
        "            rank 4: it is stopped",
        "            rank 6: did not answer in time",
        *TRACEBACK.splitlines(),
        "-" * 80,
    ]


def test_a_lost_agent_has_no_more_to_tell():
    assert card(RankEnd(2, "h", 0, None, 0.0), [], 4) == [
        "-- ringrun: rank 2 of 4 failed first -------------------------------------------",
        "how         its agent disappeared without a message",
        "where       host h",
        "it wrote nothing to stderr",
        "-" * 80,
    ]


@pytest.mark.parametrize(
    ("left", "facts"),
    [
        (
            {1: "its script ended"},
            [
                "-- ringrun: rank 1 of 4 left first: its script ended --------------------------",
                "where       host node7, pid 1001, ran for 2.0 s",
                "so failed   rank 2: exit code 1",
                "            host node7, pid 1002, GPU 3, ran for 5.0 s",
                "the others  rank 0: x.py:1",
                "            rank 3: waits in shutdown()",
                "rank 2's traceback:",
                "Traceback",
            ],
        ),
        (
            {3: "its script ended"},
            [
                "-- ringrun: rank 2 of 4 failed first ------------------------------------------",
                "how         exit code 1",
                "where       host node7, pid 1002, GPU 3, ran for 5.0 s",
                "the others  rank 0: x.py:1",
                "            ranks 1,3: waits in shutdown()",
                "Traceback",
            ],
        ),
    ],
)
def test_a_rank_that_left_in_order_is_the_subject_where_another_has_lost_it_and_no_fact_is_of_both(left, facts):
    """Such as a pid and an exit code of two ranks; nor is the subject one of the others."""
    cause = end(2, 1, error=RankError("PeerLostError", "lost", "Traceback\n", (1,)), device="GPU 3", ran_s=5.0)
    answers = {0: answer("x.py:1"), **dict.fromkeys((1, 3), answer("waits in shutdown()"))}
    lines = card(cause, [cause, end(1, 0, ran_s=2.0)], 4, left=left, asked={0, 1, 3}, answers=answers)
    assert lines[:-1] == [facts[0].ljust(WIDTH, "-"), *facts[1:]]


def test_what_checks_have_found_stands_on_the_card_and_of_many_the_first():
    found = [f"check: rank 3 of 4, allreduce 'w' (train.py:7), step {step}: NaN in its own values" for step in range(9)]
    lines = card(end(1, 1), [], 4, found=found)
    labels = ["found       ", *[" " * 12] * 3]
    assert lines[3:7] == [label + text for label, text in zip(labels, [*found[:3], "and 6 more findings"], strict=True)]
    assert not any(line.startswith("found") for line in card(end(1, 1), [], 4))


def test_facts_are_wrapped_and_what_the_rank_wrote_is_not():
    words = "w" * 300
    cause = end(1, -9, oom=f"killed by the kernel's OOM killer: out of memory (cgroup {'/slurm' * 8})", tail=(words,))
    answers = {rank: answer(f"allreduce 'a tensor of rank {rank}' (train.py:{rank})") for rank in range(2, 60)}
    lines = card(cause, [cause], 60, asked=answers.keys(), answers=answers)
    assert words in lines
    assert all(len(line) <= WIDTH for line in lines if line != words)
    assert "killed by the kernel's OOM killer" in lines[2]


def test_a_rank_that_failed_before_it_could_answer_is_not_said_to_have_been_asked():
    cause = end(1, 1)
    lines = card(cause, [cause, end(0, 1)], 3, asked={0, 2}, answers={2: answer("x.py:1, in f")})
    assert "the others  rank 2: x.py:1, in f" in lines
    assert NO_ANSWER not in "\n".join(lines)


def test_of_a_rank_that_failed_as_well_only_what_it_waited_for_is_told():
    cause = end(1, 1)
    answers = {0: answer("", "its first process has ended"), 2: answer(ALLREDUCE), 3: answer("", "it is stopped")}
    lines = card(cause, [cause, end(0, 14), end(2, 14)], 4, asked={0, 2, 3}, answers=answers)
    assert lines[-4:-2] == [f"the others  rank 2: {ALLREDUCE}", "            rank 3: it is stopped"]


def test_colours_are_for_a_terminal_and_change_no_word():
    cause = end(1, 1)
    plain, coloured = (card(cause, [cause], 3, colour=colour) for colour in (False, True))
    assert "\x1b" not in "".join(plain)
    assert coloured[0] == f"\x1b[1;31m{plain[0]}\x1b[0m"
    assert coloured[1:-1] == plain[1:-1]
    assert plain[-1] in coloured[-1]


def test_equal_answers_are_one_line():
    answers = {3: answer(ALLREDUCE), 0: answer(ALLREDUCE), 1: answer("t.py:7, in load"), 4: answer("", "it is stopped")}
    assert waiting([0, 1, 2, 3, 4], answers) == [
        f"ranks 0,3: {ALLREDUCE}",
        "rank 1: t.py:7, in load",
        "rank 2: did not answer in time",
        "rank 4: it is stopped",
    ]
    assert waiting([], {}) == []
    assert waiting([2], {2: Answer(1, "", "", "")}) == ["rank 2: no Python code runs"]


@in_a_loop(
    ("seconds", "text"),
    [
        (-0.1, "0.0 s"),
        (0.31, "0.3 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (12000, "3 h 20 min"),
        (187200, "2 d 4 h"),
        (86399, "1 d 0 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
