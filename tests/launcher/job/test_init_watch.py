"""Ranks that wait in ringreduce.init() for ranks that do not come: when that is reported, and when it ends the job."""

import math
import threading

import pytest

from ringrun.connection.wire import Answer, Ask, InInit, Initialized, Left, Stalled
from ringrun.elastic import Elastic
from ringrun.job.events import Reported
from ringrun.job.init_watch import InitWatch
from ringrun.job.plan import Job
from ringrun.job.supervise import Supervisor
from tests.launcher.job.test_supervise import Fake, arrived, ended, queue_of
from tests.support.loops import in_a_loop


def test_a_rank_that_is_late_is_reported_once_and_its_end_again():
    watch = InitWatch(3)
    assert watch.due_s == math.inf
    watch.wait(0, 10.0, now_s=100.0)
    watch.wait(2, 10.0, now_s=105.0)
    assert watch.due_s == 110.0
    assert watch.absent(ended=[]) == ({1}, set())
    watch.ended(2, 1, now_s=150.0)
    assert watch.due_s == math.inf, "it is reported once, whoever else ends"
    watch.ended(1, 0, now_s=200.0)
    assert watch.due_s == 210.0, "the others have time to say that they went on without it"
    assert watch.absent(ended=[1]) == (set(), {1})


def test_nothing_is_reported_once_all_go_on():
    watch = InitWatch(2)
    for rank in (0, 1):
        watch.wait(rank, 10.0, now_s=100.0)
    for rank in (1, 0):
        watch.done(rank)
    assert watch.due_s == math.inf
    watch.ended(1, 1, now_s=101.0)
    watch.ended(0, None, now_s=102.0)
    assert watch.due_s == watch.ask_s == math.inf


def test_a_rank_that_dies_in_init_waits_no_more():
    watch = InitWatch(2)
    watch.wait(0, 10.0, now_s=100.0)
    watch.ended(0, -9, now_s=101.0)
    assert watch.waiting == set()


def test_ranks_are_asked_each_second_once_one_waits_and_more_and_more_rarely_before():
    watch = InitWatch(2)
    watch.done(1)
    watch.ended(1, 0, now_s=100.0)
    assert watch.ask_s == 100.0
    busy, first, other = (Answer(1, doing, "", "", doing != "train.py:7") for doing in ("train.py:7", "a", "b"))
    asked = [(watch.answer({0: answer}, 0.0), watch.ask_s) for answer in (busy, busy, first, other, other)]
    assert asked == [(set(), 2.0), (set(), 4.0), (set(), 1.0), (set(), 1.0), ({0}, 1.0)]


class Answering(Fake):
    """Agents whose ranks say at once where they are, and end by the signal that they are sent."""

    def __init__(self, *events):
        super().__init__()
        self.events = queue_of(*events)
        self.ends_all = ()
        self.waits = False  # in a collective

    def send(self, rank, message):
        if isinstance(message, Ask):
            self.events.put(Reported(rank, Answer(message.number, f"train.py:{rank}", "", "", self.waits)))

    def broadcast(self, message):
        for rank in self.ends_all:
            self.events.put(ended(rank, -message.number, sent=(message.number,)))

    def supervisor(self, job):
        return Supervisor(job, self, self, self, self.events)


@pytest.mark.parametrize("command", [["python", "train.py"], ["python", "-"]])
def test_a_rank_that_has_ended_without_init_ends_the_job(command):
    fake = Answering(*arrived(0, 1, 2), Reported(0, InInit(0.05)), Reported(2, InInit(0.05)), ended(1))
    fake.ends_all = (0, 2)
    supervisor = fake.supervisor(Job(3, command))
    assert supervisor.run() == 1
    assert not supervisor.failed, "to run it again would end in the same way"
    assert fake.said[:3] == [
        "ringrun: rank 1 of 3 ended with exit code 0 without calling init(), where ranks 0,2 were waiting for all "
        "ranks, so the job was ended:",
        "rank 0: train.py:0",
        "rank 2: train.py:2",
    ]
    advice = ["only rank 0 reads ringrun's stdin; a script for all ranks must be in a file"]
    assert fake.said[3:] == advice * (command[1] == "-")


@in_a_loop("what", ["stalls", "waits", "leaves", "is elastic"])
def test_a_rank_that_ends_with_0_in_the_middle_ends_the_job_when_another_waits(what):
    """As by os._exit(0). One that has left its world, as another may stall, ends nothing, nor does an elastic job's."""
    leaving = [Reported(1, Left("it called shutdown()"))] * (what == "leaves")
    stalling = [Reported(0, Stalled("rank 1 is mute"))] * (what in ("stalls", "leaves"))
    going_on = [Reported(rank, Initialized()) for rank in (0, 1)]
    fake = Answering(*arrived(0, 1), *going_on, *leaving, ended(1), *stalling)
    fake.waits, goes_on = what != "stalls", what in ("leaves", "is elastic")
    fake.ends_all = () if goes_on else (0,)
    if goes_on:  # after it was asked twice
        threading.Timer(1.5, fake.events.put, [ended(0)]).start()
    supervisor = fake.supervisor(Job(2, ["x"], elastic=Elastic() if what == "is elastic" else None))
    assert supervisor.run() == (0 if goes_on else 1)
    assert supervisor.failed is not goes_on
    if not goes_on:
        text = (
            "rank 1 of 2 ended with exit code 0 in mid-training (as os._exit(0) does) while rank 0 was waiting for it"
        )
        assert fake.said == [f"ringrun: {text}, so the job was ended:", "rank 0: train.py:0"]


def test_a_rank_that_is_late_is_named_with_its_line_and_the_job_goes_on():
    fake = Answering(*arrived(0, 1), Reported(0, InInit(0.05)))
    going_on = [Reported(rank, Initialized()) for rank in (0, 1)]

    def message(lines):
        fake.said += lines
        for event in (Reported(1, InInit(0.05)), *going_on, ended(0), ended(1)):
            fake.events.put(event)

    fake.message = message
    assert fake.supervisor(Job(2, ["x"])).run() == 0
    assert fake.said == [
        "ringrun: rank 0 waited 0.05 s in init() for rank 1 of 2, which did not call it:",
        "rank 1: train.py:1",
    ]
