"""Horovod's executors on Ray, and what its tasks say, without Ray; jobs: end_to_end/test_ray.py, test_in_engines.py."""

import sys
import types

import pytest

import ringreduce as rr
import ringreduce.ray.elastic
import ringreduce.ray.tasks
from ringreduce.ray import ElasticRayExecutor, RayExecutor


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"num_slots": 4, "cpus_per_slot": 8},
            "cpus_per_slot, num_slots: since Horovod 0.22 it is num_workers_per_host",
        ),
        ({"min_workers": 2}, "min_workers: actors that keep their state are not elastic; use ElasticRayExecutor, or"),
    ],
)
def test_arguments_that_are_not_there_say_what_to_use(options, says):
    with pytest.raises(rr.InputError, match=f"RayExecutor: {says}"):
        RayExecutor(num_hosts=2, **options)


def test_settings_go_by_name_from_the_second_on():
    """In Horovod that is ssh_identity_file, which nothing here needs."""
    settings = RayExecutor.create_settings(30, placement_group_timeout_s=5, ssh_identity_file="key")
    assert settings == {"timeout_s": 30, "placement_group_timeout_s": 5}
    with pytest.raises(TypeError, match="positional argument"):
        RayExecutor.create_settings(30, "key")


class Actor:
    """Of Ray: each method is called by its `remote`, and what that returns is the result itself."""

    def __init__(self, place):
        self.variables = []
        self.where = types.SimpleNamespace(remote=lambda: place)
        self.begin = types.SimpleNamespace(remote=lambda size: "address")
        self.start = types.SimpleNamespace(remote=lambda *arguments: self.variables.append(arguments[3]))


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("n", ["0"]), ("n", ["0"])], ["0", "0"]),
        ([("n", ["0"]), ("n", ["0"]), ("n", ["1"]), ("n", ["1"])], ["0,1"] * 4),
        ([("n", ["1"]), ("m", ["0"]), ("n", ["0"]), ("m", ["0"])], ["1,0", "0", "1,0", "0"]),
        ([("n", []), ("n", [])], [None, None]),
    ],
)
def test_each_gpu_of_a_host_is_visible_once_to_its_ranks_though_they_share_it(monkeypatch, places, expected):
    actors = [Actor(place) for place in places]
    ray = types.SimpleNamespace(util=None, remote=lambda cls: cls, get=lambda each, timeout=None: each)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(RayExecutor, "_actors", lambda self, actor: actors)
    monkeypatch.setattr(RayExecutor, "_results", lambda self, references: list(references))
    RayExecutor(num_workers=len(places), use_gpu=True, gpus_per_worker=0.5).start()
    assert [each.variables[0].get("CUDA_VISIBLE_DEVICES") for each in actors] == expected


LOST = ["WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError"]
OTHERS = ["RayTaskError", "RuntimeEnvSetupError", "TaskCancelledError", "TaskUnschedulableError"]


@pytest.mark.parametrize("kind", LOST + OTHERS)
def test_a_task_that_is_lost_is_a_lost_host_and_any_other_says_why_it_cannot_lend(kind):
    of = types.SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    vars(of).update({name: type(name, (of.RayError,), {}) for name in LOST + OTHERS})

    def get(task):
        raise getattr(of, kind)(f"{kind} of {task}")

    ray = types.SimpleNamespace(exceptions=of, get=get, wait=lambda tasks, num_returns, timeout: (tasks, []))
    said = ringreduce.ray.tasks._trouble(ray, ["a", "b"], elastic=False)
    assert said == ("" if kind in LOST else f"{kind} of a")


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({}, {}, {"np": 6, "min_np": 1, "max_np": None, "cpus": 1, "gpus": 0}),
        ({"min_num_proc": 2, "max_num_proc": 4}, {}, {"np": 4, "min_np": 2, "max_np": 4, "cpus": 1, "gpus": 0}),
        ({"min_np": 2, "max_np": 4}, {"cpus_per_slot": 2}, {"np": 3, "min_np": 2, "max_np": 4, "cpus": 2, "gpus": 0}),
        ({"min_np": 3}, {"use_gpu": True}, {"np": 3, "min_np": 3, "max_np": None, "cpus": 1, "gpus": 1}),
    ],
)
def test_an_elastic_job_begins_with_the_room_that_there_is(monkeypatch, settings, options, expected):
    resources = {"CPU": 6.0, "GPU": 2.0}
    ray = types.SimpleNamespace(util=None, is_initialized=lambda: True, cluster_resources=lambda: resources)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ringreduce.ray.elastic, "run", lambda fn, **asked: (fn, asked))
    settings = ElasticRayExecutor.create_settings(**settings, timeout_s=30, verbose=2)
    executor = ElasticRayExecutor(settings, env_vars={"MARK": "a"}, **options)
    executor.start()
    fn, asked = executor.run(len)
    assert fn is len
    assert asked == {"elastic": True, "env": {"MARK": "a"}, "timeout_s": 30, **expected}
    with pytest.raises(rr.InputError, match=r"callbacks are not supported; print in worker_fn"):
        executor.run(len, callbacks=[print])


