"""A commit copies everything, uses its memory again, and is put back in place; a sampler divides what is left."""

import collections
import itertools
import threading

import ml_dtypes
import numpy as np
import pytest
import torch

from ringreduce.api.sampler import DistributedSampler
from ringreduce.elastic import ElasticSampler
from ringreduce.elastic.commit import Commit, Restoration
from ringreduce.errors import InputError
from ringreduce.testing import run_ranks
from tests.support.loops import in_a_loop
from tests.support.tiers import adapters, parted

Pair = collections.namedtuple("Pair", "left right")

ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.array(5, np.int64),
    np.empty((0, 3), np.float32),
    np.array([True, False]),
    np.arange(4).astype(ml_dtypes.bfloat16),
    np.arange(3, dtype=np.complex64),
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(7),
    torch.arange(3, dtype=torch.bfloat16),
    torch.empty(0),
    torch.ones(2, requires_grad=True),
    torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last),
]


def numbers(array):
    return np.asarray(array.detach().float() if isinstance(array, torch.Tensor) else array).tolist()


def spoil(array):
    """Overwrite all elements."""
    if isinstance(array, torch.Tensor):
        array.data.fill_(99)
    else:
        array[...] = 1 if array.dtype == bool else 99


def put_back(live, saved):
    return Restoration().put_back(live, saved)


def taken(tree, number=1):
    commit = Commit()
    commit.take(tree, number)
    return commit


@in_a_loop("array", ARRAYS)
def test_an_array_comes_back_in_place_and_where_there_was_none_as_a_copy_that_later_commits_leave_alone(array):
    array = array.detach().clone() if isinstance(array, torch.Tensor) else array.copy(order="K")
    before = numbers(array)
    commit = taken(array)
    spoil(array)
    assert put_back(array, commit.tree()) is array
    assert numbers(array) == before
    restored = put_back(None, commit.tree())
    assert (type(restored), restored.dtype, restored.shape) == (type(array), array.dtype, array.shape)
    commit.memory[:] = 0xFF
    assert numbers(restored) == numbers(array) == before


def test_what_cannot_be_pickled_is_named_and_the_commit_is_as_before():
    commit = taken({"w": np.arange(3), "lock": None})
    locked = {"w": np.zeros(5), "lock": threading.Lock()}
    with pytest.raises(
        InputError, match=r"^commit: attribute 'lock' of the state cannot be pickled: TypeError: .*lock"
    ):
        commit.take(locked, 2)
    assert (commit.number, commit.tree()["w"].tolist()) == (1, [0, 1, 2])


class Unreadable:
    def __setstate__(self, state):
        raise KeyError("gone")


def test_what_cannot_be_unpickled_is_told():
    spoilt = Unreadable()
    spoilt.value = 1
    with pytest.raises(InputError, match=r"^commit 3 of the state cannot be unpickled here: KeyError: 'gone'; the mod"):
        taken({"a": spoilt}, 3).tree()


@in_a_loop("shape", [(2,), (0, 2)])
@in_a_loop("requires_grad", [True, False])
@in_a_loop("kind", [torch.nn.Parameter, torch.Tensor.requires_grad_])
def test_a_tensor_that_is_new_is_a_leaf_of_the_kind_that_was_saved(kind, requires_grad, shape):
    saved = kind(torch.ones(shape), requires_grad)
    restored = put_back(None, taken(saved).tree())
    assert (type(restored), restored.requires_grad, restored.is_leaf) == (type(saved), requires_grad, True)
    assert restored.tolist() == saved.tolist()


def test_a_module_inside_any_object_has_its_parameters_again():
    (module,) = put_back([None], taken([torch.nn.Linear(2, 1)]).tree())
    assert [name for name, each in module.named_parameters() if each.requires_grad] == ["weight", "bias"]
    assert put_back(None, taken(torch.ones(2) * torch.ones(2, requires_grad=True)).tree()).requires_grad


