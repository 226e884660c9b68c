"""DistributedOptimizer around plain NumPy optimizers of every form."""

import collections
import collections.abc
import copy
import pickle

import numpy as np
import pytest

import ringreduce as rr
from tests.support.on_threads import each_rank_of, known
from tests.support.reference import data

SIZE = 3


def gradients(rank):
    return {
        "w": data("float32", 20, rank).reshape(4, 5),
        "layers": [data("float64", 3, rank, 1), (data("float32", 1, rank), None)],
    }


def mean(pick):
    return np.mean([pick(gradients(rank)) for rank in range(SIZE)], axis=0)


def assert_averaged(grads):
    np.testing.assert_allclose(grads["w"], mean(lambda g: g["w"]), rtol=1e-6)
    np.testing.assert_allclose(grads["layers"][0], mean(lambda g: g["layers"][0]))
    assert grads["layers"][1][1] is None


class Stepping:
    def __init__(self):
        self.lr = 0.1

    def step(self, grads, scale=1):
        self.seen = grads
        return scale


class Updating:
    def update(self, params, grads, *, decay=0):
        self.seen = grads
        return params, decay


class Applying:
    def apply_gradients(self, pairs):
        self.seen = list(pairs)


@each_rank_of(SIZE)
def test_a_process_set_of_an_earlier_init_is_told():
    """No rank is in it, but ranks outside of a set train alone."""
    gone, inner = known([0, 1], 5), Stepping()
    with pytest.raises(ValueError, match="there is no process set 5"):
        rr.DistributedOptimizer(inner, process_set=gone).step(gradients(rr.rank()))
    assert not hasattr(inner, "seen")


@each_rank_of(SIZE)
def test_step():
    mine = gradients(rr.rank())
    inner = Stepping()
    optimizer = rr.DistributedOptimizer(inner)
    assert optimizer.step(mine, scale=2) == 2
    assert_averaged(inner.seen)
    optimizer.step(grads=mine)
    assert_averaged(inner.seen)
    np.testing.assert_array_equal(mine["w"], gradients(rr.rank())["w"], err_msg="the caller's arrays stay")


@each_rank_of(SIZE)
def test_update():
    inner = Updating()
    optimizer = rr.DistributedOptimizer(inner)
    assert optimizer.update("params", gradients(rr.rank()), decay=1) == ("params", 1)
    assert_averaged(inner.seen)
    assert optimizer.update("params", grads=gradients(rr.rank())) == ("params", 0)
    assert_averaged(inner.seen)


@each_rank_of(SIZE)
def test_apply_gradients():
    inner = Applying()
    grads = gradients(rr.rank())
    rr.DistributedOptimizer(inner).apply_gradients(zip([grads["w"], None], ["w", "unused"], strict=True))
    (averaged, name), unused = inner.seen
    np.testing.assert_allclose(averaged, mean(lambda g: g["w"]), rtol=1e-6)
    assert (name, unused) == ("w", (None, "unused"))


@each_rank_of(SIZE)
def test_a_callable_and_another_op():
    seen = []
    rr.DistributedOptimizer(seen.append)(gradients(rr.rank()))
    assert_averaged(seen[0])
    rr.DistributedOptimizer(seen.append, op=rr.Max)([np.float64(rr.rank())])
    assert seen[1] == [SIZE - 1]


@each_rank_of(SIZE)
def test_attributes_are_the_wrapped_optimizers():
    inner = Stepping()
    optimizer = rr.DistributedOptimizer(inner)
    assert optimizer.lr == 0.1
    optimizer.lr = 0.5
    assert inner.lr == 0.5
    with pytest.raises(AttributeError, match="momentum"):
        _ = optimizer.momentum
    assert "Stepping" in repr(optimizer)


def sgd(params, grads):
    return {key: params[key] - 0.1 * grads[key] for key in params}


class LikeOptax:
    def update(self, updates, state, params=None):
        return updates, state, params


class OfOneArgument:
    def update(self, g, rate=0.1):
        return rate * g


def names_differ(p, g, *rest, rate=0.1):
    return p - rate * g


def by_keyword(rate, *, gradient):
    return rate * gradient


