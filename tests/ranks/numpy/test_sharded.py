"""ShardedOptimizer of NumPy's arrays, on threads."""

import copy
import types

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays import trees
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of

DETERMINISTIC = Settings(deterministic=True)
SHAPES = {"a": (7, 3), "layers": [(5,), (2, 2)], "c": (1,)}


class Momentum:
    """Its attributes are its state."""

    def __init__(self, params):
        self.params, self.lr = params, 0.1
        self.velocity = trees.map_leaves(params, lambda _, each: np.zeros_like(each))

    def step(self, grads):
        named = [dict(trees.named_leaves(each)) for each in (self.params, self.velocity, grads)]
        for name, grad in named[2].items():
            named[1][name][...] = 0.9 * named[1][name] + grad
            named[0][name] -= self.lr * named[1][name]


class Saved(Momentum):
    """It has a state_dict, without the parameters."""

    def state_dict(self):
        return {"velocity": self.velocity, "lr": self.lr}

    def load_state_dict(self, state):
        self.velocity, self.lr = state["velocity"], state["lr"]


def new_params():
    of = lambda shape, at: np.cos(np.arange(np.prod(shape)) + at).reshape(shape).astype("f8" if at == 3 else "f4")  # noqa: E731
    return {"a": of((7, 3), 0), "layers": [of((5,), 1), None, of((2, 2), 2)], "c": of((1,), 3)}


def grads_of(params, step, rank=None):
    rank = rr.rank() if rank is None else rank
    return trees.map_leaves(params, lambda name, each: each * (1 + rank) + each.dtype.type(np.sin(step + len(name))))


def same(ones, others):
    for (name, one), (other_name, other) in zip(*map(trees.named_leaves, (ones, others)), strict=True):
        assert name == other_name
        np.testing.assert_array_equal(one, other, strict=isinstance(one, np.ndarray))


@pytest.mark.parametrize("kind", [Momentum, Saved])
@pytest.mark.parametrize(
    ("hosts", "shared"), [([0], False), ([0, 0, 0], False), ([0, 0, 0], True), ([0, 1, 1, 0], False)], ids=str
)
def test_the_bits_are_those_of_a_distributed_optimizer_and_so_is_the_state(hosts, shared, kind):
    def program():
        params, whole = new_params(), new_params()
        plain = rr.DistributedOptimizer(kind(whole), backward_passes_per_step=2)
        optimizer = rr.ShardedOptimizer(kind, params, backward_passes_per_step=2, shared_parameters=shared)
        assert (optimizer.params is params) == (not shared)
        params = optimizer.params
        same(optimizer.state_dict(), plain.state_dict())
        for step in range(8):
            plain.step(grads_of(whole, step))
            optimizer.step(grads_of(params, step))
            same(params, whole)
        kept = sum(each.size for _, each in trees.named_leaves(optimizer.optimizer.velocity))
        assert kept <= 31 // rr.size() + 2
        state = optimizer.state_dict()
        same(state, plain.state_dict())
        return state

    states = run_ranks(len(hosts), program, hosts=hosts, settings=DETERMINISTIC)

    def goes_on():
        """At another number of ranks, with gradients that are equal."""
        params, whole, saved = new_params(), new_params(), copy.deepcopy(states[0])
        optimizer, alone = rr.ShardedOptimizer(kind, params), kind(whole)
        optimizer.load_state_dict(states[0])
        vars(alone).update(saved)
        for tree in (alone.params, params) if kind is Saved else ():
            trees.map_leaves(tree, lambda name, each: each.__setitem__(..., 1))
        same(params, alone.params)
        for step in range(2):
            grads = grads_of(params, step, rank=3)
            alone.step(grads)
            optimizer(grads)
            same(params, alone.params)

    run_ranks(2, goes_on, settings=DETERMINISTIC)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Momentum(new_params()),), "got a Momentum; expected a torch optimizer, or a function that makes"),
        ((Momentum, np.ones((3, 3)).T[:2]), "'' is a ndarray that cannot be cut in place"),
        ((Momentum, {"a": 1.0}), "'a' is a float that cannot be cut in place"),
        ((Momentum, {"a": np.ma.array([1.0])}), "'a' is a MaskedArray that cannot be cut in place"),
    ],
    ids=["an object", "transposed", "a number", "masked"],
)
def test_what_cannot_be_cut_is_refused(arguments, message):
    class OnGpu:
        flags, device, nbytes = np.ones(1).flags, 0, 8
        data = types.SimpleNamespace(ptr=4096)

    def program():
        with pytest.raises(rr.InputError, match=message):
            rr.ShardedOptimizer(*arguments)
        with pytest.raises(rr.InputError, match="overlap: only for a torch optimizer"):
            rr.ShardedOptimizer(Momentum, new_params(), overlap=[])
        optimizer = rr.ShardedOptimizer(Momentum, {"a": np.zeros(3)})
        with pytest.raises(rr.InputError, match="not of the form and shapes of the parameters"):
            optimizer.step({"a": np.zeros(4)})
        optimizer = rr.ShardedOptimizer(lambda pieces: lambda grads: pieces.update(a=1), {"a": np.zeros(3)})
        with pytest.raises(rr.InputError, match="has another array for 'a' now; change it in place"):
            optimizer({"a": np.zeros(3)})

    def on_two():
        with pytest.raises(rr.InputError, match=r"shared_parameters=True\): expected NumPy arrays"):
            rr.ShardedOptimizer(Momentum, {"a": OnGpu()}, shared_parameters=True)

    run_ranks(1, program)
    run_ranks(2, on_two)