def test_dicts_and_lists_stay_the_same_objects_and_others_are_replaced():
    inner, items = {"w": np.arange(3)}, [1, [2, np.ones(2)]]
    tree = {"inner": inner, "items": items, "pair": Pair(1, np.zeros(2)), "set": {1, 2}, "none": None}
    commit = taken(tree)
    inner["new"] = inner["w"].sum()
    inner["w"] += 5
    items.append(3)
    items[1][1][:] = 7
    tree["set"].add(3)
    tree["pair"].right[0] = 4
    assert put_back(tree, commit.tree()) is tree
    assert tree["inner"] is inner
    assert {key: value.tolist() for key, value in inner.items()} == {"w": [0, 1, 2]}
    assert tree["items"] is items
    assert (len(items), items[1][1].tolist()) == (2, [1, 1])
    assert type(tree["pair"]) is Pair
    assert tree["pair"].right.tolist() == [0, 0]
    assert tree["set"] == {1, 2}


@pytest.mark.parametrize(
    "value", [collections.Counter("aab"), collections.defaultdict(list, a=[1]), collections.OrderedDict(b=1, a=2)]
)
def test_kinds_of_dicts(value):
    restored = put_back(None, taken(value).tree())
    assert type(restored) is type(value)
    assert list(restored.items()) == list(value.items())


def test_what_has_a_state_dict_inside_dicts_and_lists_is_restored_in_place():
    """So that an optimizer still has the parameters of the model, and a loader its sampler."""
    models = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]
    optimizers = {"second": torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)}
    schedulers = (torch.optim.lr_scheduler.StepLR(optimizers["second"], 1),)
    state = {"models": models, "optimizers": optimizers, "schedulers": schedulers}
    model, optimizer, (scheduler,) = models[1], optimizers["second"], schedulers
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    optimizer.step()
    before, commit = numbers(model.weight), taken(state)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
        restored = put_back(state, commit.tree())
        assert restored["models"][1] is model
        assert restored["optimizers"]["second"] is optimizer
        assert restored["schedulers"][0] is scheduler
        assert numbers(model.weight) == before
        assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0.1)
        assert numbers(optimizer.state[model.weight]["momentum_buffer"]) == [[1, 1]]


class Wrapped(torch.optim.SGD):
    """As a DistributedOptimizer is, of which a copy is one of the class that it wraps."""


def test_an_optimizer_in_a_dict_is_the_same_where_its_copy_is_of_the_class_that_it_wraps():
    parameters = list(torch.nn.Linear(2, 1).parameters())
    live = Wrapped(parameters, lr=0.5)
    assert put_back({"o": live}, taken({"o": torch.optim.SGD(parameters, lr=0.1)}).tree())["o"] is live
    assert live.param_groups[0]["lr"] == 0.1
    assert live.param_groups[0]["params"][0] is parameters[0]


class Named(list):
    """A list of the user's own, whose class is not called with its items."""

    def __init__(self, name="none"):
        super().__init__()
        self.name = name


def test_a_subclass_of_list_or_tuple_keeps_its_items_and_attributes():
    losses = Named("train")
    losses += [0.5, np.arange(2)]
    commit = taken({"losses": losses, "size": torch.Size([2, 3])})
    losses.name = "other"
    restored = put_back({"losses": losses}, commit.tree())
    commit.memory[:] = 0xFF
    assert (type(restored["losses"]), restored["losses"].name) == (Named, "train")
    assert (restored["losses"][0], restored["losses"][1].tolist()) == (0.5, [0, 1])
    assert (type(restored["size"]), restored["size"]) == (torch.Size, (2, 3))


class Holder:
    """An object of the user's own with an array."""

    def __init__(self):
        self.array = np.arange(3)


def test_an_array_inside_any_object_is_no_view_of_the_commit():
    commit = taken({"holder": Holder()})
    restored = put_back({"holder": None}, commit.tree())["holder"]
    restored.array += 10
    commit.memory[:] = 0
    assert restored.array.tolist() == [10, 11, 12]


