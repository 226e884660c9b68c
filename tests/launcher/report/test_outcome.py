"""Which rank is the cause, and what the report says of it."""

import signal
from dataclasses import replace

from ringrun.connection.wire import RankError
from ringrun.report import outcome
from tests.support.loops import in_a_loop


def end(rank, code, at_s=0.0, *, sent=(), lost=(), tail=(), error=None):
    error = RankError("PeerLostError", f"lost {lost}", f"Traceback of {rank}", lost) if lost else error
    return outcome.RankEnd(rank, "node7", 1000 + rank, code, at_s, sent, error, tail)


TERM, KILL = signal.SIGTERM, signal.SIGKILL


@in_a_loop(
    ("ends", "cause"),
    [
        ([], None),
        ([end(0, 0), end(1, 0)], None),
        ([end(0, 0), end(1, 3)], 1),
        ([end(0, 5, 2.0), end(1, 3, 1.0)], 1),
        ([end(0, -9, 2.0), end(1, 3, 1.0)], 1),
        # ended by ringrun, by itself or through a shell: never the cause
        ([end(0, -15, 1.0, sent=(TERM,)), end(1, 3, 2.0)], 1),
        ([end(0, -9, 1.0, sent=(TERM, KILL)), end(1, 3, 2.0)], 1),
        ([end(0, 143, 1.0, sent=(TERM,)), end(1, 3, 2.0)], 1),
        ([end(0, -15, 1.0), end(1, 3, 2.0)], 0),
        # blame: rank 0 failed first, but only because it lost rank 1
        ([end(0, 1, 1.0, lost=(1,)), end(1, 4, 2.0)], 1),
        ([end(0, 1, 1.0, lost=(1,)), end(1, 4, 2.0, sent=(TERM,))], 1),
        ([end(0, 1, 1.0, lost=(1,)), end(1, -15, 2.0, sent=(TERM,))], 0),
        ([end(0, 1, 1.0, lost=(1,)), end(1, 0, 2.0)], 0),
        ([end(0, 1, 1.0, lost=(1,)), end(2, 4, 2.0)], 0),
        ([end(0, 1, 1.0, lost=(1,)), end(1, 1, 2.0, lost=(2,)), end(2, 6, 3.0)], 2),
        ([end(0, 1, 1.0, lost=(1, 2)), end(1, 1, 2.0, lost=(2,)), end(2, 6, 3.0)], 2),
        ([end(0, 1, 1.0, lost=(1,)), end(1, 1, 2.0, lost=(0,))], 1),
        # of two that it has lost the one that has lost none, though that is heard of later
        ([end(0, 1, 1.0, lost=(1, 2)), end(1, 1, 2.0, lost=(0,)), end(2, 6, 3.0)], 2),
        ([end(0, 1, 1.0, lost=(1, 2)), end(1, 1, 2.0, lost=(3,)), end(2, 6, 3.0)], 2),
        ([end(0, 1, 1.0, lost=(1, 2)), end(1, 5, 3.0), end(2, 6, 2.0)], 2),
        # a lost agent counts
        ([end(0, 0), end(1, None)], 1),
        # with 14 the MPI ends a rank that has lost another
        ([end(0, 14, 1.0), end(1, 14, 1.1), end(2, -9, 1.2)], 2),
        ([end(0, 14, 1.0), end(1, 14, 1.1), end(2, 3, 1.2)], 2),
        ([end(0, 14, 1.0), end(2, None, 7.0)], 2),
        ([end(0, 14, 1.0), end(2, -11, 2.0, sent=(TERM,))], 2),
        # what ringrun ended meanwhile says nothing
        ([end(0, 14, 1.0), end(2, 1, 2.0, sent=(TERM,))], 0),
        ([end(0, 14, 1.0), end(2, -15, 2.0, sent=(TERM,))], 0),
        # nothing else has failed; or not the MPI, but the program had its reasons
        ([end(0, 14, 1.0), end(1, 14, 0.9), end(2, 0, 0.8)], 1),
        ([end(0, 14, 1.0), end(1, 1, 1.1, lost=(0,))], 0),
        # blame goes on from there
        ([end(0, 14, 1.0), end(1, 1, 1.1, lost=(2,)), end(2, -9, 1.2)], 2),
        # the first in time, as ever
        ([end(0, 3, 1.0), end(1, 14, 1.1), end(2, -9, 1.2)], 0),
    ],
)
def test_root_cause(ends, cause):
    found = outcome.root_cause(ends, lost_peer_code=14)
    assert (found.rank if found else None) == cause


