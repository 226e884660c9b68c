"""Membership of elastic jobs in virtual time: whatever ranks are lost, and when, those that are left go on.

Of 3 ranks two that die, and hosts that arrive, each at every point; `pytest -m ""` takes every pair of kinds of loss.
"""

import itertools
import os

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.simulated.job import SimulatedJob, simulation
from tests.support.simulated.network import CUTS, FAILS, SOON, Fault, Plan

KINDS = [*FAILS, "stop", *CUTS]
WITH_SPARE = Plan(2, 1)
PARTS = 24
"""Of a minute's work, of which one is quick."""
starts = pytest.mark.parametrize("start", [Plan(), WITH_SPARE], ids=["3 ranks", "2 ranks, 1 spare"])


@pytest.fixture(scope="module", autouse=True)
def _simulation():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})  # threads that take turns are quicker on one
    with simulation():
        yield
    os.sched_setaffinity(0, cores)


def run_all(plan, kinds, part=0, parts=1):
    """Run it, and with things of all these kinds, in any order, each at every point; first with some of those."""
    job = SimulatedJob(plan)
    job.run()
    after = [(more, kind) for kind in dict.fromkeys(kinds) for more in job.one_more(kind)]
    for more, kind in after[part::parts]:
        rest = list(kinds)
        rest.remove(kind)
        run_all(more, rest)


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
# storms found: a spare that comes when the others leave was left to train alone
@example(Plan(2, 1, [Fault(1, 10, "kill")]))
# a failure soon after a loss was blamed on that loss
@example(Plan(3, 0, [Fault(2, 4, "kill"), Fault(0, 22, "exit7")], max_failures=1))
# ranks of a host are left out together, though their agents are lost one after the other
@example(Plan(3, 0, [Fault(1, 9, "host")], hosts=[0, 1, 1]))
# a rank that says it lost another blames it, though a new world has worked on one
@example(Plan(3, 0, [Fault(2, 9, "kill"), Fault(0, 17, "blame")], delays=[0] * 33 + [200]))
# found so: a spare that is lost in init() was waited for, for ever
@example(Plan(2, 1, [Fault(2, 1, "kill")]))
# a spare that had met the others, and had no state yet, went on alone when they were lost
@example(Plan(2, 1, [Fault(0, 6, "kill"), Fault(1, 17, "kill")], delays=[0] * 15 + [5]))
# agents that are lost at the very end were not counted out, and the job failed
@example(Plan(2, 1, [Fault(0, 9, "agent"), Fault(2, 6, "agent")]))
# ranks of a host that is lost when others leave: it could not go on, and then again it need not
@example(Plan(4, 2, [Fault(0, 22, "host")], hosts=[0, 0, 1, 2, 2, 2], min_np=4))
# a spare that is lost together with the rank by which the job fails was not named
@example(Plan(2, 1, [Fault(1, 9, "host")], hosts=[0, 1, 1], max_failures=0))
# those that wait for one that has left were too few, though the others had done their work
@example(Plan(5, 0, [Fault(3, 59, "stop"), Fault(1, 22, "stop")], min_np=3, delays=[1], report_s=0.0))
# a rank that was stopped was killed in the moment in which it was woken, and the spare was left without a state
@example(Plan(2, 1, [Fault(0, 9, "stop"), Fault(1, 10, "exit0")]))
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


@starts
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_at_every_point(start, kind):
    run_all(start, [kind])


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.adapters) for part in range(1, PARTS))])
def test_two_deaths_and_an_arrival_at_every_point(part):
    run_all(Plan(), ["kill", "kill", "hosts"], part, PARTS)


@pytest.mark.parametrize("kinds", [["kill", "kill"], ["kill", "hosts"]], ids="-".join)
def test_a_spare_beside_deaths_and_an_arrival_at_every_point(kinds):
    run_all(WITH_SPARE, kinds)


@pytest.mark.extended
@starts
@pytest.mark.parametrize("kinds", [*itertools.combinations_with_replacement(KINDS, 2)], ids="-".join)
def test_two_losses_at_every_point(start, kinds):
    run_all(start, kinds)


@pytest.mark.extended
def test_a_spare_beside_two_deaths_and_an_arrival_at_every_point():
    run_all(WITH_SPARE, ["kill", "kill", "hosts"])