@in_a_loop("live", [np.arange(4), np.arange(3.0), torch.arange(3), [0, 1, 2], None])
def test_an_array_of_another_shape_type_or_library_is_replaced(live):
    restored = put_back(live, taken(np.arange(3)).tree())
    assert (type(restored), restored.tolist()) == (np.ndarray, [0, 1, 2])
    assert restored is not live


def test_an_array_that_stands_in_several_places_does_so_again():
    """Also where its shape has changed since, a list has grown, or another array has been tied to it."""
    first, second = np.arange(3), np.ones(3)
    state = {"params": {"w": first, "b": second}, "held": [first, second], "holder": Holder()}
    state["holder"].array = state["holder"].again = first
    commit = taken(state)
    assert len(commit.infos) == 2
    held = state["held"]
    held.append(np.zeros(3))
    state["params"]["w"] = np.zeros(4)
    state["params"]["b"] = held[0] = held[1]
    restored = put_back(state, commit.tree())
    assert [each.tolist() for each in restored["params"].values()] == [[0, 1, 2], [1, 1, 1]]
    assert restored["held"] is held
    assert all(one is other for one, other in zip(held, restored["params"].values(), strict=True))
    assert restored["holder"].array is restored["holder"].again


@in_a_loop("change", [lambda held: held.append(np.zeros(3)), lambda held: held.pop()])
def test_a_list_that_has_another_length_since_keeps_the_arrays_that_it_has(change):
    held = [np.arange(3), np.ones(2)]
    first, commit = held[0], taken({"held": held})
    first += 1
    change(held)
    restored = put_back({"held": held}, commit.tree())["held"]
    assert [each.tolist() for each in restored] == [[0, 1, 2], [1, 1]]
    assert restored is held
    assert restored[0] is first


def test_dicts_and_lists_that_have_become_one_since_are_apart_again_and_those_that_were_one_are():
    both, queue = {"n": 1}, collections.deque([1])
    state = {"params": {"w": np.zeros(2)}, "best": {"w": np.ones(2)}, "seen": [[1], [2]]}
    state |= {"one": both, "other": both, "queue": queue, "again": queue}
    commit, params = taken(state), state["params"]
    state["best"], state["other"] = params, dict(both)
    state["seen"][1] = state["seen"][0]
    restored = put_back(state, commit.tree())
    assert restored["params"] is params
    assert [restored[name]["w"].tolist() for name in ("params", "best")] == [[0, 0], [1, 1]]
    assert restored["seen"] == [[1], [2]]
    assert restored["one"] is restored["other"]
    assert restored["queue"] is restored["again"]


def test_a_dict_and_a_list_that_are_inside_themselves_come_back_so():
    loop, ring = {"n": 1}, [1]
    loop["self"], ring[:] = loop, [1, ring]
    commit = taken({"loop": loop, "ring": ring})
    loop.clear()
    for live in ({"loop": loop, "ring": ring}, None):
        restored = put_back(live, commit.tree())
        assert (restored["loop"]["n"], restored["ring"][0]) == (1, 1)
        assert restored["loop"]["self"] is restored["loop"]
        assert restored["ring"][1] is restored["ring"]


def test_a_read_only_array_is_replaced():
    live = np.arange(3)
    commit = taken(live)
    live.flags.writeable = False
    assert put_back(live, commit.tree()) is not live


@pytest.mark.parametrize("live", [torch.ones(1).expand(3), np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,))])
def test_an_array_whose_elements_share_memory_is_replaced(live):
    assert put_back(live, taken(live).tree()).tolist() == [1, 1, 1]
    saved = taken(live.cumsum(0)).tree()
    assert put_back(live, saved).tolist() == [1, 2, 3]
    assert live.tolist() == [1, 1, 1]