MEAN = (SIZE - 1) / 2
CASES = {
    "params before grads": (sgd, {}, lambda o, g: o({"w": np.ones(1)}, {"w": g})["w"], 1 - 0.1 * MEAN),
    "a named argument": (sgd, {}, lambda o, g: o(grads={"w": g}, params={"w": np.ones(1)})["w"], 1 - 0.1 * MEAN),
    "keyword only": (by_keyword, {}, lambda o, g: o(2, gradient=g), 2 * MEAN),
    "optax's order": (LikeOptax(), {}, lambda o, g: o.update({"w": g}, {"count": 1}, 5)[0]["w"], MEAN),
    "one argument": (OfOneArgument(), {}, lambda o, g: o.update(g), 0.1 * MEAN),
    "told by place": (names_differ, {"gradients": 1}, lambda o, g: o(np.ones(1), g), 1 - 0.1 * MEAN),
    "told by name": (names_differ, {"gradients": "g"}, lambda o, g: o(np.ones(1), g), 1 - 0.1 * MEAN),
    "told by keyword": (names_differ, {"gradients": 1}, lambda o, g: o(np.ones(1), g=g), 1 - 0.1 * MEAN),
    "no signature": (max, {"gradients": 0}, lambda o, g: o(g, -1.0), MEAN),
}


@pytest.mark.parametrize("case", CASES)
@each_rank_of(SIZE)
def test_the_gradients_are_reduced_and_nothing_else(case):
    optimizer, told, call, expected = CASES[case]
    result = call(rr.DistributedOptimizer(optimizer, **told), np.full(1, float(rr.rank())))
    np.testing.assert_allclose(result, expected)


@each_rank_of(SIZE)
def test_what_optax_would_be_given_besides_stays():
    optimizer = rr.DistributedOptimizer(LikeOptax())
    state = {"count": np.full(1, rr.rank())}
    assert optimizer.update(np.ones(1), state, params=state)[1:] == (state, state)


@pytest.mark.parametrize("unclear", [names_differ, lambda *args: None, max, lambda grads, gradients: None])
@each_rank_of(SIZE)
def test_a_callable_with_unclear_gradients_is_refused(unclear):
    with pytest.raises(rr.InputError, match=r"which argument holds the gradients\? .* its index or name: .*=1\)"):
        rr.DistributedOptimizer(unclear)


@each_rank_of(SIZE)
def test_a_method_with_unclear_gradients_is_refused_when_it_is_called():
    class Unclear:
        def update(self, w, g):
            pass

    optimizer = rr.DistributedOptimizer(Unclear())
    with pytest.raises(rr.InputError, match=r"update\(w, g\): which argument holds the gradients"):
        optimizer.update(np.ones(1), np.ones(1))


class Stored(collections.abc.Mapping):
    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Forgetful(Stored):
    def __init__(self, items):
        super().__init__({} if isinstance(items, dict) else items)


@each_rank_of(SIZE)
def test_containers_of_other_kinds_are_rebuilt_or_refused():
    mine = np.full(1, float(rr.rank()))
    optimizer = rr.DistributedOptimizer(lambda grads: grads)
    default = collections.defaultdict(list, w=mine)
    assert optimizer(default)["w"] == MEAN
    assert optimizer(default)["missing"] == []
    assert optimizer(collections.OrderedDict(b=mine, a=None)) == collections.OrderedDict(b=MEAN, a=None)
    assert optimizer(Stored({"a": {"w": mine}}))["a"]["w"] == MEAN
    with pytest.raises(rr.InputError, match="Forgetful that is made from a dict does not hold its arrays; pass a"):
        optimizer([Forgetful([("w", mine)])])
    with pytest.raises(rr.InputError, match="a set is not an array"):
        optimizer({"w": {1.0}})


def made_by(library):
    base = type(
        "Base", (), {"__module__": f"{library}.optimizers", "update": None, "__call__": lambda self, grads: None}
    )
    return type("Adam", (base,), {})()


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (made_by("flax"), r"flax's optimizers are made from optax's: wrap those, such as nnx.Optimizer\(model, "),
        (made_by("keras"), r"use ringreduce.keras.DistributedOptimizer; if .* pip install --upgrade keras"),
    ],
)
@each_rank_of(SIZE)
def test_frameworks_without_an_adapter_are_told_what_works(optimizer, says):
    with pytest.raises(TypeError, match=says):
        rr.DistributedOptimizer(optimizer)