def test_an_elastic_state_of_ranks_that_have_changed():
    def began():
        params = new_params()
        optimizer = rr.ShardedOptimizer(Saved, params)
        state = rr.elastic.ObjectState(params=params, optimizer=optimizer, step=0)
        state.sync()
        for state.step in range(3):
            optimizer.step(grads_of(params, state.step, rank=1))
            state.commit()
        optimizer.step(grads_of(params, 9))
        return state

    states = run_ranks(3, began)

    def goes_on():
        state = states[rr.rank()]
        with pytest.raises(rr.InputError, match="the ranks have changed"):
            state.optimizer.step(grads_of(state.params, 3))
        state.restore()
        state.sync()
        state.optimizer.optimizer.lr = 0.3
        state.optimizer.step(grads_of(state.params, 3, rank=1))
        return state.params

    whole = new_params()
    alone = Saved(whole)
    for step in range(4):
        alone.lr = 0.1 if step < 3 else 0.3
        alone.step(grads_of(whole, step, rank=1))
    for params in run_ranks(2, goes_on):
        trees.map_leaves(
            params,
            lambda name, each: np.testing.assert_allclose(each, dict(trees.named_leaves(whole))[name], rtol=1e-5),
        )


ODD = {
    "a scalar": {"a": np.array(3.0), "b": np.arange(5.0)},
    "scalars only": {"a": np.array(3.0), "b": np.array(-1.0, np.float32)},
    "an empty one": {"a": np.zeros((0, 3)), "b": np.arange(2.0)},
    "empty ones only": {"a": np.zeros((0, 3)), "b": np.zeros(0)},
    "one element each": {"a": np.ones((1, 1)), "b": np.full(1, 2, np.float32)},
    "a tree of one": np.array(2.5),
    "a matrix": {"a": np.arange(6.0).reshape(2, 3).view(np.matrix), "b": np.ones(2)},
    "types": {"a": np.ones(3, np.float16), "b": np.arange(4.0), "c": np.arange(2, dtype=np.complex64)},
}


@pytest.mark.parametrize("params", ODD.values(), ids=ODD)
@pytest.mark.parametrize("shared", [False, True])
def test_odd_shapes_and_more_ranks_than_elements(params, shared):
    def program():
        made = []
        for sharded in (False, True):
            tree = copy.deepcopy(params) if isinstance(params, dict) else params.copy()
            if sharded:
                optimizer = rr.ShardedOptimizer(Momentum, tree, shared_parameters=shared)
                tree = optimizer.params
            else:
                optimizer = rr.DistributedOptimizer(Momentum(tree))
            for step in range(3):
                optimizer.step(trees.map_leaves(tree, lambda _, each: each * (1 + rr.rank()) + step))  # noqa: B023
            made.append((tree, optimizer.state_dict()))
        (expected, state), (found, sharded_state) = made
        same(found, expected)
        same(sharded_state, state)
        optimizer.load_state_dict(sharded_state)

    run_ranks(3, program, settings=DETERMINISTIC)


