"""DistributedOptimizer for optax, value_and_grad, broadcast_parameters: against one process with the global batch."""

import collections
import functools
import typing

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import ringreduce as rr
import ringreduce.jax as hvd
from ringreduce import runtime

RANK, SIZE = hvd.rank(), hvd.size()
BATCH = 12  # for 1, 2, 3 and 4 ranks
STEPS = 50


def first_params(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"w": [jax.random.normal(key, shape) for key, shape in zip(keys, [(5, 7), (7, 2)], strict=True)]}


def loss_of(params, x):
    hidden = jnp.tanh(x @ params["w"][0])
    return ((hidden @ params["w"][1] - x.sum(1, keepdims=True)) ** 2).mean()


def batch(step):
    return jax.random.normal(jax.random.key(1000 + step), (BATCH, 5))


def share(step):
    return batch(step)[RANK::SIZE]


def train(optimizer, data, params, loss_and_gradients=None, steps=STEPS, jit=jax.jit):
    """The parameters after so many steps, each of one jitted function."""
    loss_and_gradients = loss_and_gradients or jax.value_and_grad(loss_of)

    @jit
    def step(params, state, x):
        _, gradients = loss_and_gradients(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for number in range(steps):
        params, state = step(params, state, data(number))
    return params


@functools.cache
def alone():
    return train(optax.adam(0.01), batch, first_params())


def check(params, expected, tolerance=1e-5):
    for mine, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)
    digests = hvd.allgather_object([np.asarray(each).tobytes() for each in jax.tree.leaves(params)])
    assert all(each == digests[0] for each in digests), "bit-identical"


@pytest.mark.quick
def test_trains_as_one_process_with_the_global_batch():
    params = hvd.broadcast_parameters(first_params(seed=RANK))
    check(train(hvd.DistributedOptimizer(optax.adam(0.01)), share, params), alone())


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 4.0},
        {"name": "gradients"},
        {"process_set": hvd.global_process_set},
    ],
)
def test_options_that_train_alike(options):
    """Adam does not see a factor that all gradients have, but for its epsilon."""
    optimizer = hvd.DistributedOptimizer(optax.adam(0.01), **options)
    check(train(optimizer, share, first_params()), alone(), 1e-4 if "op" in options else 1e-5)


def test_ringreduces_own_knows_optax():
    check(train(rr.DistributedOptimizer(optax.adam(0.01)), share, first_params()), alone())
    assert isinstance(rr.DistributedOptimizer(optax.sgd(1.0)), optax.GradientTransformation)


def test_value_and_grad():
    check(train(optax.adam(0.01), share, first_params(), hvd.value_and_grad(loss_of)), alone())
    loss, _ = hvd.value_and_grad(loss_of)(first_params(), share(0))
    assert loss == loss_of(first_params(), share(0)), "this rank's own"
    (_, aux), both = hvd.value_and_grad(lambda a, b: ((a * b).sum(), RANK), (0, 1), has_aux=True)(
        jnp.float32([RANK]), jnp.float32([2.0])
    )
    mean = (SIZE - 1) / 2
    assert (aux, both[0][0], both[1][0]) == (RANK, 2, mean)


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8.everywhere])
def test_compression(compression):
    compressed = train(hvd.DistributedOptimizer(optax.sgd(0.01), compression), share, first_params())
    check(compressed, train(optax.sgd(0.01), batch, first_params()), 0.02)


@pytest.mark.parametrize("jit", [True, False])
def test_accumulation(jit):
    optimizer = hvd.DistributedOptimizer(optax.adam(0.01), backward_passes_per_step=3)
    update = jax.jit(optimizer.update) if jit else optimizer.update
    params, passes = first_params(), 0
    expected = train(
        optax.adam(0.01), lambda step: jnp.concatenate([batch(3 * step + k) for k in range(3)]), params, steps=2
    )
    state = optimizer.init(params)
    for number in range(6):
        updates, state = update(jax.grad(loss_of)(params, share(number)), state, params)
        passes = (passes + 1) % 3
        assert state.passes == passes
        assert all((each == 0).all() for each in jax.tree.leaves(updates)) == (passes > 0)
        params = optax.apply_updates(params, updates)
    check(params, expected, 1e-4)


class WithoutSteps(typing.NamedTuple):
    """A state of a number that is no array, and of one that becomes wider."""

    count: int
    moved: jax.Array