def test_sys_exit_on_an_actor_s_rank_is_an_ordinary_exception():
    """The actor would end, and Ray would not say why."""
    actor = ringreduce.ray.executor._Rank()
    actor._executable = 3
    for called in (lambda: actor.run(sys.exit, (3,), {}), lambda: actor.execute(sys.exit)):
        with pytest.raises(rr.JobFailedError, match=r"a rank's function has called sys\.exit\(3\)"):
            called()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": 0}, "num_workers: expected a number of ranks, 1 or more, got 0"),
        ({"num_workers": -1}, "num_workers: expected a number of ranks, 1 or more, got -1"),
        ({"num_hosts": 0}, "num_hosts: expected a number of ranks, 1 or more, got 0"),
        (
            {"num_hosts": 2, "num_workers_per_host": 0},
            "num_workers_per_host: expected a number of ranks, 1 or more, got 0",
        ),
        ({"num_workers": 2, "cpus_per_worker": 0}, "cpus_per_worker=0: Ray reserves nothing for such ranks"),
    ],
)
def test_ranks_that_are_none_are_refused_before_ray_is_asked(options, says):
    with pytest.raises(rr.InputError, match=f"^RayExecutor: {says}"):
        RayExecutor(**options)


def test_each_executor_takes_the_settings_of_both():
    elastic = ElasticRayExecutor.create_settings(min_num_proc=2, timeout_s=30)
    assert RayExecutor(elastic, num_workers=1).settings["timeout_s"] == 30
    assert RayExecutor(elastic, num_workers=1).settings["placement_group_timeout_s"] == 100
    settings = ElasticRayExecutor(RayExecutor.create_settings(timeout_s=40)).settings
    assert (settings.timeout_s, settings.min_np, settings.max_np) == (40, 1, None)


@pytest.mark.parametrize(("cpus", "expected"), [(0, []), (0.5, [0.5])])
def test_ranks_that_hold_nothing_need_no_placement_group(monkeypatch, cpus, expected):
    """Ray knows no bundle of nothing."""
    groups = []
    strategies = types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group: group)
    placement = types.SimpleNamespace(remove_placement_group=lambda group: None)
    ray = types.SimpleNamespace(
        is_initialized=lambda: True,
        util=types.SimpleNamespace(get_current_placement_group=lambda: None),
        remote=lambda fn: types.SimpleNamespace(options=lambda **_: None),
    )
    for name, module in {
        "": ray,
        ".util.placement_group": placement,
        ".util.scheduling_strategies": strategies,
    }.items():
        monkeypatch.setitem(sys.modules, f"ray{name}", module)
    tasks = ringreduce.ray.tasks
    monkeypatch.setattr(tasks, "_group", lambda ray, np, cpus, *_: groups.append(cpus) or "group")
    monkeypatch.setattr(tasks.lending, "ticket", lambda timeout_s: None)
    monkeypatch.setattr(tasks.lending, "run", lambda *_: ["a"])
    assert ringreduce.ray.run(len, cpus=cpus) == ["a"]
    assert groups == expected
