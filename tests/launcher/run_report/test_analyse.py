"""Who keeps whom waiting, and why: of jobs in virtual time, of which the truth is known."""

import re
from collections import deque

import pytest

from ringrun.run_report import analyse
from ringrun.run_report.causes import host_names, links
from ringrun.run_report.collect import Rank
from ringrun.run_report.document import document
from tests.support.loops import in_a_loop
from tests.support.made_steps import STEPS, MadeJob


def late(by_rank, *, bucket=0):
    """These ranks are late by so many seconds in each step."""
    return lambda rank, step, at: by_rank.get(rank, 0.0) * (at == bucket)


def at_line(line, samples=200, rank=2):
    """The rank was found at this line of its script when others computed: 18 % of its time."""
    return lambda each: {"lines": {"train.py:7": 900, line: samples}} if each == rank else {}


def waits_for_core(seconds):
    return lambda rank: {"core_wait_s": seconds * (STEPS - 1) * (rank == 2) + 0.01}


def ring(slow_s, usual_s=0.002):
    """Each rank of six sends a megabyte to the next in each step; from rank 3 to rank 4 that takes long."""

    def totals(rank):
        seconds = (slow_s if rank == 3 else usual_s) * (STEPS - 1)
        return {"sent": {str((rank + 1) % 6): 1e6 * (STEPS - 1)}, "send_s": {str((rank + 1) % 6): seconds}}

    return totals


LONGER = "computes longer"
BOTH = [(LONGER, 20, "rank 3"), (LONGER, 15, "rank 1")]
LOADER = "train.py:5 (data loader)"


def after(rank, _, bucket):
    return {(3, 0): 0.02, (1, 2): 0.015}.get((rank, bucket), 0.0)


def now_and_then(rank, step, bucket):
    return 0.08 * (rank == 1 and bucket == 0 and step % 4 == 0)


def at_loader_for_core(rank):
    return at_line(LOADER)(rank) | waits_for_core(0.011)(rank)


def far(host):
    return 4321.5 * host


def slow_host(rank):
    """All links wait for those of host 2, and are used for 10 ms a step; but the first one could carry more."""
    return {"sent": {str((rank + 1) % 3): 1e6 * (STEPS - 1)}, "send_s": {str((rank + 1) % 3): 0.01 * (STEPS - 1)}}


def under_way(rank):
    """Its first message, which has not been sent yet."""
    return {"sent": {str((rank + 1) % 3): 1000 * (1 + rank)}, "send_s": {}}


CAN_CARRY = [(0, 1, 4e8), (1, 0, 1e9), (0, 2, 1e9), (2, 0, 1.05e8), (1, 2, 1.1e8), (2, 1, 1e9)]
SLOW_LINKS = [
    ("slow link", 10 * (1 - each / 1e9), f"link from {pair}")
    for pair, each in (("h2 to h0", 1.05e8), ("h1 to h2", 1.1e8))
]
FOUND = [
    ("nobody", MadeJob(4), []),
    ("nobody, with the first messages under way", MadeJob(3, hosts=3, totals=under_way), []),
    ("of two", MadeJob(2, late({1: 0.02})), [(LONGER, 20, "rank 1")]),
    ("of two, in the last bucket", MadeJob(2, late({0: 0.02}, bucket=3)), [(LONGER, 20, "rank 0")]),
    ("after its results", MadeJob(3, late({2: 0.02}, bucket=4)), [(LONGER, 20, "rank 2")]),
    ("in all parts", MadeJob(3, lambda rank, *_: 0.004 * (rank == 1)), [(LONGER, 20, "rank 1")]),
    ("each fourth step", MadeJob(3, now_and_then), [(LONGER, 80 * 5 / 20, "rank 1")]),
    ("a checkpoint", MadeJob(3, lambda rank, step, at: 1.0 * (rank == 0 and (step, at) == (9, 0))), []),
    ("two in one bucket", MadeJob(4, late({3: 0.02, 1: 0.015})), BOTH),
    ("two, one after the other", MadeJob(4, after), BOTH),
    ("while others communicate", MadeJob(3, late({1: 0.02}), moves_s=0.15), [(LONGER, 20, "rank 1")]),
    ("clocks", MadeJob(4, late({3: 0.02}), hosts=2, ahead=far), [(LONGER, 20, "rank 3 (host h1)")]),
    ("clocks that run apart", MadeJob(4, late({1: 0.02}), hosts=2, drift=far), [(LONGER, 20, "rank 1 (host h0)")]),
    ("host", MadeJob(4, late({2: 0.021, 3: 0.02}), hosts=2), [("slow host", 20, "host h1")]),
    ("most ranks on it", MadeJob(5, late({0: 0.02, 1: 0.02, 2: 0.02}), hosts=2), [("slow host", 20, "host h0")]),
    ("line", MadeJob(4, late({2: 0.02}), totals=at_line("train.py:41")), [(LONGER, 20, "rank 2")]),
    ("data loader", MadeJob(4, late({2: 0.02}), totals=at_line(LOADER)), [("data loader", 20, "rank 2")]),
    ("less than half of it", MadeJob(4, late({2: 0.02}), totals=at_line(LOADER, 60)), [(LONGER, 20, "rank 2")]),
    ("core", MadeJob(4, late({2: 0.02}), totals=waits_for_core(0.018)), [("core shared", 20, "rank 2")]),
    ("core and loader", MadeJob(4, late({2: 0.02}), totals=at_loader_for_core), [("core shared", 20, "rank 2")]),
    ("link", MadeJob(6, hosts=3, moves_s=0.1, totals=ring(0.010)), [("slow link", 8, "link from h1 to h2")]),
    ("a host's links", MadeJob(3, hosts=3, moves_s=0.1, totals=slow_host), SLOW_LINKS),
    ("a link that carries more than half", MadeJob(6, hosts=3, moves_s=0.1, totals=ring(0.0038)), []),
]


