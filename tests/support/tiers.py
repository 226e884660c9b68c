"""What runs always, and what is marked `extended`: `pytest` leaves that out, `pytest -m ""` runs everything.

Extended tests explore: those that take seeds take new ones every day. A seed stands in the test's name, so the line
that pytest prints of a failure tells how to see it again: `TEST_SEED=20260722 pytest -m "" -k 20260722004`.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SEED = int(os.environ.setdefault("TEST_SEED", datetime.date.today().strftime("%Y%m%d")))
"""Of the day, or what was asked for; in the environment, so that all processes of a run have the same."""

extended = pytest.mark.extended


def parted(values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """The values of a `parametrize`, of which those run always for which `quick` is true; the others are extended.

    A value that is a tuple is one of several arguments, and `quick` gets them one by one.
    """
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*arguments, marks=[] if quick(*arguments) else [extended]))
    return found


def seeds(quick: Iterable[int], explored: int) -> list[Any]:
    """Seeds that are always the same, and `explored` more that are the day's."""
    return [*quick, *(pytest.param(1000 * SEED + number, marks=extended) for number in range(explored))]


QUICK_JOBS = {
    "cluster/test_doctor.py": [
        "test_four_hosts_of_which_one_has_a_slow_link",
    ],
    "cluster/test_fixtures.py": [
        "test_each_host_is_reached_from_each_by_name_and_address",
        "test_links_and_daemons_stop_and_start_again",
    ],
    "cluster/test_slurm.py": [
        "test_salloc_and_ringrun[openmpi--n4-flags0-",
    ],
    "cluster/test_ssh_hosts.py": [
        "test_uneven_slots[openmpi-where1",
        "test_variables_reach_all_hosts_and_secrets_stay[",
        "test_a_rank_that_dies_on_another_host[openmpi-os.kill",
        "test_a_host_whose_link_goes_down[",
    ],
    "elastic/test_deaths.py": [
        "test_the_others_go_on[openmpi-rank 0]",
        "test_without_ringrun_it_is_said_that_nobody_sees_deaths",
    ],
    "elastic/test_restarts.py": [
        "test_hosts_that_come_are_taken_after_the_next_commit[openmpi",
    ],
    "end_to_end/test_engine.py": [
        "test_shutdown_with_work_pending_is_an_error_that_says_who_left_first[",
        "test_what_was_handed_in_and_never_waited_for_hangs_nobody_at_exit[",
        "test_a_rank_that_does_something_else_is_named_with_its_stack[openmpi-2",
        "test_a_forked_child_is_no_rank_and_ends_alone[raise",
    ],
    "end_to_end/test_failures.py": [
        "test_one_rank_ends_and_the_others_wait_for_it[openmpi-SIGKILL",
        "test_one_rank_ends_and_the_others_wait_for_it[openmpi-raise",
        "test_one_rank_ends_and_the_others_wait_for_it[openmpi-return",
        "test_the_traceback_of_the_first_failure_is_printed_last[",
        "test_a_process_alone_ends_as_ever[",
    ],
    "end_to_end/test_horovod_scripts.py": [
        "test_mnist[2]",
        "test_process_sets[2-False]",
        "test_join[2]",
    ],
    "end_to_end/test_mpi_suite.py": [
        "test_a_hang_ends_the_run_with_every_ranks_stack[",
        "test_the_suite_passes_on_so_many_ranks[",
    ],
    "end_to_end/test_mpirun.py": [
        "",
    ],
    "end_to_end/test_docs.py": [
        "test_a_script_runs_before_and_after[numpy.md-1]",
        "test_a_script_of_torch_runs_where_torch_is_imported_already[",
        "test_ci_runs_the_command_that_the_readme_gives",
        "test_the_tutorials_are_sessions",
    ],
    "end_to_end/test_run_function.py": [
        "test_results_come_by_rank_and_lines_as_ringrun_prints_them",
        "test_a_rank_that_fails_is_told_by_ringruns_report",
        "test_flags_are_ringruns_and_horovods",
        "test_what_no_job_can_be_made_of_is_refused[",
        "test_a_script_that_is_interrupted_or_killed_leaves_no_rank[2]",
    ],
    "end_to_end/test_shared_memory.py": [
        "test_where_there_is_little_of_it_messages_are_used_and_a_line_says_why[",
        "test_of_a_job_that_ends_nothing_at_all_is_left[",
    ],
    "end_to_end/test_stand_in.py": [
        "test_a_race_in_a_program_fails_it[",
    ],
    "end_to_end/test_torch_distributed.py": [
        "test_mpirun_tells_torch_the_ranks",
    ],
    "examples/test_numpy_examples.py": [
        "test_gradients_of_lenet_are_those_of_finite_differences",
    ],
    "examples/test_train_digits.py": [
        "test_last_line_tells_an_accuracy_of_at_least_97_percent[3]",
        "test_loss_curve_is_that_of_one_rank[3]",
        "test_parameters_are_bit_identical_on_all_ranks[3]",
        "test_script_itself_notices_when_parameters_differ[",
    ],
    "examples/test_train_gpt.py": [
        "test_run_resumed_on_more_ranks_continues_the_same_curve",
    ],
}
"""By file: how the names begin of tests in FOLDERS_OF_JOBS that run always. Each starts jobs, and takes seconds."""
QUICK_NAMES = tuple(f"tests/{file}::{name}" for file, names in QUICK_JOBS.items() for name in names)
FOLDERS_OF_JOBS = ("tests/cluster/", "tests/elastic/", "tests/end_to_end/", "tests/examples/")
GROUPS = {
    "pool": (
        "tests/end_to_end/test_docs.py",
        "tests/examples/",
        "tests/ranks/test_every_world",
        "tests/ranks/test_opening.py",
        "tests/ranks/test_ordered.py",
        "tests/ranks/test_pool.py",
        "tests/ranks/test_random.py",
        "tests/ranks/test_torch_distributed",
    ),
    "jobs": (*FOLDERS_OF_JOBS, "tests/gpu/"),
    "launcher, a to h": tuple(f"tests/launcher/test_{letter}" for letter in "abcdefgh"),
    "launcher, i to z": ("tests/launcher/",),
}
"""Each by one worker, one test after the other: a pool of real ranks is made once, jobs share the cores, and their ends
are timed. These begin first: they wait more than they compute."""


def group(nodeid: str) -> str:
    """The name of a test's group; all others are grouped by their files."""
    return next((name for name, begins in GROUPS.items() if nodeid.startswith(begins)), nodeid.partition("::")[0])


def mark_job(item: pytest.Item) -> None:
    """Mark a test that starts jobs, and all that are neither marked `quick` nor in QUICK_JOBS as extended."""
    in_folder = item.nodeid.startswith(FOLDERS_OF_JOBS)
    if in_folder and not item.get_closest_marker("quick") and not item.nodeid.startswith(QUICK_NAMES):
        item.add_marker(extended)
    if in_folder or {"ringrun", "start"} & set(getattr(item, "fixturenames", ())):
        item.add_marker("jobs")


def check_names(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError for a name in QUICK_JOBS that no test has any more; `items` are all tests."""
    names = [item.nodeid for item in items]
    for known in QUICK_NAMES:
        if not any(name.startswith(known) for name in names):
            raise pytest.UsageError(f"tests/support/tiers.py, QUICK_JOBS: no test's name begins with {known}")