@pytest.mark.parametrize("wrong", [object(), 3])
@each_rank_of(SIZE)
def test_what_fits_none_gets_the_list_of_forms(wrong):
    with pytest.raises(
        TypeError, match=r"one of\n.*torch.optim.Optimizer\n.*of optax\n.*of Keras 3\n.*step\(grads\), update\("
    ):
        rr.DistributedOptimizer(wrong)


@each_rank_of(SIZE)
def test_calls_without_gradients_are_told():
    with pytest.raises(TypeError, match="no gradients were passed; expected them as grads"):
        rr.DistributedOptimizer(Stepping()).step()
    with pytest.raises(TypeError, match=r"apply_gradients expects the \(gradient, parameter\) pairs first"):
        rr.DistributedOptimizer(Applying()).apply_gradients()
    with pytest.raises(rr.InputError, match="with Stepping these options have no effect: groups, name"):
        rr.DistributedOptimizer(Stepping(), groups=2, name="w", wait_in_backward=False)


PASSES = 3


def of_pass(number, rank):
    return {"w": data("float32", 20, rank, number).reshape(4, 5), "layers": [data("float64", 3, rank, number), None]}


def of_all_passes(pick, averages):
    sums = [sum(pick(of_pass(number, rank)) for number in range(PASSES)) for rank in range(SIZE)]
    return np.mean(sums, axis=0) / (PASSES if averages else 1)


@pytest.mark.parametrize("averages", [False, True])
@each_rank_of(SIZE)
def test_gradients_of_several_passes_are_summed(averages):
    options = {"backward_passes_per_step": PASSES, "average_aggregated_gradients": averages}
    inner = Stepping()
    optimizer = rr.DistributedOptimizer(inner, **options)
    for _ in range(2):
        for number in range(PASSES):
            assert not hasattr(inner, "seen")
            grads = of_pass(number, rr.rank())
            assert optimizer.step(grads, scale=2) == 2
            grads["w"][:] = np.nan  # the caller's again
        np.testing.assert_allclose(inner.seen["w"], of_all_passes(lambda it: it["w"], averages), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(inner.seen["layers"][0], of_all_passes(lambda it: it["layers"][0], averages))
        assert inner.seen["layers"][1] is None
        assert inner.seen["w"].dtype == np.float32
        del inner.seen


@each_rank_of(SIZE)
def test_until_the_last_pass_parameters_stay():
    mine = np.full(1, float(rr.rank()))
    optimizer = rr.DistributedOptimizer(sgd, backward_passes_per_step=2)
    params = optimizer({"w": np.ones(1)}, {"w": mine})
    assert params == {"w": 1}
    np.testing.assert_allclose(optimizer(params, grads={"w": mine})["w"], 1 - 0.2 * MEAN)
    inner = Applying()
    pairs = rr.DistributedOptimizer(inner, backward_passes_per_step=2)
    assert pairs.apply_gradients([(mine, "w"), (None, "unused")]) is None
    pairs.apply_gradients([(mine, "w"), (None, "unused")])
    assert inner.seen == [(2 * MEAN, "w"), (None, "unused")]


@each_rank_of(SIZE)
def test_what_is_wrong_with_several_passes_is_told():
    with pytest.raises(rr.InputError, match="backward_passes_per_step=0; expected a whole number of 1 or more"):
        rr.DistributedOptimizer(Stepping(), backward_passes_per_step=0)
    optimizer = rr.DistributedOptimizer(Stepping(), backward_passes_per_step=2)
    optimizer.step({"w": np.ones(1), "b": np.ones(1)})
    with pytest.raises(rr.InputError, match="the last of 2 passes has no gradient 'b'"):
        optimizer.step({"w": np.ones(1)})
    optimizer = rr.DistributedOptimizer(Stepping(), backward_passes_per_step=3)
    optimizer.step({"w": [np.ones(3)]})
    with pytest.raises(rr.InputError, match=r"pass 2 of 3 has a gradient 'w\.0' of shape \(1,\); expected \(3,\)"):
        optimizer.step({"w": [np.ones(1)]})
    for _ in range(3):
        assert not hasattr(optimizer, "seen")
        optimizer.step({"w": [np.full(1, float(rr.rank()))]})
    assert optimizer.seen == {"w": [3 * MEAN]}


@each_rank_of(SIZE)
def test_passes_may_have_other_types():
    optimizer = rr.DistributedOptimizer(Stepping(), backward_passes_per_step=3)
    for half in (0, 0.5, 0.25):
        mine = np.arange(2) + rr.rank() + half
        optimizer.step([mine, mine[1]])
    np.testing.assert_array_equal(optimizer.seen[0], 3 * (np.arange(2) + MEAN) + 0.75)
    assert optimizer.seen[1] == 3 * (1 + MEAN) + 0.75


@each_rank_of(2)
def test_after_a_commit_all_ranks_begin_with_a_whole_step():
    optimizer = rr.DistributedOptimizer(Stepping(), backward_passes_per_step=2)
    state = rr.elastic.ObjectState(optimizer=optimizer)
    for restore in (state.sync, state.restore):
        optimizer.step({"w": np.ones(1)})
        restore()
        optimizer.step({"w": np.full(1, 5.0)})
        copied = copy.deepcopy(optimizer)
        for each in (optimizer, copied):
            each.step({"w": np.full(1, 1.0)})
            assert each.seen["w"] == 6


@each_rank_of(SIZE)
def test_gradients_that_differ_in_form_are_named():
    seen = []
    grads = {"w": np.zeros(3), ("b" if rr.rank() == 1 else "c"): np.zeros(2)}
    with pytest.raises(rr.MismatchError, match=r"rank 1 of 3, allreduce 'b' .*: name 'b', but rank 0 has name 'c'"):
        rr.DistributedOptimizer(seen.append)(grads)


def test_it_wants_init_first():
    with pytest.raises(rr.NotInitializedError, match=r"DistributedOptimizer\(\): ringreduce has not been initialized"):
        rr.DistributedOptimizer(Stepping())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))])