def test_memory_is_used_again_until_sizes_change():
    params = {"w": np.arange(1000.0), "b": torch.zeros(7)}
    commit = taken(params)
    first = commit.memory
    params["w"] += 1
    commit.take(params, number=2)
    assert commit.memory is first
    assert commit.tree()["w"][0] == 1
    params["w"] = np.arange(10.0)
    commit.take(params, number=3)
    assert commit.memory.nbytes == 128 + 28, "each array begins at a multiple of 64 bytes"
    assert commit.tree()["w"].tolist() == list(range(10))


def test_arrays_of_as_many_bytes_are_read_as_what_they_are():
    commit = Commit()
    for number, array in enumerate([np.arange(8.0), np.arange(16, dtype=np.float32), np.arange(8).reshape(2, 4)], 1):
        commit.take({"w": array}, number)
        found = commit.tree()["w"]
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


def sampler(size, count, **options):
    return run_ranks(size, lambda: ElasticSampler(count, **options))


def step(samplers, batch, length):
    """The items of one batch of all ranks, recorded."""
    items = [each.get_indices(batch, length) for each in samplers]
    for each in samplers:
        each.record_batch(batch, length)
    return items


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", parted([0, 1, 7, 24, 101], lambda count: count in (0, 7, 24)))
@pytest.mark.parametrize(
    ("before", "after"),
    parted(itertools.product(range(1, 5), repeat=2), lambda *both: both in ((1, 3), (2, 2), (3, 2), (4, 1)), adapters),
)
def test_what_is_left_is_divided_among_the_ranks_that_are_left(before, after, count, shuffle):
    ranks = sampler(before, count, shuffle=shuffle, seed=3)
    whole = [list(each) for each in sampler(before, count, shuffle=shuffle, seed=3)]
    assert whole == [list(DistributedSampler(count, before, rank, shuffle, seed=3)) for rank in range(before)]
    done = [index for batch in range(2) for items in step(ranks, batch, 3) for index in items]
    assert ranks[0].processed_indices == set(done)

    def resumed():
        one = ElasticSampler(count, shuffle=shuffle, seed=3)
        one.load_state_dict(ranks[0].state_dict())
        return one

    others = run_ranks(after, resumed)
    shares = [list(each) for each in others]
    assert len({len(share) for share in shares}) == 1
    assert [len(each) for each in others] == [len(share) for share in shares]
    left = set(range(count)) - set(done)
    assert set(itertools.chain(*shares)) == left == set(others[0].remaining_indices)


def test_an_epoch_is_a_new_order_and_begins_at_its_first_item():
    def program():
        one = ElasticSampler(50)
        first = list(one)
        one.record_batch(0, 30)
        assert list(one) == first, "only a reset leaves out what is recorded"
        one.set_epoch(0)
        assert (one.processed_num, list(one)) == (30, first[30:]), "that very epoch, broken off, goes on"
        one.record_batch(0, 20)
        one.set_epoch(0)
        assert (one.processed_num, list(one)) == (0, first), "it was done"
        one.set_epoch(1)
        assert (one.processed_num, len(one), one.processed_indices) == (0, 50, set())
        assert sorted(one) == sorted(first)
        assert list(one) != first

    run_ranks(1, program)


def test_an_epoch_that_was_done_at_the_last_commit_is_not_done_again():
    """A loss may come before it is counted, as in validation."""

    def program():
        one = ElasticSampler(10)
        one.elastic_begin()
        one.record_batch(0, 10)
        one.set_epoch(0)
        assert len(one) == 10, "the script itself wants it again"
        one.record_batch(0, 10)
        one.elastic_begin()
        one.set_epoch(0)
        assert (one.processed_num, list(one)) == (10, [])
        one.set_epoch(1)
        assert len(one) == 10

    run_ranks(1, program)


def test_indices_are_recorded_in_order_only():
    ranks = sampler(2, 10, shuffle=False)
    ranks[1].record_indices([3, 1])
    assert ranks[1].processed_num == 4
    assert ranks[1].processed_indices == {0, 1, 2, 3}
    with pytest.raises(InputError, match=r"record_indices\(\[0, 2\]\); expected this rank's next 2 items, \[5, 7\]"):
        ranks[1].record_indices([0, 2])