@in_a_loop("sync", [False, True])
@in_a_loop(("name", "job", "expected"), FOUND)
def test_each_straggler_is_named_with_its_kind_and_delay(name, job, expected, sync):
    job.sync, job.steps = sync, []
    collector = job.collected()
    collector.ranks[0].about["links"] = [[*link] for link in CAN_CARRY] if job.totals is slow_host else []
    report = document(collector)
    found = report["stragglers"]
    assert [(each["kind"], each["who"]) for each in found] == [(kind, who) for kind, _, who in expected]
    assert all(each["saves_ms"] <= max(one["delay_ms"] for one in found) for each in report["advice"])
    named = re.findall("waiting for (?:.* for )?(.*)", report["sentence"])
    assert {*named} <= {"other ranks", *(who for _, _, who in expected)}
    for each, (_, delay_ms, _) in zip(found, expected, strict=True):
        assert each["delay_ms"] == pytest.approx(delay_ms, rel=0.1)


@pytest.mark.parametrize("clocks", [{"ahead": far}, {"drift": far}, {"ahead": far, "drift": lambda host: -0.7 * host}])
def test_waits_are_split_whatever_the_clocks_of_hosts(clocks):
    found = document(MadeJob(4, late({1: 0.02}), hosts=2, **clocks).collected())
    for each in found["ranks"]:
        assert each["waiting_ms"] == pytest.approx(0 if each["rank"] == 1 else 20, abs=1)


def test_a_rank_is_not_late_since_it_waited_for_another_one_in_a_smaller_process_set():
    """Ranks 0 and 1 reduce "pair" before all three reduce "all", and rank 1 keeps rank 0 waiting there."""

    def step(number, rank):
        begin_s = 100.0 * number
        pair_s = begin_s + (30 if rank == 1 else 10)
        pair = ["pair (set 1)", "allreduce", 8, pair_s, begin_s + 30, begin_s + 30, begin_s + 31, "ring"]
        all_s = begin_s + (41 if rank < 2 else 20)
        end = ["all", "allreduce", 8, all_s, begin_s + 41, begin_s + 41, begin_s + 42, "ring"]
        waits = [["pair (set 1)", pair_s, begin_s + 31]] * (rank < 2) + [["all", all_s, begin_s + 42]]
        operations = [pair] * (rank < 2) + [end]
        return {"number": number, "from_s": begin_s, "to_s": begin_s + 100, "operations": operations, "waits": waits}

    said = {rank: [step(number, rank) for number in range(1, 5)] for rank in range(3)}
    found = analyse.delays(analyse.gains(analyse.in_common(said, dict.fromkeys(said, 0.0))))
    assert found[1] == pytest.approx(20)
    assert found[0] == found[2] == 0


# of steps that are made by hand: an operation is its name, kind, and when it was submitted, ready and ended


def sent(number, operations, waits, from_s=0.0, to_s=10.0):
    made = [
        [name, kind, 8, begun_s, ready_s, ready_s, end_s, "ring"] for name, kind, begun_s, ready_s, end_s in operations
    ]
    return {"number": number, "from_s": from_s, "to_s": to_s, "operations": made, "waits": waits}