@in_a_loop(
    ("ends", "left", "cause"),
    [
        ([end(0, 1, 1.0, lost=(2,)), end(1, 1, 1.1, lost=(2,)), end(2, 14, 1.2)], {2}, 0),
        ([end(2, 14, 0.9), end(1, 1, 1.1, lost=(2,))], {2}, 1),
        ([end(0, 1, 1.0, lost=(2,)), end(2, 14, 1.2)], {}, 2),
        ([end(0, 1, 1.0, lost=(2,)), end(2, 7, 1.2)], {2}, 2),
        ([end(2, 14, 1.2), end(0, 0)], {2}, 2),
        ([end(0, 1, 1.0, lost=(2,)), end(2, -11, 1.2)], {2}, 0),
        ([end(0, 14, 1.2), end(2, -9, 1.0)], {2}, 2),
        ([end(0, -11, 1.0, lost=(2,)), end(2, 14, 1.2, lost=(0,))], {0, 2}, 2),
        ([end(0, 1, 1.0, lost=(2,)), end(2, None, 1.2)], {2}, 2),
    ],
)
def test_a_rank_that_left_in_order_has_not_failed_when_the_mpi_ends_it(ends, left, cause):
    assert outcome.root_cause(ends, lost_peer_code=14, left=left).rank == cause


def crash(where):
    return ["Fatal Python error: Segmentation fault", "", "Stack (most recent call first):", f'  File "/x/{where}.py"']


OWN, IN_A_LATER_WORLD = RankError("ValueError", "boom", "Traceback"), RankError("PeerLostError", "lost", "Traceback")
IN_MPI, ELSEWHERE = crash("ringreduce/transport/message"), [*crash("train"), *crash("ringreduce/transport/message")[3:]]


@in_a_loop(
    ("ends", "cause"),
    [
        ([end(0, -11, 1.0, tail=IN_MPI), end(1, 1, 1.1, error=OWN)], 1),
        ([end(0, -11, 1.0, tail=IN_MPI), end(1, 1, 1.1, error=OWN, sent=(15,))], 0),
        ([end(0, -11, 1.0, tail=IN_MPI), end(1, 1, 1.1)], 0),
        ([end(0, -11, 1.0, tail=IN_MPI), end(1, 1, 1.1, lost=(0,))], 0),
        ([end(0, -11, 1.0, tail=IN_MPI), end(1, 1, 1.2, lost=(0,)), end(2, 1, 1.3, error=OWN)], 2),
        ([end(0, -11, 1.1, tail=IN_MPI), end(1, 1, 1.0, lost=(0,)), end(2, 1, 1.3, error=OWN)], 2),
        ([end(0, -11, 1.0, tail=IN_MPI), end(1, 1, 1.1, error=IN_A_LATER_WORLD)], 0),
        ([end(0, -11, 1.0, tail=ELSEWHERE), end(1, 1, 1.1, error=OWN)], 0),
        ([end(0, -11, 1.0), end(1, 1, 1.1, error=OWN)], 0),
        ([end(0, 1, 1.0, tail=IN_MPI), end(1, 1, 1.1, error=OWN)], 0),
        ([end(0, -11, 1.0, tail=IN_MPI, error=OWN), end(1, 1, 1.1, lost=(0,))], 0),
    ],
)
def test_a_crash_inside_of_the_mpi_follows_from_an_error_of_another_rank(ends, cause):
    assert outcome.root_cause(ends).rank == cause


@in_a_loop(
    ("code", "of_shell", "words"),
    [
        (3, 3, "exit code 3"),
        (-9, 137, "killed by signal 9 (SIGKILL), exit code 137"),
        (-11, 139, "killed by signal 11 (SIGSEGV, segmentation fault), exit code 139"),
        (137, 137, "exit code 137: what a shell returns after signal 9 (SIGKILL)"),
        (128, 128, "exit code 128"),
        (255, 255, "exit code 255"),
        (-40, 168, "killed by signal 40 (unnamed), exit code 168"),
        (None, 1, "its agent disappeared without a message"),
    ],
)
def test_how_an_end_is_worded_and_its_exit_code(code, of_shell, words):
    assert (outcome.exit_code(end(0, code)), outcome.in_words(end(0, code))) == (of_shell, words)


FIRST = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 1"]
SECOND = ["Traceback (most recent call last):", '  File "b.py", line 2', "ValueError: two", "second line"]
CRASH = ["Fatal Python error: Aborted", "", "Stack (most recent call first):", '  File "a.py", line 3 in f']
DURING = ["", "During handling of the above exception, another exception occurred:", ""]


@in_a_loop(
    ("tail", "expected"),
    [
        (["warning", "words"], []),
        (["warning", *SECOND], SECOND),
        ([*FIRST, "handled; going on", *SECOND], SECOND),
        (["noise", *FIRST, *DURING, *SECOND], [*FIRST, *DURING, *SECOND]),
        (["noise", *CRASH, "", "Extension modules: numpy._core, and so on (total: 300)"], CRASH),
        ([*SECOND, "and on", *FIRST, *DURING, *SECOND, *DURING, *FIRST], [*FIRST, *DURING, *SECOND, *DURING, *FIRST]),
    ],
)
def test_extract_traceback(tail, expected):
    assert outcome.extract_traceback(tail) == expected


