"""Horovod's executors on Ray, and what its tasks say, without Ray; jobs: end_to_end/test_ray.py, test_in_engines.py."""

import sys
import types

import pytest

import ringreduce as rr
import ringreduce.ray.elastic
import ringreduce.ray.tasks
from ringreduce.ray import ElasticRayExecutor, RayExecutor
from tests.support.loops import in_a_loop


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


@in_a_loop("more", [[], ["c"]])
@in_a_loop("elastic", [False, True])
@in_a_loop("kind", LOST + OTHERS)
def test_a_task_that_is_lost_is_a_lost_host_and_any_other_says_why_it_cannot_lend(kind, elastic, more):
    of = types.SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    vars(of).update({name: type(name, (of.RayError,), {}) for name in LOST + OTHERS})

    def get(task):
        raise getattr(of, kind)(f"{kind} of {task}")

    ray = types.SimpleNamespace(exceptions=of, get=get, wait=lambda tasks, num_returns, timeout: (tasks, more))
    said = ringreduce.ray.tasks._trouble(ray, ["a", "b"], elastic)
    assert said == ("" if kind in LOST or (elastic and more) else f"{kind} of a")


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


@in_a_loop(
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
        ({"num_workers": 2, "gpus_per_worker": 1}, "gpus_per_worker=1, but use_gpu is not True"),
        ({}, "expected either num_workers= or num_hosts="),
        ({"num_workers": 2, "num_hosts": 2}, "expected either num_workers= or num_hosts="),
    ],
)
def test_ranks_that_are_none_are_refused_before_ray_is_asked(options, says):
    with pytest.raises(rr.InputError, match=f"^RayExecutor: {says}"):
        RayExecutor(**options)


def test_gpus_of_an_elastic_job_s_ranks_are_asked_for_twice():
    with pytest.raises(rr.InputError, match=r"^ElasticRayExecutor: gpus_per_slot=2, but use_gpu is not True$"):
        ElasticRayExecutor(gpus_per_slot=2)


class Failing:
    """Ray, of which each reference is what its rank returns or raises, or WAITING: then it is for another one."""

    WAITING = object()

    def __init__(self):
        self.killed, self.removed = [], []
        self.exceptions = types.SimpleNamespace(RayActorError=type("RayActorError", (Exception,), {}))
        self.util = types.SimpleNamespace(remove_placement_group=self.removed.append)
        self.kill = self.killed.append

    def wait(self, references, timeout=None):
        left = [each for each in references if each is self.WAITING]
        return [each for each in references if each not in left], left

    def get(self, reference):
        if isinstance(reference, list):
            return reference
        if isinstance(reference, Exception):
            raise reference
        return reference


LOSS = rr.PeerLostError("rank 1 left", [1])


@pytest.mark.parametrize(
    ("results", "raised", "ends"),
    [
        (["a", "b"], None, False),
        (["a", KeyError("b")], KeyError, False),  # its actor can be called again
        ([Failing.WAITING, KeyError("b")], KeyError, True),
        ([LOSS, KeyError("b")], KeyError, True),
        ([LOSS], rr.PeerLostError, True),
    ],
)
@pytest.mark.parametrize("owns", [False, True])
def test_what_began_an_error_is_raised_and_ranks_that_wait_for_it_are_ended(monkeypatch, results, raised, ends, owns):
    """With them goes the placement group, unless it is the user's."""
    monkeypatch.setitem(sys.modules, "ray", ray := Failing())
    monkeypatch.setattr(ringreduce.ray.executor, "_NOTICED_S", 0.0)
    executor = RayExecutor(num_workers=len(results))
    executor.workers, executor._group, executor._owns_group = ["actors"], "group", owns
    with pytest.raises(rr.StartupError, match=r"it has been started; call shutdown\(\) first"):
        executor.start()
    if raised is None:
        assert executor._results(results) == results
    else:
        with pytest.raises(raised):
            executor._results(results)
    assert (ray.killed, executor.workers) == ((["actors"], []) if ends else ([], ["actors"]))
    assert ray.removed == (["group"] if ends and owns else [])


@pytest.mark.parametrize(
    ("options", "bundles", "placed"),
    [
        ({"num_workers": 3}, [{"CPU": 1}] * 3, [0, 1, 2]),
        ({"num_hosts": 2, "num_workers_per_host": 3}, [{"CPU": 3}] * 2, [0, 0, 0, 1, 1, 1]),
        ({"num_hosts": 2, "use_gpu": True}, [{"CPU": 1, "GPU": 1}] * 2, [0, 1]),
    ],
)
@pytest.mark.parametrize("current", [None, "the user's"])
def test_ranks_of_a_host_share_a_bundle_and_those_of_the_user_s_group_go_wherever_there_is_room(
    monkeypatch, options, bundles, placed, current
):
    group = types.SimpleNamespace(wait=lambda timeout_s: True)
    made, found = [], []
    for name, module in {
        "placement_group": {
            "get_current_placement_group": lambda: current and group,
            "placement_group": lambda bundles, strategy: made.append((bundles, strategy)) or group,
        },
        "scheduling_strategies": {
            "PlacementGroupSchedulingStrategy": lambda group, placement_group_bundle_index: placement_group_bundle_index
        },
    }.items():
        monkeypatch.setitem(sys.modules, f"ray.util.{name}", types.SimpleNamespace(**module))
    options_of = lambda num_cpus, num_gpus, scheduling_strategy: found.append(scheduling_strategy) or actor  # noqa: E731
    actor = types.SimpleNamespace(options=options_of, remote=lambda: None)
    RayExecutor(**options)._actors(actor)
    strategy = "STRICT_SPREAD" if "num_hosts" in options else "PACK"
    assert made == ([] if current else [(bundles, strategy)])
    assert found == ([-1] * len(placed) if current else placed)


def test_a_placement_group_without_room_is_removed():
    of = types.SimpleNamespace(GetTimeoutError=type("GetTimeoutError", (Exception,), {}))
    group, removed = types.SimpleNamespace(ready=lambda: "ready"), []

    def get(reference, timeout):
        raise of.GetTimeoutError

    ray = types.SimpleNamespace(exceptions=of, get=get, cluster_resources=lambda: {"CPU": 1.0, "memory": 3.0})
    ray.util = types.SimpleNamespace(
        placement_group=lambda bundles, strategy: group, remove_placement_group=removed.append
    )
    with pytest.raises(
        rr.StartupError, match=r"no room for 2 ranks of {'CPU': 1} within 5 s; the cluster has {'CPU': 1"
    ):
        ringreduce.ray.tasks._group(ray, 2, 1, 0, "PACK", 5)
    assert removed == [group]


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