def widening():
    """A transformation whose updates and state are wider than the gradients."""

    def update(gradients, state, params=None):
        wide = jax.tree.map(jnp.float32, gradients)
        return jax.tree.map(lambda each: -0.1 * each, wide), WithoutSteps(
            state.count + 1, state.moved + wide["b"].sum()
        )

    return optax.GradientTransformation(lambda params: WithoutSteps(0, params["b"].sum()), update)


ADAM = optax.adam(0.1, mu_dtype=jnp.float32)
TYPES = {
    "wider moments": ADAM,
    "wider accumulator": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32),
    "wider everything": widening(),
    "masked": optax.masked(ADAM, {"w": True, "b": False, "n": None}),
    "partition": optax.partition({"a": ADAM, "b": optax.set_to_zero()}, {"w": "a", "b": "b", "n": None}),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 10)),
    "nothing": optax.identity(),
}


@pytest.mark.parametrize("inner", TYPES.values(), ids=TYPES)
def test_accumulation_keeps_the_types_that_the_optimizer_makes(inner, jit):
    """Of updates in each pass, and of the state, so that a program is compiled once; the sum is exact enough."""
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.ones(2), "n": None}
    gradients = jax.tree.map(lambda each: (each * (1 + RANK)).astype(each.dtype), params)
    types = lambda tree: jax.tree.map(lambda each: each.dtype, tree)  # noqa: E731
    plain, optimizer = (hvd.DistributedOptimizer(inner, backward_passes_per_step=passes) for passes in (1, 3))
    expected, _ = jit(plain.update)(jax.tree.map(lambda each: 3 * each, gradients), plain.init(params), params)
    for update in (optimizer.update, jit(optimizer.update)):
        state = optimizer.init(params)
        for passes in (1, 2, 0):
            updates, state = update(gradients, state, params)
            assert types(updates) == types(expected)
            assert state.passes == passes
    check(updates, expected)


def test_accumulation_where_jax_promotes_no_types(jit):
    params = {"w": jnp.zeros(2, jnp.bfloat16)}
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=2)
    with jax.numpy_dtype_promotion("strict"):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = jit(optimizer.update)({"w": jnp.full(2, 1.0 + RANK, jnp.bfloat16)}, state, params)
    assert updates["w"].tolist() == [-1.0 - SIZE] * 2


def test_accumulation_in_a_loop_of_jax_and_whole_numbers():
    """As many passes as bfloat16 could not count; the gradient of a whole number is float0, which no rank reduces."""
    passes = 300
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=passes)
    params = {"w": jnp.zeros(2, jnp.bfloat16)}

    def one(state, _):
        updates, state = optimizer.update({"w": jnp.full(2, 1.0 + RANK, jnp.bfloat16)}, state, params)
        return state, updates["w"]

    _, updates = jax.jit(lambda state: jax.lax.scan(one, state, None, length=passes))(optimizer.init(params))
    np.testing.assert_array_equal(np.float32(updates[:-1]), 0)
    np.testing.assert_allclose(np.float32(updates[-1]), -passes * (SIZE + 1) / 2, rtol=1 / 128)
    mixed = {"w": jnp.ones(2), "count": jnp.arange(3), "z": 1j * jnp.ones(2)}
    loss = lambda each: (1 + RANK) * (each["w"].sum() + each["z"].imag.sum())  # noqa: E731
    gradients = jax.grad(loss, allow_int=True)(mixed)
    for passes in (1, 2):
        own = optax.masked(optax.sgd(1.0), {"w": True, "count": False, "z": True})
        optimizer = hvd.DistributedOptimizer(own, backward_passes_per_step=passes)
        state = optimizer.init(mixed)
        for _ in range(passes):
            updates, state = optimizer.update(gradients, state, mixed)
        assert updates["count"].dtype == jax.dtypes.float0
        np.testing.assert_allclose(updates["w"], -passes * (SIZE + 1) / 2)
        np.testing.assert_allclose(updates["z"], 1j * passes * (SIZE + 1) / 2)


