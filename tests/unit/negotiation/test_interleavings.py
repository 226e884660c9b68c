"""Any interleaving of what ranks call, what the coordinators decide and when that arrives: all ranks run the same.

Each example is a job of whole engines in one thread; see support/stepped_job.py, which has the properties.
"""

import functools
import math

import pytest
from hypothesis import HealthCheck, Phase, example, given, note, settings
from hypothesis import strategies as st

from ringreduce.negotiation import leader
from ringreduce.negotiation.leader import FAN_OUT
from ringreduce.transport import counters
from ringreduce.transport.counters import LOG
from tests.support.stepped_job import Call, Step, SteppedJob

HOSTS = st.lists(st.integers(0, 2), min_size=1, max_size=4)
CALLS = st.sampled_from(["end", *30 * ["sum"], *5 * ["barrier"], *4 * ["add"], *4 * ["remove"], "join"])
NAMES, WAITS = st.sampled_from([None, "a", "b", "c"]), st.sampled_from([False] * 3 + [True])
ODD, EARLY = st.sampled_from([None] * 8 + ["missing", "other"]), st.sampled_from([False] * 9 + [True])
ANY = st.integers(0, 999)
FENCES = 24
LOGS = st.sampled_from([1, 2, LOG])
STEPS = 80  # of a schedule, as a rule


@st.composite
def programs(draw, size):
    """What each rank calls: the same, but for what one rank calls otherwise or not at all, and where it leaves."""
    sets, found, added = {0: tuple(range(size))}, [[] for _ in range(size)], 0
    while (kind := draw(CALLS)) != "end":
        number, odd, other = list(sets)[-1 - draw(ANY) % len(sets)] if len(sets) > 1 else 0, None, -1
        if kind == "add":
            added, subset = added + 1, draw(ANY)
            ranks = tuple(rank for rank in range(size) if not subset >> rank & 1) or (0,)
            call, number, sets[added] = Call("add", number=added, ranks=ranks), 0, ranks
        elif kind == "remove":
            if number == 0:
                continue
            call, number = Call("remove", number=number), 0
            del sets[call.number]
        elif kind == "join":
            call = Call("join", process_set=number)
        else:
            call = Call(kind, draw(NAMES) if kind == "sum" else None, number, waits=draw(WAITS))
            odd, other = draw(ODD), draw(ANY) % size
        for rank in sets[number]:
            if rank != other or (odd != "other" and call.name is None):  # else all later unnamed calls would not meet
                found[rank].append(call)
            elif odd != "missing":
                found[rank].append(call._replace(kind="sum", length=2 if odd else 1))
    for calls in found:
        early = draw(EARLY)
        if early:
            del calls[draw(ANY) % (len(calls) + 1) :]
        calls.append(Call("leave_now" if early else "leave"))
    return found


@functools.cache
def steps(size):
    """The steps that a job of so many ranks may take, as often as they are likely; and None, the schedule's end."""
    ranks = range(size)
    found = [Step("poll", rank) for rank in ranks] * 24
    found += [Step("call", rank, which) for rank in ranks for which in (0, 0, 0, 1, 2, 3)] * 4
    found += [Step("arrive", rank, which) for rank in ranks for which in (0, 0, 1, 2)] * 6
    found += [Step("late", rank) for rank in ranks] * 2
    others = [(rank, other) for rank in ranks for other in ranks if rank != other]
    found += [Step("poll", rank, fence=fence, other=other) for fence in range(FENCES) for rank, other in others]
    return st.sampled_from([None] * (len(found) // STEPS) + found)


@st.composite
def jobs(draw):
    """Its hosts, what its ranks call, and the first steps."""
    hosts = draw(HOSTS)
    return hosts, draw(programs(len(hosts))), list(iter(lambda: draw(steps(len(hosts))), None))


AGAIN = [Call("add", number=1, ranks=(0, 1)), *2 * [Call("sum", "a", 1)], Call("remove", number=1)]
AGAIN += [Call("add", number=2, ranks=(0, 1)), Call("sum", "a", 2)]  # in the memory of the one before

ADD = Call("add", number=1, ranks=(0, 1))
LEAVES = [[ADD, Call("leave")], [ADD, Call("leave_now")]]  # before the set is added
THEN = [Step("call", 0), Step("poll", 0), Step("call", 1), Step("call", 1), Step("poll", 1)]
THEN += [Step("arrive", 0), Step("arrive", 0), Step("poll", 0)]
C = Call("sum", "c")
STUCK = [[ADD, C, C, Call("sum", "a", 1)], [ADD, C, C, Call("sum", "b", 1)], [ADD, C]]  # two wait in their own set


@settings(suppress_health_check=list(HealthCheck), deadline=None, phases=set(Phase) - {Phase.explain})
@given(jobs(), st.integers(0, 6), st.sampled_from([0.0, math.inf]), st.sampled_from([1, FAN_OUT]), LOGS)
# found so: what a rank forgot was reported to the coordinator's when that had ended
@example(([0, 1], [[Call("barrier"), Call("add", number=1, ranks=(0, 1)), Call("leave")]] * 2, []), 1, 0.0, 1, LOG)
@example(([0, 0], [[*AGAIN, Call("leave")]] * 2, []), 1, 0.0, 1, LOG)
@example(([0, 0], [[*AGAIN, Call("leave")]] * 2, []), 1, 0.0, 1, 2)
@example(([0, 1], LEAVES, THEN), 1, 0.0, 1, LOG)
# a leader reported for ever what had waited in a set that a rank left
@example(([0, 1, 0], [[*calls, Call("leave")] for calls in STUCK], []), 4, 0.0, 1, LOG)
def test_every_call_ends_alike_on_all_ranks_as_it_should(job, capacity, overdue_s, fan_out, log):
    """fan_out: of the tree of leaders;  overdue_s: infinite: what differs is found however long ranks may be late.

    log: how many ids a member's log holds: a leader that lags finds it overwritten.
    """
    hosts, calls, schedule = job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "FAN_OUT", fan_out)
        for module in (leader, counters):
            patch.setattr(module, "LOG", log)
        running = SteppedJob(hosts, calls, capacity, overdue_s)
        try:
            running.run(schedule)
        except BaseException:
            note("\n".join(running.story))
            raise