def test_evidence_is_the_best_there_is():
    many = tuple(f"line {count}" for count in range(30))
    assert outcome.evidence(end(0, 1, lost=(1,), tail=(*FIRST,))) == ["Traceback of 0"]
    assert outcome.evidence(end(0, 1, tail=("noise", *FIRST))) == FIRST
    assert outcome.evidence(end(0, 1, tail=many)) == ["its last lines on stderr:", *many[-20:]]
    assert outcome.evidence(end(0, 1), ["mpi words"])[-1] == "mpi words"
    assert outcome.evidence(end(0, 1)) == ["it wrote nothing to stderr"]


def test_evidence_says_whose_it_is_where_another_rank_is_the_subject():
    assert outcome.evidence(end(0, 1, tail=(*FIRST,)), (), "rank 0") == ["rank 0's traceback:", *FIRST]
    assert outcome.evidence(end(0, 1, tail=("a",)), (), "rank 0") == ["rank 0's last lines on stderr:", "a"]
    assert outcome.evidence(end(0, 1), ["b"], "rank 0") == ["rank 0 wrote nothing to stderr; mpirun wrote:", "b"]
    assert outcome.evidence(end(0, 1), (), "rank 0") == ["rank 0 wrote nothing to stderr"]


@in_a_loop(("culprit", "cause"), [(2, 2), (1, 1), (0, 1), (3, 1), (-1, 1)])
def test_of_an_error_that_all_ranks_raise_for_one_that_rank_is_the_cause(culprit, cause):
    error = RankError("NanError", "rank 2 of 4 …", "", culprit=culprit)
    ends = [outcome.RankEnd(rank, "h", 1, 1, at_s, error=error) for rank, at_s in ((1, 0.1), (2, 0.2))]
    ends += [outcome.RankEnd(3, "h", 1, -15, 0.3, sent=(15,)), outcome.RankEnd(0, "h", 1, 0, 0.0)]
    assert outcome.root_cause(ends).rank == cause


def test_the_other_failures_are_told_in_their_order_and_many_stay_short():
    cause = end(1, 4, 1.0, tail=tuple(FIRST))
    ends = [end(0, 1, 3.0, lost=(1,)), cause, end(2, -15, 3.0, sent=(TERM,)), end(3, 0), end(4, -11, 2.0)]
    assert outcome.failures_of_others(cause, ends) == [
        "rank 4 on host node7: killed by signal 11 (SIGSEGV, segmentation fault), exit code 139",
        "rank 0 on host node7: exit code 1, lost rank 1",
    ]
    many = [end(rank, 1, float(rank)) for rank in range(100)]
    lines = outcome.failures_of_others(many[0], many)
    assert lines[-1] == "and 91 more"
    assert len(lines) == 9


def test_what_the_others_failed_by_is_told_where_the_first_was_killed_and_they_do_not_blame_it():
    """As when an elastic job cannot go back to its commit after a loss: that is why it has ended."""
    error = RankError("InputError", "no parameter 'w' here\nand more", "Traceback")
    ends = [end(1, -9, 1.0), *(replace(end(rank, 1, 2.0), error=error) for rank in (0, 2)), end(3, 1, 3.0, lost=(1,))]
    assert outcome.failures_of_others(ends[0], ends) == [
        "rank 0 on host node7: exit code 1, InputError: no parameter 'w' here",
        "rank 2 on host node7: exit code 1",
        "rank 3 on host node7: exit code 1, lost rank 1",
    ]
    first = replace(ends[1], at_s=0.0)
    assert outcome.failures_of_others(first, [*ends[2:3], first]) == ["rank 2 on host node7: exit code 1"]


def test_hydra_loses_the_code_of_mpi_abort_but_mpich_prints_it():
    late = "Abort(807528207): Fatal error in internal_Finalize: Other MPI error"
    ends = [
        end(0, 15, 1.0, tail=(late,)),
        end(1, 15, 2.0, tail=("Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort", late)),
    ]
    found = outcome.aborter(ends, 7)
    assert (found.rank, found.code) == (1, 7)
    assert outcome.aborter(ends, 9) is None
    assert outcome.aborter(ends, None) is None
    beyond = [end(1, 15, 2.0, tail=("Abort(263) on node 1 (rank 1 in comm 0): application called MPI_Abort",))]
    assert outcome.aborter(beyond, 7).code == 7, "a process has 8 bits of it"


def test_the_timeout_report_names_the_ranks():
    head = "ringrun: the job ran longer than --timeout 1.5 s and was ended; "
    assert outcome.timeout_report(1.5, {0, 1, 2}, set(), 4) == f"{head}ranks 0-2 of 4 were still running"
    assert (
        outcome.timeout_report(1.5, {0}, {1, 3}, 4)
        == f"{head}rank 0 of 4 was still running, ranks 1,3 of 4 had not started"
    )
