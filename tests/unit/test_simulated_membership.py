"""Membership of elastic jobs in virtual time: whatever ranks are lost, and when, those that are left go on.

`pytest -m ""` takes more: two losses and an arrival at every point of a job, and every pair of kinds of loss.
"""

import itertools

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.simulated_job import CUTS, FAILS, SOON, Fault, Plan, SimulatedJob, simulation
from tests.support.tiers import parted

KINDS = [*FAILS, "stop", *CUTS]
JOBS = {"3 ranks": Plan(), "2 ranks, 1 spare": Plan(2, 1)}


@pytest.fixture(scope="module", autouse=True)
def _simulation():
    with simulation():
        yield


def one_more(plan, how):
    """The plan with another loss, at each point at which a rank can be lost after those that it has."""
    job = SimulatedJob(plan)
    job.run()
    before = job.actions_at.get(plan.faults[-1].rank) if plan.faults else [0] * plan.size
    lost = {each.rank for each in plan.faults}
    for rank in (set(range(plan.size)) - lost) if before else ():
        for when in range(before[rank] + 1, job.ranks[rank].actions + 1):
            yield plan._replace(faults=[*plan.faults, Fault(rank, when, how)])


def with_arrivals(plan):
    """The plan with hosts that come after each event that ringrun hears."""
    job = SimulatedJob(plan)
    job.run()
    for heard in range(plan.size + 1, job.heard + 1):
        yield plan._replace(arrival=heard)


@st.composite
def plans(draw):
    """Of up to 8 ranks on 3 hosts."""
    np, spares = draw(st.integers(1, 6)), draw(st.integers(0, 2))
    size = np + spares
    fault = st.builds(Fault, st.integers(0, size - 1), st.integers(1, 80), st.sampled_from(KINDS))
    return Plan(
        np,
        spares,
        draw(st.lists(fault, max_size=4)),
        draw(st.none() | st.integers(size + 1, 60)),
        sorted(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))),
        draw(st.integers(1, np)),
        draw(st.none() | st.integers(0, 3)),
        draw(st.lists(st.sampled_from([0, 1, 5, SOON, 200]), max_size=200)),
        report_s=draw(st.sampled_from([0.005, 0.0, 0.1, 3.0])),
    )


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(plans())
# ranks of a host are left out together, though their agents are lost one after the other
@example(Plan(3, 0, [Fault(1, 9, "host")], hosts=[0, 1, 1]))
# a rank that says it lost another blames it, though a new world has worked on one
@example(Plan(3, 0, [Fault(2, 9, "kill"), Fault(0, 17, "blame")], delays=[0] * 33 + [200]))
# found so: a spare that is lost in init() was waited for, for ever
@example(Plan(2, 1, [Fault(2, 1, "kill")]))
# a spare that had met the others, and had no state yet, went on alone when they were lost
@example(Plan(2, 1, [Fault(0, 6, "kill"), Fault(1, 16, "kill")], delays=[0] * 15 + [5]))
# agents that are lost at the very end were not counted out, and the job failed
@example(Plan(2, 1, [Fault(0, 9, "agent"), Fault(2, 6, "agent")]))
# ranks of a host that is lost when others leave: it could not go on, and then again it need not
@example(Plan(4, 2, [Fault(0, 22, "host")], hosts=[0, 0, 1, 2, 2, 2], min_np=4))
# a spare that is lost together with the rank by which the job fails was not named
@example(Plan(2, 1, [Fault(1, 9, "host")], hosts=[0, 1, 1], max_failures=0))
# those that wait for one that has left were too few, though the others had done their work
@example(Plan(5, 0, [Fault(3, 59, "stop"), Fault(1, 22, "stop")], min_np=3, delays=[1], report_s=0.0))
def test_whatever_is_lost_the_others_go_on(plan):
    SimulatedJob(plan).run()


@pytest.mark.parametrize(("how", "step_s"), [("kill", 80.0), ("exit0", 120.0)])
def test_ranks_that_all_compute_for_long_are_healthy(how, step_s):
    """Only one that another waits for is late; where one has ended with 0 there is no hurry at all."""
    plan = Plan(step_s=step_s)
    job = SimulatedJob(plan)
    job.run()
    for rank in job.ranks:
        SimulatedJob(plan._replace(faults=[Fault(rank.number, rank.busy_at, how)])).run()


@pytest.mark.parametrize("start", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize(
    ("first", "second"), parted(itertools.product(KINDS, KINDS), quick=lambda *kinds: kinds == ("kill", "kill"))
)
def test_two_losses_at_every_point(start, first, second):
    for one in one_more(start, first):
        for two in one_more(one, second):
            SimulatedJob(two).run()


@pytest.mark.parametrize("start", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("losses", parted([0, 1, 2], quick=lambda losses: losses < 2))
def test_hosts_that_come_at_every_point(start, losses):
    plans = [start]
    for _ in range(losses):
        plans = [more for plan in plans for more in one_more(plan, "kill")]
    for plan in plans:
        for arrival in with_arrivals(plan):
            SimulatedJob(arrival).run()