def test_adasum_reduces_the_updates():
    if SIZE == 3:
        pytest.skip("takes a power of two")
    params = {"w": jnp.zeros(4)}
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.5), op=hvd.Adasum)
    gradient = {"w": jnp.eye(4)[RANK] * (RANK + 1)}
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.5 * (rank + 1) if rank < SIZE else 0 for rank in range(4)], rtol=1e-6)


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
COMBINED = {
    "chain": lambda wrap: optax.chain(wrap(optax.clip_by_global_norm(1.0)), optax.sgd(SCHEDULE)),
    "inject_hyperparams inside": lambda wrap: wrap(optax.inject_hyperparams(optax.sgd)(SCHEDULE)),
    "inject_hyperparams outside": lambda wrap: optax.inject_hyperparams(lambda rate: wrap(optax.sgd(rate)))(SCHEDULE),
    "MultiSteps inside": lambda wrap: wrap(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "MultiSteps outside": lambda wrap: optax.MultiSteps(wrap(optax.adam(0.1)), 2).gradient_transformation(),
    "apply_if_finite inside": lambda wrap: wrap(optax.apply_if_finite(optax.adam(0.1), 3)),
    "multi_transform outside": lambda wrap: optax.multi_transform(
        {"a": wrap(optax.sgd(0.1)), "b": wrap(optax.adam(0.1))}, {"w": ["a", "b"]}
    ),
}


@pytest.mark.parametrize("combined", COMBINED.values(), ids=COMBINED)
def test_inside_and_outside_of_optaxs_own(combined):
    mine = train(combined(hvd.DistributedOptimizer), share, first_params(), steps=4, jit=hvd.jit)
    check(mine, train(combined(lambda same: same), batch, first_params(), steps=4))


def test_a_module_of_equinox():
    def make(seed):
        return eqx.nn.MLP(5, 1, 8, 2, key=jax.random.key(seed))

    def loss(model, x):
        return ((jax.vmap(model)(x) - x.sum(1, keepdims=True)) ** 2).mean()

    def trained(optimizer, data, model):
        @eqx.filter_jit
        def step(model, state, x):
            gradients = eqx.filter_grad(loss)(model, x)
            updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), state

        state = optimizer.init(eqx.filter(model, eqx.is_array))
        for number in range(STEPS):
            model, state = step(model, state, data(number))
        return eqx.filter(model, eqx.is_array)

    model = hvd.broadcast_parameters(make(RANK))
    assert model.activation is jax.nn.relu
    check(trained(hvd.DistributedOptimizer(optax.adam(0.01)), share, model), trained(optax.adam(0.01), batch, make(0)))


class Dense(linen.Module):
    """Two layers of flax's older kind, whose parameters are dicts."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(8)(x)))


def test_a_module_of_flax_linen():
    model = Dense()

    def loss(params, x):
        return ((model.apply(params, x) - x.sum(1, keepdims=True)) ** 2).mean()

    def trained(optimizer, data, params):
        @jax.jit
        def step(state, x):
            return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

        state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
        for number in range(STEPS):
            state = step(state, data(number))
        return state.params

    params = hvd.broadcast_parameters(model.init(jax.random.key(RANK), batch(0)))
    alone = trained(optax.adam(0.01), batch, model.init(jax.random.key(0), batch(0)))
    check(trained(hvd.DistributedOptimizer(optax.adam(0.01)), share, params), alone)


def test_a_whole_train_state():
    """Its functions, which each rank has made itself, stay; its step is a number of Python's."""

    def made(rank):
        variables = Dense().init(jax.random.key(rank), batch(0))
        state = TrainState.create(apply_fn=Dense().apply, params=variables, tx=optax.adam(0.01))
        return state.replace(step=3 + rank)

    root = SIZE - 1
    own = made(RANK)
    state = hvd.broadcast_parameters(own, root)
    assert (state.step, type(state.step)) == (3 + root, int)
    assert state.tx is own.tx
    check(state.params, made(root).params, 0)
    check(state.opt_state, own.opt_state, 0)
    gradients = jax.tree.map(jnp.ones_like, state.params)
    assert state.apply_gradients(grads=gradients).step == 4 + root


@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_a_number_may_be_an_array_on_the_root_alone(root):
    """As the step of a state that has trained, or that one rank has restored."""
    step, rate = (jnp.int32(5), 0.1) if root == RANK else (0, jnp.float32(RANK))
    received = hvd.broadcast_parameters(
        {"step": step, "rate": rate, "key": jax.random.key(RANK), "w": jnp.full(3, RANK)}, root
    )
    assert (received["step"], received["step"].dtype, received["rate"]) == (5, jnp.int32, 0.1)
    assert received["key"] == jax.random.key(root)
    np.testing.assert_array_equal(received["w"], root)


class Twins(typing.NamedTuple):
    """A node whose children have one name."""

    first: typing.Any
    second: typing.Any


_TWIN = jax.tree_util.GetAttrKey("twin")
jax.tree_util.register_pytree_with_keys(
    Twins, lambda twins: ([(_TWIN, each) for each in twins], None), lambda _, twins: Twins(*twins)
)