@each_rank_of(SIZE)
def test_a_copy_reduces_with_an_optimizer_of_its_own(copied):
    inner = Stepping()
    other = copied(rr.DistributedOptimizer(inner))
    other.lr = 0.5
    other.step(gradients(rr.rank()))
    assert_averaged(other.seen)
    assert inner.lr == 0.1
    assert not hasattr(inner, "seen")


class Saving(Stepping):
    def state_dict(self):
        return {"lr": self.lr}

    def load_state_dict(self, state):
        self.lr = state["lr"]


class Holding(Stepping):
    """As PyTorch's: it changes the arrays that it was made with."""

    def __init__(self, params):
        super().__init__()
        self.params = params

    def step(self, grads):
        super().step(grads)
        self.params["w"] -= grads["w"]


class Slotted:
    __slots__ = ()
    step = Stepping.step


@pytest.mark.parametrize("kind", [Stepping, Saving, Holding])
@each_rank_of(SIZE)
def test_it_can_be_an_attribute_of_an_elastic_state(kind):
    params = {"w": np.full((4, 5), 1.0 + rr.rank())}
    inner = Holding(params) if kind is Holding else kind()
    wrapped = rr.DistributedOptimizer(inner)
    wrapped.lr = rr.rank() + 1.0
    state = rr.elastic.ObjectState(params=params, optimizer=wrapped)
    for restore in (state.sync, state.restore):
        restore()
        assert kind is Saving or not hasattr(inner, "seen"), "attributes that are newer than the commit are gone"
        wrapped.step(gradients(rr.rank()))
        assert_averaged(wrapped.seen)
        expected = mean(lambda g: g["w"]) if kind is Holding else 0
        np.testing.assert_allclose(params["w"], 1 - expected, rtol=1e-5, atol=1e-6)
        assert state.optimizer is wrapped
        assert wrapped.lr == 1.0
        wrapped.lr = 7.0


@each_rank_of(1)
def test_one_without_attributes_is_refused_by_an_elastic_state():
    with pytest.raises(rr.InputError, match="a Slotted has no __dict__; give it state_dict and load_state_dict"):
        rr.elastic.ObjectState(optimizer=rr.DistributedOptimizer(Slotted()))
