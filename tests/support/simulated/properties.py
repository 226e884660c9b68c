"""What must hold of every simulated job, whatever is lost; AssertionError where it does not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ringrun.connection import wire

from .network import CUTS, FAILED, GONE, HANGS, SOON, STEPS

if TYPE_CHECKING:
    from .job import SimulatedJob
    from .rank import Rank

_NAMED = re.compile(r"^(?:-- ringrun: |failed too  | {12})rank (\d+) ")
_FIRST = re.compile(r"^-- ringrun: rank (\d+) of \d+ failed first")
_CODES = {"kill": 137, "killed": 137, "exit7": 7}  # ringrun's, by the cause


def left_alone(job: SimulatedJob) -> list[Rank]:
    """Those that run and are no idle spares."""
    return [each for each in job.ranks if each.runs and each.number not in job.supervisor._losses.idle]


def check_kill(rank: Rank) -> None:
    """ringrun kills it, before the job ends."""
    if rank.cause in ("stop", "woken"):
        rank.cause = "killed"
    assert not rank.runs or rank.cause == "killed", f"ringrun kills rank {rank.number}, which is healthy"


def check_list(job: SimulatedJob, said: wire.Membership) -> None:
    """Spares take all places. Those of a host that is lost are left out together, unless a message is very late."""
    full = len(said.ranks) == job.plan.np or not job.supervisor._losses.idle
    assert full or job.left, f"list {said.number} has {said.ranks}, while spares wait"
    host_of, of_host = job.plan.host_of, {each.number for each in job.ranks if each.cause == "host"}
    lost = {host_of[rank] for rank in map(int, said.dead) if rank in of_host}
    late = [rank for rank in said.ranks if rank in of_host and host_of[rank] in lost]
    assert not late or max(job.plan.delays, default=0) > SOON, f"list {said.number} has {late}, whose host is lost"


def check_decision_to_end(job: SimulatedJob) -> None:
    """ringrun says that the job cannot go on: nobody who could has to end."""
    plan, why, causes = job.plan, job.why, [each.cause for each in job.ranks]
    idle = job.supervisor._losses.idle if job.left else ()  # the job is about to end, and takes no more
    living = [each for each in job.ranks if each.cause not in GONE and each.number not in idle]
    heard = set(range(plan.np)).union(*job.worked.values())  # of others it is not known whether they have a state
    good = [each.number for each in living if each.has_state and each.number in heard]
    justified = (
        len(living) < plan.min_np
        or not good
        or (plan.max_failures is not None and sum(each in FAILED for each in causes) > plan.max_failures)
        or "before init() returned" in why
        or ("did not catch" in why and "blame" in causes)
        or ("did not continue within" in why and not {"stop", "woken", "killed"}.isdisjoint(causes))
        or ("which ended with exit code 0" in why and "exit0" in causes)
    )
    assert justified, f"{why}, but ranks {good} are healthy"


def check_outcome(job: SimulatedJob) -> None:
    """What ringrun has said, and its exit code, when the job has ended."""
    named = [int(found[1]) for line in job.said if (found := _NAMED.match(line))]
    first = [int(found[1]) for line in job.said if (found := _FIRST.match(line))]
    hung = any(each.how in HANGS for each in job.plan.faults)
    assert job.now_s <= (200 if hung else 10) + 4 * STEPS * job.plan.step_s, f"it took {job.now_s:.0f} s"
    failed = {each.number for each in job.ranks if each.cause in FAILED}
    assert set(named) <= failed, f"ranks {named} are named, and {sorted(failed)} have failed"
    heard = failed & job.supervisor._ranks.ends.keys()
    if job.supervisor.scales_up:
        heard &= _gone(job, job.worked)  # others may be lost while the job ends
    assert heard <= set(named), f"ranks {named} are named, and {sorted(heard)} have failed"
    if job.supervisor.scales_up:
        assert len(set(named)) == len(named), f"ranks {named}: one is named twice"
        assert job.supervisor.keeps_commits, "the next attempt has no commits"
        assert (job.code, first, job.why) == (1, [], ""), "it failed, though it is only started again"
        assert not job.still or job.plan.arrival is not None, "no hosts have come"
    elif job.code == 0:
        assert len(set(named)) == len(named), f"ranks {named}: one is named twice"
        assert (first, job.why) == ([], ""), "it failed, but its exit code is 0"
        assert not left_alone(job), f"ranks {[each.number for each in left_alone(job)]} were left alone"
        _check_results(job)
    elif "which ended with exit code 0" not in job.why:
        assert len(first) == 1, f"no cause is named: {job.said}"
        _check_cause(job, job.ranks[first[0]])


def _check_results(job: SimulatedJob) -> None:
    """Those that have finished have trained equally, and with the same ranks, but perhaps in the last step."""
    done = [each.finished for each in job.ranks if each.finished]
    assert done or any(each.cause == "exit0" for each in job.ranks), "nobody has finished"
    for number, history in done:
        assert len(history) == STEPS, f"a rank ends with {history}"
        assert history[:-1] == done[0][1][:-1], f"ranks end with {done}"
        assert all(other == history for world, other in done if world == number), f"ranks end with {done}"


def _gone(job: SimulatedJob, numbers: object) -> set[int]:
    """Those without which these lists were made."""
    return {int(rank) for number in numbers for rank in job.lists[number].dead}


def _check_cause(job: SimulatedJob, first: Rank) -> None:
    """The rank by which the job fails is the one that failed first, of those without which it has not gone on."""
    code = _CODES.get(first.cause, 1)
    assert job.code == code, f"the exit code is {job.code}, and rank {first.number} ended by {first.cause}"
    blamed = "did not catch" in job.why
    works = job.worked
    if blamed or "did not continue within" in job.why:  # then a list must work on all that are in it
        works = [number for number, ranks in job.worked.items() if ranks >= set(job.lists[number].ranks)]
    excused = _gone(job, works)
    assert first.number not in excused, f"rank {first.number} is the cause, without which the job had gone on"
    failed = [each for each in job.ranks if each.cause in FAILED and each.number not in excused]
    if "before init() returned" not in job.why:  # without idle spares
        members = {rank for said in job.lists.values() for rank in said.ranks}
        failed = [each for each in failed if each.number in members]
    if not blamed:
        earliest = min(failed, key=lambda each: (each.cause not in CUTS, each.died_s))
        is_first = earliest is first or earliest.died_s >= first.died_s
        assert is_first, f"rank {first.number} is the cause, and rank {earliest.number} failed earlier"
    elif first.cause == "blame":
        others = [each.number for each in failed if each.cause != "blame"]
        assert not others, f"rank {first.number} is the cause, which blames {others}"