def of_ranks(*said):
    """One step, by rank."""
    return {rank: analyse.parsed(each, 0.0) for rank, each in enumerate(said)}


def test_what_threads_wait_for_at_a_time_counts_once():
    waits = [["b", 3, 4.5], ["a", 1.5, 5], ["b", 4, 6], ["a", 8, 9]]
    operations = [("a", "allreduce", 1, 2, 5), ("b", "allreduce", 3, 4, 6), ("a", "allreduce", 7, 8, 9)]
    found = analyse.parsed(sent(1, operations, waits), 0.0)
    assert found.waits == [(("a", 0), 1.5, 5), (("b", 0), 5, 6), (("a", 1), 8, 9)]
    assert list(found.operations) == [("a", 0), ("b", 0), ("a", 1)]


def test_steps_that_all_have_sent_are_compared_but_for_the_first():
    said = {0: [sent(number, [], []) for number in (0, 1, 2, 3)], 1: [sent(number, [], []) for number in (0, 1, 3)]}
    found = analyse.in_common(said, {0: 0.0, 1: 0.0})
    assert {number: sorted(by_rank) for number, by_rank in found.items()} == {1: [0, 1], 3: [0, 1]}
    assert list(analyse.in_common({0: [sent(0, [], [])]}, {0: 0.0})) == [0], "there is no other"


def test_a_wait_is_for_the_last_rank_until_it_submits_and_what_moves_meanwhile_is_not_hidden():
    """Rank 0 submits "a" at 2, rank 1 at 5; "b" and "c" move from 1 to 3."""
    before = [("b", "allreduce", 0.5, 1, 3), ("c", "allreduce", 0.5, 1.5, 2)]
    by_rank = of_ranks(
        sent(1, [*before, ("a", "allreduce", 2, 5, 7)], [["a", 2, 7]]),
        sent(1, [*before, ("a", "allreduce", 5, 5, 7)], [["a", 5, 7]]),
    )
    found = analyse.shares([by_rank, by_rank])
    assert [found[rank].waiting[1] for rank in (0, 1)] == [3, 0]
    assert [found[rank].exposed_s for rank in (0, 1)] == [2, 2]
    assert [found[rank].computing_s for rank in (0, 1)] == [5, 8]
    assert [found[rank].hidden_s for rank in (0, 1)] == [1, 2], "from 1 to 2, and from 1 to 3"


@pytest.mark.parametrize(("kind", "ahead_s"), [("allreduce", -5), ("broadcast", 0)])
def test_clocks_are_wrong_where_a_sum_seems_to_end_before_all_have_submitted(kind, ahead_s):
    """A broadcast's root may have ended before others have begun."""
    always = [("sum", "allreduce", 1, 3, 4)] * (kind == "broadcast")
    by_rank = of_ranks(
        sent(1, [*always, ("x", kind, 1, 2, 3)], []),
        sent(1, [*always, ("x", kind, 5, 7, 8)], []),
    )
    assert analyse.behind(1, [by_rank]) == ahead_s


# links between hosts


def linked(places, **totals):
    """Ranks by their number at the start: host, its number, and the number in this world; each has sent the same."""
    return {
        origin: Rank(deque(), {"rank": rank, "host": host, "host_number": number}, {"step": 4, **totals})
        for origin, (host, number, rank) in places.items()
    }


def test_containers_of_one_name_get_their_hosts_number():
    ranks = linked({0: ("c", 0, 0), 1: ("c", 1, 1), 2: ("d", 2, 2)})
    assert host_names(ranks) == {0: "c #0", 1: "c #1", 2: "d"}


def test_links_go_between_hosts_to_the_ranks_of_this_world():
    """Rank 1 of the start is lost, so that rank 1 is now on another host."""
    ranks = linked(
        {0: ("a", 0, 0), 2: ("b", 1, 1), 3: ("b", 1, 2)}, sent={"1": 400, "2": 80}, send_s={"1": 2.0, "2": 0.5}
    )
    ranks[0].about["links"] = [[0, 1, 100.0]]
    found = links(ranks)
    assert [pair for pair, link in found.items() if link.nbytes] == [("a", "b")]
    link = found["a", "b"]
    assert (link.nbytes, link.busy_s, link.most_s, link.rate) == (480, 2.5, 0.5, 192)
    assert link.share == 1, "no link carries more than it can: what was measured is too low"