@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_leaves_of_one_name_are_told_apart(root):
    received = hvd.broadcast_parameters([Twins(RANK, RANK + 10), Twins(jnp.full(2, RANK), 5 + RANK)], root)
    assert (*received[0], received[1].second) == (root, root + 10, root + 5)
    np.testing.assert_array_equal(received[1].first, root)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.uint8, np.bool_, jnp.bfloat16.dtype.type])
def test_a_number_of_numpy_is_an_array(kind):
    received = hvd.broadcast_parameters({"name": np.str_("mlp"), "rate": kind(RANK), "step": RANK})
    assert isinstance(received["rate"], jax.Array)
    assert received["rate"].dtype == jnp.asarray(kind(0)).dtype
    assert (received["name"], received["rate"], received["step"]) == ("mlp", 0, 0)


class Net(nnx.Module):
    """Two layers of flax's newer kind, which hold their parameters."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.first, self.last = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def test_a_module_of_flax_nnx():
    def loss(model, x):
        return ((model(x) - x.sum(1, keepdims=True)) ** 2).mean()

    def trained(transformation, data, model):
        @nnx.jit
        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(loss)(model, x))

        optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
        for number in range(STEPS):
            step(model, optimizer, data(number))
        return nnx.state(model)

    model = Net(RANK)
    nnx.update(model, hvd.broadcast_parameters(nnx.state(model)))
    check(trained(hvd.DistributedOptimizer(optax.adam(0.01)), share, model), trained(optax.adam(0.01), batch, Net(0)))


def test_a_checkpoint_of_orbax(tmp_path):
    """What the root restored, sharded as it was saved."""
    rows = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.arange(8.0) + RANK, rows), "step": jnp.int32(RANK)}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", params)
    received = hvd.broadcast_parameters(restored)
    assert (received["w"].sharding, received["w"].tolist()) == (rows, list(range(8)))
    assert received["step"] == 0


def test_a_ref_is_written_to(run):
    """The leaves of nnx.state, where flax keeps variables in Refs."""
    weights, own = jax.new_ref(jnp.arange(3.0) + RANK), jax.random.key(RANK)
    state = {"key": jax.new_ref(own), "w": weights, "step": RANK}

    def mean_and_root(weights):
        mean = hvd.allreduce({"w": weights})["w"]
        return mean, hvd.broadcast_parameters({"w": weights})["w"][...]

    mean, root = run(mean_and_root)(weights)
    np.testing.assert_allclose(mean, np.arange(3) + (SIZE - 1) / 2)
    assert root.tolist() == weights[...].tolist() == [0, 1, 2]
    received = hvd.broadcast_parameters(state)
    assert received["w"] is weights
    assert received["key"][...] == jax.random.key(0)


@pytest.mark.parametrize(("only", "masks"), [((), 1), ((nnx.Param,), SIZE)])
def test_the_random_keys_of_a_module_are_the_roots_unless_only_parameters_are_broadcast(only, masks):
    net = nnx.Sequential(nnx.Linear(5, 8, rngs=nnx.Rngs(RANK)), nnx.Dropout(0.5, rngs=nnx.Rngs(RANK)))
    nnx.update(net, hvd.broadcast_parameters(nnx.state(net, *only)))
    draws = hvd.allgather_object(np.asarray(net(jnp.ones((1, 5)))).tobytes())
    assert len(set(draws)) == masks


@pytest.mark.parametrize("skipping", ["apply_if_finite", "MultiSteps"])
def test_what_skips_steps_is_wrapped(skipping):
    """One rank's gradient is NaN: all skip that step."""

    def around(optimizer):
        if skipping == "MultiSteps":
            return optax.MultiSteps(optimizer, 1, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()
        return optax.apply_if_finite(optimizer, 5)

    params = {"w": jnp.ones(3)}
    optimizer = hvd.DistributedOptimizer(around(optax.sgd(1.0)))
    state = optimizer.init(params)
    for gradient, expected in ((jnp.nan if RANK == 0 else 1.0, 0.0), (1.0 + RANK, -1 - (SIZE - 1) / 2)):
        updates, state = jax.jit(optimizer.update)({"w": jnp.full(3, gradient)}, state, params)
        np.testing.assert_allclose(updates["w"], expected)


@pytest.mark.parametrize("conditional", [optax.conditionally_transform, optax.conditionally_mask])
def test_what_skips_steps_by_the_step_alone_may_be_around_it(conditional):
    optimizer = conditional(hvd.DistributedOptimizer(optax.sgd(1.0)), lambda step: step < 1)
    arguments = {"w": jnp.full(3, float(RANK))}, optimizer.init({"w": jnp.ones(3)})
    updates, _ = jax.jit(optimizer.update)(*arguments, value=float(RANK))
    np.testing.assert_allclose(updates["w"], -(SIZE - 1) / 2)


def test_parameters_may_be_donated(jit):
    """The step may use their memory, and the optimizer's, for its results."""
    optimizer = hvd.DistributedOptimizer(optax.adam(0.01))

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss_of)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    results = []
    for donated in ((), (0, 1)):
        params = first_params()
        state, compiled = optimizer.init(params), jit(step, donate_argnums=donated)
        for number in range(5):
            before = params
            params, state = compiled(params, state, share(number))
        assert before["w"][0].is_deleted() == bool(donated)
        results.append(params)
    check(results[1], results[0], 0)