f4, ints = np.float32, np.arange(3)
GRADIENTS = {
    "wider": ([np.ones(3, f4), np.arange(2.0), np.float64(3)], None),
    "wider, first": ([np.arange(3.0), np.ones(2, f4), 0.5], None),
    "whole numbers": ([ints, np.ones(2, f4), 2], None),
    "whole numbers only": ([ints, ints[1:], np.int32(4)], None),
    "turned": ([np.ones(6, f4)[::2], np.arange(2, dtype=f4)[::-1], np.array(1, f4)], None),
    "texts": (
        [np.array(["x", "y", "z"]), np.ones(2, f4), f4(1)],
        "'b' is float32, that of 'a' is <U1; expected one type",
    ),
    "masked": (
        [np.ones(3, f4), np.ma.masked_array([1, 2], [0, 1], f4), f4(1)],
        "'b': a masked array would lose",
    ),
    "too long": ([np.ones(3, f4), np.ones(3, f4), f4(1)], r"the shape of 'b' is \(3,\), expected \(2,\)"),
    "missing": ([np.ones(3, f4), None, f4(1)], r"the shape of 'b' is none, expected \(2,\)"),
}


@pytest.mark.parametrize(("grads", "message"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_other_types_and_those_that_do_not_fit(grads, message):
    def trained(wrap):
        params = {"a": np.arange(3, dtype=f4), "b": np.ones(2, f4), "c": np.array(0.5, f4)}
        wrap(Momentum, params).step({name: each if message else each * (1 + rr.rank()) for name, each in given})
        return params

    def program():
        if message:
            with pytest.raises(rr.InputError, match=message):
                trained(rr.ShardedOptimizer)
        else:
            same(trained(rr.ShardedOptimizer), trained(lambda kind, params: rr.DistributedOptimizer(kind(params))))

    given = list(zip("abc", grads, strict=True))
    run_ranks(3, program, settings=DETERMINISTIC)


def views(*parts):
    """Of one flat buffer, by name."""
    flat = np.arange(12.0)
    return {name: flat[slice(*ends)] for name, ends in zip("abc", parts, strict=False)}


WHOLE = np.arange(6.0)
IN_COMMON = {
    "one array": ({"out": WHOLE, "embed": [WHOLE]}, "'embed.0' and 'out' have the same memory"),
    "a view of it": ({"out": WHOLE, "embed": WHOLE[:]}, "'embed' and 'out' have the same memory"),
    "of another shape": ({"out": WHOLE, "embed": WHOLE.reshape(2, 3)}, "'embed' and 'out' have the same memory"),
    "of another type": ({"out": WHOLE, "embed": WHOLE.view("f4")}, "'embed' and 'out' have the same memory"),
    "a base and a part": (views((0, 12), (4, 5)), "'a' and 'b' have memory in common; expected memory of their own"),
    "slices": (views((0, 3), (3, 8), (7, 12)), "'b' and 'c' have memory in common"),
    "a scalar": ({"a": WHOLE, "b": WHOLE[3:4].reshape(())}, "'a' and 'b' have memory in common"),
    "rows": ({"a": WHOLE.reshape(3, 2)[:2], "b": WHOLE.reshape(3, 2)[1:]}, "'a' and 'b' have memory in common"),
    "three names": ({"a": WHOLE, "b": [WHOLE, WHOLE[:2]]}, "'b.1' and 'a' have memory in common"),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("params", "message"), IN_COMMON.values(), ids=IN_COMMON)
def test_memory_under_two_names_is_refused(params, message, shared):
    def program():
        with pytest.raises(rr.InputError, match=f"ShardedOptimizer: parameters {message}"):
            rr.ShardedOptimizer(Momentum, params, shared_parameters=shared)

    run_ranks(2, program)


def test_views_of_one_buffer_that_lie_apart_are_stepped_in_it():
    def program():
        params, whole = (views((0, 3), (3, 3), (3, 12)) for _ in range(2))
        optimizer, plain = rr.ShardedOptimizer(Momentum, params), rr.DistributedOptimizer(Momentum(whole))
        for step in range(3):
            optimizer.step(grads_of(params, step))
            plain.step(grads_of(whole, step))
        same(params, whole)
        np.testing.assert_array_equal(params["a"].base, whole["a"].base)

    run_ranks(3, program, settings=DETERMINISTIC)


def shares(step):
    """Gradients of three names, of which two are one array and one is a part of it."""
    whole = (np.arange(6.0) + step) * (1 + rr.rank())
    return {"a": whole, "b": whole, "c": whole[2:]}


def distributed(make, params, **options):
    return rr.DistributedOptimizer(make(params), **options)


@pytest.mark.parametrize("options", [{}, {"compression": rr.Compression.fp16}, {"op": rr.Sum}], ids=str)
@pytest.mark.parametrize("wrap", [rr.ShardedOptimizer, distributed])
def test_one_gradient_under_several_names_is_reduced_for_each(wrap, options):
    def trained(of):
        params = {"a": np.zeros(6), "b": np.ones(6), "c": np.zeros(4)}
        optimizer = wrap(Momentum, params, **options)
        for step in range(3):
            optimizer.step({name: of(each) for name, each in shares(step).items()})
        return params

    run_ranks(3, lambda: same(trained(np.asarray), trained(np.copy)), settings=DETERMINISTIC)


class Rebinds(Momentum):
    """Its arrays are new ones after a step, in an attribute."""

    def step(self, grads):
        self.params = trees.map_leaves(self.params, lambda name, each: each - 1)


class RebindsOne:
    def __init__(self, w):
        self.w, self.last = w, None

    def step(self, grad):
        self.w = self.w - grad


class Keeps(Momentum):
    """Changes its arrays in place, has them under another name at first, and returns them."""

    def __init__(self, params):
        super().__init__(params)
        self.last = params

    def step(self, grads):
        super().step(grads)
        self.last = trees.map_leaves(self.params, lambda _, each: each.copy())
        return self.params


def functional(pieces):
    return lambda grads: {name: each - grads[name] for name, each in pieces.items()}


NEW_ONES = {
    "returned": (functional, {"a": np.ones(5), "b": np.ones(2)}, "'a'"),
    "an attribute": (Rebinds, {"a": np.ones(5), "b": [np.ones(2)]}, "'a'"),
    "an attribute, of one array": (RebindsOne, np.ones(5), "''"),
    "returned, of one array": (lambda piece: lambda grad: piece - grad, np.ones(5), "''"),
    "in place": (Keeps, {"a": np.ones(5), "b": np.ones(2)}, None),
}


@pytest.mark.parametrize("wrap", ["ShardedOptimizer", "LocalSGD"])
@pytest.mark.parametrize(("make", "params", "name"), NEW_ONES.values(), ids=NEW_ONES)
def test_an_optimizer_that_makes_new_arrays_trains_nobodys(make, params, name, wrap):
    def program():
        mine = copy.deepcopy(params)
        is_sharded = wrap == "ShardedOptimizer"
        optimizer = rr.ShardedOptimizer(make, mine) if is_sharded else rr.LocalSGD(make(mine), mine, sync_every=2)
        step = getattr(optimizer, "step", optimizer)
        for _ in range(5) if name is None else ():
            step(copy.deepcopy(params))
        if name is not None:
            with pytest.raises(
                rr.InputError, match=f"{wrap}: the optimizer returned, or keeps, a new array for {name}"
            ):
                step(copy.deepcopy(params))

    run_ranks(2, program)


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_may_have_the_parameters_in_another_order(shared):
    """As dicts that are made from sets; two arrays are of one shape."""

    def program():
        names = ["b", "a", "c"] if rr.rank() else ["a", "c", "b"]
        params = {name: np.full(3, float(ord(name))) for name in names}
        optimizer = rr.ShardedOptimizer(Momentum, params, shared_parameters=shared)
        for step in range(3):
            optimizer.step({name: np.full(3, ord(name) * (0.0 + rr.rank() + step)) for name in reversed(names)})
        return {name: optimizer.params[name].copy() for name in "abc"}

    found, alone = run_ranks(2, program), {name: np.full(3, float(ord(name))) for name in "abc"}
    plain = Momentum(alone)
    for step in range(3):
        plain.step({name: np.full(3, ord(name) * (0.5 + step)) for name in "abc"})
    for each in found:
        np.testing.assert_allclose([each[name] for name in "abc"], [alone[name] for name in "abc"])


def test_shared_memory_is_refused_where_a_rank_has_other_parameters():
    def program():
        params = {"a": np.ones(2 + rr.rank()), "b": np.ones(3)}
        with pytest.raises(
            rr.InputError, match=r"parameter 'a' is float64\[3\] on rank 1, float64\[2\] on rank 0; expec"
        ):
            rr.ShardedOptimizer(Momentum, params, shared_parameters=True)

    run_ranks(2, program)


@pytest.mark.parametrize("form", [lambda each: [each], lambda each: {"of": (each,)}], ids=["list", "dict"])
@each_rank_of(2)
def test_an_elastic_state_has_sharded_optimizers_as_attributes_only(form):
    params = {"a": np.ones(4)}
    with pytest.raises(rr.InputError, match=r"ObjectState: optimizers\..*0 is a ShardedOptimizer inside of anoth"):
        rr.elastic.ObjectState(params=params, optimizers=form(rr.ShardedOptimizer(Momentum, params)))


class TwoMoments:
    """It keeps two arrays, and maybe more, for each parameter.

    make: makes that, of zeros by name.  find: returns the two, of a parameter's name and number.
    """

    def __init__(self, params, make, find):
        self.params, self.find = params, find
        self.kept = make({name: np.zeros_like(each) for name, each in trees.named_leaves(params)})

    def step(self, grads):
        grads = dict(trees.named_leaves(grads))
        for number, (name, param) in enumerate(trees.named_leaves(self.params)):
            first, second = self.find(self.kept, name, number)
            first[...] = 0.9 * first + grads[name]
            second[...] = 0.9 * second + grads[name] ** 2
            param -= 0.1 * first / (1 + np.sqrt(second))

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


@pytest.mark.parametrize(
    ("form", "make", "find"),
    [
        (
            dict,
            lambda zeros: {name: {"m": each, "t": np.int64(3), "v": each.copy()} for name, each in zeros.items()},
            lambda kept, name, number: (kept[name]["m"], kept[name]["v"]),
        ),
        (
            list,
            lambda zeros: [(each, each.copy()) for each in zeros.values()],
            lambda kept, name, number: kept[number],
        ),
        (
            list,
            lambda zeros: ([*zeros.values()], [each.copy() for each in zeros.values()]),
            lambda kept, name, number: [each[number] for each in kept],
        ),
        (
            dict,
            lambda zeros: [{name: each.copy() for name, each in zeros.items()} for _ in range(2)],
            lambda kept, name, number: [each[name] for each in kept],
        ),
    ],
    ids=["a dict for each", "a pair for each", "a pair of lists", "a pair of dicts"],
)
def test_what_is_kept_for_each_parameter_is_found_by_its_name(form, make, find):
    def new():
        arrays = [np.cos(np.arange(4.0) + at) for at in range(5)] + [np.array(2.0)]
        return arrays if form is list else dict(zip(["a", "b", "c", "x.a", "x.b", "x"], arrays, strict=True))

    def program(state=None):
        params, whole = new(), new()
        optimizer = rr.ShardedOptimizer(lambda pieces: TwoMoments(pieces, make, find), params)
        alone = TwoMoments(whole, make, find)
        if state is not None:
            optimizer.load_state_dict(state)
            alone.load_state_dict(copy.deepcopy(state))
        for step in range(3):
            grads = grads_of(whole, step, rank=0)
            alone.step(grads)
            optimizer.step(grads)
            same(params, whole)
        same(optimizer.state_dict(), alone.state_dict())
        return optimizer.state_dict()

    states = run_ranks(4, program, settings=DETERMINISTIC)  # equal gradients of 4 or 2 ranks have the mean itself
    run_ranks(2, lambda: program(states[1]), settings=DETERMINISTIC)


def test_what_belongs_to_no_parameter_and_is_not_alike_is_told_on_all_ranks():
    class Together(Momentum):
        def __init__(self, params):
            super().__init__(params)
            self.velocity = {"all": np.zeros(sum(each.size for _, each in trees.named_leaves(params)))}

        def step(self, grads):
            self.velocity["all"] += np.concatenate([each for _, each in trees.named_leaves(grads)])

    @each_rank_of(3)
    def program():
        params = {"a": np.ones(4), "b": np.ones(3)}
        optimizer = rr.ShardedOptimizer(Together, params)
        optimizer.step(params)
        with pytest.raises(
            rr.InputError, match=r"'velocity.all' in the optimizer's state .* \(3,\), \(2,\), \(2,\) by"
        ):
            optimizer.state_dict()
        assert rr.allreduce(1.0) == 1

    program()


def test_what_an_optimizer_has_got_since_is_gone_when_it_goes_back():
    class Lazy:
        """Momentum that begins in the second step."""

        def __init__(self, params):
            self.params = params

        def step(self, grads):
            grads = [each.copy() for each in grads]
            for each, velocity in zip(grads, getattr(self, "velocity", ()), strict=False):
                each += velocity / 2
            self.velocity = grads
            for param, each in zip(self.params, grads, strict=True):
                param -= each

    def program():
        params = [np.arange(5.0), np.ones(2)]
        state = rr.elastic.ObjectState(params=params, optimizer=rr.ShardedOptimizer(Lazy, params))
        results = []
        for _ in range(2):
            for _ in range(2):
                state.optimizer.step([np.full(5, rr.rank() + 1.0), np.ones(2)])
            results.append([each.tolist() for each in params])
            state.restore()
        assert results[0] == results[1]

    run_ranks(2, program)
