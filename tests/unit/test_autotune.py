"""Tuning without ranks: the search, what is tried, where steps of training begin, and the file."""

import json
import random
from types import SimpleNamespace

import pytest

from ringreduce.collectives.choose import Constants
from ringreduce.engine import search, tuned
from ringreduce.engine.description import Description
from ringreduce.engine.knobs import Knobs, candidates
from ringreduce.engine.letters import Response
from ringreduce.engine.search import Search
from ringreduce.engine.tuner import MOST_STEPS, WARM_UP_STEPS, Tuner
from ringreduce.settings import Settings
from ringreduce.world import World

pytestmark = pytest.mark.usefixtures("log_as_after_init")

MIB = 1 << 20
ONE_HOST, TWO_HOSTS = (0, 0, 0, 0), (0, 0, 1, 1)


# The search


def searched(costs, noise=0.0, seed=0, drift=0.0):
    """The search's answer where candidate k costs costs[k], and how many samples it took."""
    random_ = random.Random(seed)
    found, taken = Search(len(costs)), 0
    while not found.ended:
        slower = 10 if random_.random() < 0.1 and noise else 1  # somebody else had the core
        found.record(costs[found.current] * slower * (1 + noise * random_.random()) * (1 + drift * taken))
        taken += 1
    return found.best, taken


@pytest.mark.parametrize("count", range(1, 25))
def test_the_cheapest_is_found_wherever_it_is(count):
    for cheapest in range(count):
        costs = [2.0 + (k * 7 % count) / count for k in range(count)]
        costs[cheapest] = 1.0
        best, taken = searched(costs)
        assert best == cheapest
        assert taken <= 10 * search.SAMPLES_PER_TURN * (count + 1)


@pytest.mark.parametrize("drift", [0.0, 0.002])
def test_noise_and_drift_do_not_decide(drift):
    costs = [1.5, 1.4, 3.0, 1.0, 1.3, 2.0, 1.8, 1.6, 5.0, 1.7, 1.45]
    found = [searched(costs, noise=0.1, seed=seed, drift=drift)[0] for seed in range(200)]
    assert found.count(3) > 190
    assert found.count(3) + found.count(0) > 198  # in doubt the default


@pytest.mark.parametrize("seed", range(20))
def test_the_default_stays_where_nothing_is_clearly_faster(seed):
    assert searched([1.0] * 9, noise=0.02, seed=seed)[0] == 0
    assert searched([1.0, 0.98, 0.99, 1.2])[0] == 0
    assert searched([1.0, 0.96, 0.99, 1.2])[0] == 1


# What is tried


MESSAGES = ["ring", "direct", "doubling"]