Params = collections.namedtuple("Params", "w b")


class Module:
    """As flax registers its own: a node with keys."""

    def __init__(self, **variables):
        self.variables = variables


jax.tree_util.register_pytree_with_keys(
    Module,
    lambda module: (
        [(jax.tree_util.DictKey(key), module.variables[key]) for key in sorted(module.variables)],
        sorted(module.variables),
    ),
    lambda keys, leaves: Module(**dict(zip(keys, leaves, strict=True))),
)


def test_nodes_of_any_kind():
    tree = Module(dense=Params(jnp.full(3, float(RANK)), None), step=RANK, name="mlp", rate=0.5 + RANK)
    root = SIZE - 1
    received = hvd.broadcast_parameters(tree, root_rank=root).variables
    assert (received["name"], received["step"], received["rate"]) == ("mlp", root, 0.5 + root)
    assert type(received["step"]) is int
    assert isinstance(received["dense"], Params)
    assert received["dense"].w.tolist() == [root] * 3
    if SIZE > 1:
        with pytest.raises(rr.MismatchError, match=r"rank 1 of \d, allreduce 'dense.w' .*: float32\[4\], but rank 0"):
            hvd.allreduce(Module(dense=Params(jnp.ones(3 + (RANK > 0)), None)))


def test_a_rank_that_is_not_in_the_process_set_steps_alone():
    if SIZE < 2:
        return
    some = hvd.add_process_set([SIZE - 1])
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), process_set=some)
    updates, _ = jax.jit(optimizer.update)(jnp.float32([RANK]), optimizer.init(jnp.zeros(1)))
    assert updates == -RANK
    hvd.remove_process_set(some)


def test_a_process_set_that_is_gone_is_told():
    """Every rank would be outside of it."""
    gone = hvd.ProcessSet([SIZE - 1])
    gone.process_set_id = 99  # as one that was passed to an earlier init()
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), process_set=gone)
    with pytest.raises(ValueError, match="there is no process set 99"):
        jax.jit(optimizer.update)(jnp.float32([RANK]), optimizer.init(jnp.zeros(1)))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((optax.adam,), TypeError, "expected an optax gradient transformation, got a function; as in Distributed"),
        ((optax.sgd(1.0), hvd.Compression.none, 0), rr.InputError, "per_step=0; expected a whole number"),
        ((optax.sgd(1.0), hvd.Compression.none, 1, hvd.Max), rr.InputError, "op=Max; expected Average, Sum or Adasum"),
        ((optax.sgd(1.0), hvd.Compression.none, 1, hvd.Sum, 2.0), rr.InputError, r"factor=2.0 with op=Sum; it works"),
        ((optax.sgd(1.0), hvd.Compression.none, 1, hvd.Average, 0), rr.InputError, "factor=0; expected a number above"),
    ],
)
def test_wrong_arguments_are_told(arguments, error, says):
    with pytest.raises(error, match=says):
        hvd.DistributedOptimizer(*arguments)


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_are_recorded_also_inside_jit(compiled):
    optimizer, params = hvd.DistributedOptimizer(optax.MultiSteps(optax.sgd(0.1), 1)), first_params()
    state, recorder = optimizer.init(params), runtime.current("test").engine.recorder
    recorder.start()
    update = jax.jit(optimizer.update) if compiled else optimizer.update
    for step in range(5):
        _, state = update(jax.grad(loss_of)(params, share(step)), state, params)
        jax.block_until_ready(state)
    recorder.recording = False
    assert [each.number for each in recorder.steps][-4:] == [1, 2, 3, 4]
    assert all(each.waits or SIZE == 1 for each in list(recorder.steps)[-4:]), "the thread that waits is XLA's"