def test_one_host_tries_the_slots_of_shared_memory():
    for constants in (Constants(), Constants(message_gbs=100.0)):
        tried = candidates(Settings(), [*MESSAGES, "shared"], ONE_HOST, 100 * MIB, constants)
        assert tried[0] == Knobs.of(Settings())
        assert [each.shared_slot_bytes for each in tried] == [MIB, MIB // 2, MIB // 4, MIB // 8, MIB // 16]
        assert {each._replace(shared_slot_bytes=MIB) for each in tried} == {tried[0]}


def test_what_the_cost_model_does_not_think_hopeless_is_tried():
    hosts = (0, 1, 2, 3)
    for nbytes in (100 * MIB, 10000):
        tried = candidates(Settings(), [*MESSAGES, "mpi"], hosts, nbytes, Constants())
        assert tried[0] == Knobs.of(Settings())
        assert {each.algorithm for each in tried} == {"auto", "direct"}
        assert len(set(tried)) == len(tried) <= 25
    slow_messages = Constants(message_us=1e6)  # to send to all others at a time is hopeless
    assert {each.algorithm for each in candidates(Settings(), MESSAGES, hosts, 10000, slow_messages)} == {"auto"}
    many = candidates(Settings(), MESSAGES, tuple(range(100)), 1000 * MIB, Constants())
    assert "direct" not in {each.algorithm for each in many}


def test_two_hosts_with_two_ranks_each_try_memory_and_messages():
    tried = candidates(Settings(), [*MESSAGES, "hierarchical"], TWO_HOSTS, 100 * MIB, Constants())
    assert tried[0] == Knobs.of(Settings())
    by_memory = [each for each in tried if each.shared_slot_bytes != MIB]
    by_messages = [each for each in tried if each.fusion_slot_bytes != 2 * MIB]
    assert by_memory
    assert by_messages
    assert not set(by_memory) & set(by_messages)
    assert {each.algorithm for each in by_memory} != {each.algorithm for each in by_messages}


def test_no_more_slots_in_flight_than_the_fusion_buffer_has_room_for():
    few = Settings(algorithm="ring", fusion_buffer_bytes=16 * MIB, fusion_slot_bytes=2 * MIB)
    more = Settings(algorithm="ring", fusion_buffer_bytes=32 * MIB, fusion_slot_bytes=2 * MIB)
    for settings, widths in ((few, {1, 2}), (more, {1, 2, 3})):
        tried = candidates(settings, ["ring"], (0, 1), 8 * MIB, Constants())
        assert {each.slots_in_flight for each in tried} == widths
        assert {each.fusion_slot_bytes for each in tried} == {2 * MIB, MIB, MIB // 2, MIB // 4}
        assert {each.algorithm for each in tried} == {"auto"}


@pytest.mark.parametrize(("asked", "shared_slots", "message_slots"), [("shared", 5, 1), ("direct", 1, 4)])
def test_what_is_asked_for_stays(asked, shared_slots, message_slots):
    tried = candidates(Settings(), [asked], ONE_HOST, 8 * MIB, Constants())
    assert {each.algorithm for each in tried} == {"auto"}
    assert len({each.shared_slot_bytes for each in tried}) == shared_slots
    assert len({each.fusion_slot_bytes for each in tried}) == message_slots


# Steps of training


class Job:
    """A tuner, a clock, and a lane that costs what `cost` says for each byte."""

    def __init__(self, cost, **settings):
        self.now_s, self.cost = 0.0, cost
        self.settings = Settings(autotune=True, **settings)
        host = SimpleNamespace(constants=Constants(), window=object())
        routes = SimpleNamespace(candidates=["ring", "direct", "doubling", "shared"])
        self.knobs = Knobs.of(self.settings)
        self.seen = [self.knobs]
        self.tuner = Tuner(World(0, 2, (0, 0)), self.settings, host, routes, clock=lambda: self.now_s)

    def run(self, names, nbytes, numbered=False):
        """One response, all of it run at once."""
        descriptions = [Description("allreduce", name, numbered=numbered) for name in names]
        response = self.tuner.steer(Response(0, 1), descriptions)
        if response.knobs is not None:
            self.knobs = response.knobs
            self.seen.append(response.knobs)
        tensor = SimpleNamespace(nbytes=nbytes)
        requests = [SimpleNamespace(description=each, key=each.key, inputs=[tensor]) for each in descriptions]

        def steps():
            self.now_s += self.cost(self.knobs) * nbytes * len(names)
            yield from ()

        list(self.tuner.timed(steps(), requests))

    def until_ended(self, most, *responses):
        for step in range(most):
            for names, nbytes in responses:
                self.run(names, nbytes)
            if self.tuner.ended:
                return step
        raise AssertionError("the search did not end")


def slot_cost(knobs):
    """Slots of 256 KiB are the fastest here, by a third."""
    return {MIB: 3e-9, MIB // 2: 2.5e-9, MIB // 4: 2e-9, MIB // 8: 4e-9}.get(knobs.shared_slot_bytes, 5e-9)


def test_the_fastest_slot_is_found_and_knobs_change_between_steps_only(capsys, tmp_path):
    path = tmp_path / "tuned.json"
    job = Job(slot_cost, autotune_file=str(path))
    steps = job.until_ended(500, (["a", "b"], MIB), (["c"], 4 * MIB))
    assert job.knobs == Knobs(MIB // 4, 2 * MIB, origin="tuned")
    assert steps < 200
    assert {each.origin for each in job.seen} == {"default", "trial", "tuned"}
    assert "0.5 GB/s (with the defaults 0.3333) with shared_slot_bytes=262144 " in capsys.readouterr().err
    found = json.loads(path.read_text())
    assert found["knobs"] == tuned.plain(job.knobs)
    assert found["step_mb"] == round(6 * MIB / 1e6, 3)
    assert {each["knobs"]["shared_slot_bytes"]: each["gbs"] for each in found["tried"]}[MIB // 2] == 0.4
    before = job.seen[:]
    job.run(["a", "b"], MIB)
    job.run(["a", "b"], MIB)
    assert job.seen == before


def test_a_change_comes_with_the_first_tensor_of_a_step():
    job = Job(slot_cost)
    for _ in range(WARM_UP_STEPS):
        job.run(["a"], 4 * MIB)
        job.run(["b"], 4 * MIB)
    assert len(job.seen) == 1
    job.run(["a"], 4 * MIB)  # the search begins, with the defaults
    assert job.seen[-1] == Knobs.of(job.settings)._replace(origin="trial")
    for _ in range(search.SAMPLES_PER_TURN):
        count = len(job.seen)
        job.run(["b"], 4 * MIB)
        assert len(job.seen) == count
        job.run(["a"], 4 * MIB)
    assert job.seen[-1].shared_slot_bytes == MIB // 2


def test_steps_that_are_shorter_than_usual_do_not_count():
    job = Job(slot_cost)
    honest = job.cost
    for step in range(1000):
        job.cost = honest
        job.run(["a", "b"], 4 * MIB)
        job.cost = lambda knobs, step=step: 1e-6 / (1 + step % 7)  # a metric: latency only
        job.run(["metric"], 4)
        job.run(["metric"], 4)
        if job.tuner.ended:
            break
    job.run(["a"], 4 * MIB)
    assert job.knobs.shared_slot_bytes == MIB // 4


def test_tensors_without_names_are_cut_into_steps_by_their_bytes():
    job = Job(slot_cost)
    for number in range(2000):
        job.run([f"noname.{number}"], 4 * MIB, numbered=True)
        if job.tuner.ended:
            break
    job.run(["noname.end"], 4 * MIB, numbered=True)
    assert job.knobs.shared_slot_bytes == MIB // 4


def test_little_is_not_tuned(capsys):
    job = Job(slot_cost)
    assert job.until_ended(10, (["a", "b"], 1000)) == WARM_UP_STEPS
    assert job.seen == [Knobs.of(job.settings)]
    assert "the all-reduces of a step have 2000 B together: too little to tune" in capsys.readouterr().err


def test_a_search_without_samples_ends_with_the_defaults(capsys):
    job = Job(slot_cost)
    job.run(["huge"], 100 * MIB)
    job.until_ended(2 * MOST_STEPS, (["a"], MIB))
    assert job.knobs.moves_like(Knobs.of(job.settings))
    assert "nothing is clearly faster than the defaults (None GB/s)" in capsys.readouterr().err


def test_a_job_that_ends_early_says_so(capsys):
    job = Job(slot_cost)
    for _ in range(8):
        job.run(["a"], 4 * MIB)
    job.tuner.close()
    job.tuner.close()
    assert capsys.readouterr().err == (
        "ringreduce: autotune: the job ended after 7 steps, before the search; the defaults stay\n"
    )


# The file

LAYOUT = tuned.layout(World(0, 3, (0, 0, 2)), shared_memory=True)
KNOBS = Knobs(MIB // 2, MIB, "direct", 1)


@pytest.fixture
def written(tmp_path):
    def write(**changed):
        path = tmp_path / "tuned.json"
        content = {"layout": LAYOUT, "knobs": tuned.plain(KNOBS), **changed}
        assert tuned.write(str(path), content) == ""
        assert [each.name for each in tmp_path.iterdir()] == ["tuned.json"]
        return Settings(autotune_file=str(path))

    return write


def test_what_was_written_is_read(written, capsys):
    assert LAYOUT["ranks_per_host"] == [2, 1]
    assert tuned.starting_knobs(written(), LAYOUT) == KNOBS._replace(origin="loaded")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"layout": {**LAYOUT, "ranks_per_host": [4]}},
            r"it was made for ranks_per_host \[4\], and here it is \[2, 1\]",
        ),
        (
            {"layout": {**LAYOUT, "mpi": "MPICH 5"}},
            "it was made for mpi MPICH 5, and here it is threads of one process",
        ),
        ({"layout": {**LAYOUT, "ringreduce": "0"}}, "it was made for ringreduce 0, and here it is"),
        ({"layout": 3}, "it was made for ringreduce 3, and"),
        ({"knobs": {"slots": 3}}, r"not what autotune writes \(TypeError: .*; delete it"),
        ({"knobs": tuned.plain(KNOBS._replace(shared_slot_bytes=2 * MIB))}, "shared_slot_bytes: .* from 64 to 1048576"),
        ({"knobs": tuned.plain(KNOBS._replace(slots_in_flight="2"))}, "slots_in_flight: .* from 1 to 3, .* has '2'"),
        (
            {"knobs": tuned.plain(KNOBS._replace(algorithm="magic"))},
            "algorithm 'magic': expected auto or one of shared",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_ignored_with_a_reason(written, capsys, changed, message):
    settings = written(**changed)
    assert tuned.starting_knobs(settings, LAYOUT) == Knobs.of(settings)
    with pytest.raises(tuned._Ignored, match=message):
        tuned.read(settings, LAYOUT)
    assert capsys.readouterr().err.startswith(f"ringreduce: RINGREDUCE_AUTOTUNE_FILE={settings.autotune_file} is ign")


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"algorithm": "ring"}, "RINGREDUCE_ALGORITHM=ring is set"), ({"deterministic": True}, "DETERMINISTIC=1 is set")],
)
def test_a_tuned_algorithm_does_not_override_what_is_asked_for(written, asked, message):
    settings = Settings(autotune_file=written().autotune_file, **asked)
    with pytest.raises(tuned._Ignored, match=message):
        tuned.read(settings, LAYOUT)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"layout": {}}'])
def test_a_broken_file_is_ignored_with_a_reason(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    settings = Settings(autotune_file=str(path))
    with pytest.raises(tuned._Ignored, match=r"not what autotune writes .* make it again"):
        tuned.read(settings, LAYOUT)


def test_a_file_that_is_not_there_and_one_that_cannot_be_written(tmp_path, capsys):
    missing = Settings(autotune_file=str(tmp_path / "none" / "tuned.json"))
    assert tuned.starting_knobs(missing, LAYOUT) == Knobs.of(missing)
    assert "is ignored: there is no such file; a run with RINGREDUCE_AUTOTUNE=1 makes it" in capsys.readouterr().err
    assert tuned.write(missing.autotune_file, {}) == "No such file or directory"
    job = Job(slot_cost, autotune_file=missing.autotune_file)
    job.until_ended(500, (["a"], 8 * MIB))
    assert "tuned.json cannot be written: No such file or directory" in capsys.readouterr().err


def test_while_tuning_the_file_is_not_read(written, capsys):
    settings = Settings(autotune=True, autotune_file=written().autotune_file)
    assert tuned.starting_knobs(settings, LAYOUT) == Knobs.of(settings)
    assert capsys.readouterr().err == ""
