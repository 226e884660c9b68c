"""The collectives on JAX's arrays: eagerly and inside jit, their gradients and batches."""

import functools
import re

import jax
import jax.experimental.sparse
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
import ringreduce.jax as hvd
from ringreduce.arrays.libraries import as_kind, to_numpy
from ringreduce.jax import host, primitive
from tests.support import names, operations
from tests.support.reference import REDUCES

RANK, SIZE = hvd.rank(), hvd.size()
RANKS = np.arange(SIZE)
CALL = re.compile("test_ops.py:[0-9]+")


def own(*shape, rank=RANK):
    """Other values on every rank and at every place."""
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + 100 * rank


def close(result, expected):
    assert isinstance(result, jax.Array)
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op", "reduce"), REDUCES.items())
@pytest.mark.quick
def test_allreduce(run, op, reduce):
    parts = np.stack([own(2, 3, rank=rank) for rank in RANKS]).astype(np.float64)
    close(run(lambda x: hvd.allreduce(x, op=op))(own(2, 3)), reduce(parts, axis=0))


@pytest.mark.quick
@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_results_and_gradients(run, name):
    case, call = operations.case(name, RANK, SIZE), functools.partial(operations.OPERATIONS[name].call, hvd)
    close(run(call)(jnp.float32(case.x)), case.result)
    close(run(jax.grad(lambda x: (case.weights * call(x)).sum()))(jnp.float32(case.x)), case.gradient)


@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_results_and_gradients_in_shard_map_on_one_device(name):
    """JAX's types say there by which axes of a mesh arrays vary."""
    case, call = operations.case(name, RANK, SIZE), functools.partial(operations.OPERATIONS[name].call, hvd)
    mesh, rows = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)), jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows)
    close(jax.jit(mapped)(jnp.float32(case.x)), case.result)
    close(jax.jit(jax.grad(lambda x: (case.weights * mapped(x)).sum()))(jnp.float32(case.x)), case.gradient)


@pytest.mark.parametrize("name", operations.UNEVEN)
def test_as_many_rows_as_a_rank_likes_outside_jit(name):
    case = operations.case(name, RANK, SIZE)
    close(operations.UNEVEN[name].call(hvd, jnp.float32(case.x)), case.result)


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"])
def test_types_stay(run, name):
    values = jnp.asarray([RANK == 0, True, False]).astype(name)
    result = run(lambda x: hvd.allreduce(x, op=hvd.Sum))(values)
    assert result.dtype == values.dtype
    expected = [True, True, False] if name == "bool" else [1, SIZE, 0]
    np.testing.assert_array_equal(np.asarray(result).astype(complex), np.asarray(expected, complex))


@pytest.mark.parametrize("name", ["uint2", "int4", "float4_e2m1fn", "float8_e4m3fn"])
def test_numbers_shorter_than_a_byte_are_moved(run, name):
    """XLA has several of them in a byte, inside a program only."""
    values = (jnp.arange(5) % 2 + (RANK == 0)).astype(name)
    root = [1, 2, 1, 2, 1]
    close(run(lambda x: hvd.broadcast(x, 0))(values), root)
    gathered = run(hvd.allgather)(values)
    assert gathered.dtype == name
    close(gathered, [*root, *[0, 1, 0, 1, 0] * (SIZE - 1)])


def test_64_bits_become_what_jax_makes_of_them():
    assert hvd.allreduce(np.float64(RANK)).dtype == jnp.float32
    jax.config.update("jax_enable_x64", True)
    try:
        assert hvd.allreduce(jnp.float64(RANK)).dtype == jnp.float64
        close(jax.jit(hvd.allreduce)(jnp.float64(RANK)), RANKS.mean())
    finally:
        jax.config.update("jax_enable_x64", False)


def test_numbers_and_trees(run):
    tree = {"loss": 0.5 + RANK, "count": RANK, "layers": [own(2), (own(3), None)], "none": None}
    compiled = run in (jax.jit, hvd.jit)
    result = run(hvd.allreduce)(jax.tree.map(jnp.float32, tree) if compiled else tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    close(result["loss"], 0.5 + RANKS.mean())
    close(result["count"], RANKS.mean())
    close(result["layers"][1][0], own(3, rank=RANKS.mean()))
    assert hvd.allreduce({}) == {}


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(run, compression):
    result = run(lambda x: hvd.allreduce(x, compression=compression))(jnp.float32([1 + RANK, 1 / 3]))
    kind = np.float16 if compression is hvd.Compression.fp16 else ml_dtypes.bfloat16
    close(result, np.float64([(1 + RANKS).mean(), 1 / 3]).astype(kind).astype(np.float32))
    assert result.dtype == jnp.float32


@pytest.mark.quick
def test_compression_to_8_bits(run):
    wire, rows = hvd.Compression.int8.everywhere, own(30, 20)
    result = run(lambda x: hvd.allreduce(x, compression=wire))(rows)
    mean, largest = own(30, 20, rank=RANKS.mean()), np.abs(own(30, 20, rank=SIZE - 1)).max()
    error = np.abs(np.float64(result) - mean).max()
    assert error < largest / 100
    assert (error > 0) == (SIZE > 1)
    gradient = run(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum, compression=wire) * rows).sum()))(rows)
    np.testing.assert_allclose(gradient, SIZE * mean, atol=SIZE * largest / 100)
    with pytest.raises(rr.InputError, match=r"reducescatter: op=Average with compression=Compression\.int8"):
        hvd.reducescatter(rows, compression=wire)


@pytest.mark.quick
def test_broadcast(run):
    root = SIZE - 1
    result = run(lambda tree: hvd.broadcast(tree, root))({"a": own(2, 2), "b": jnp.int32(RANK)})
    close(result["a"], own(2, 2, rank=root))
    assert result["b"] == root


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
@pytest.mark.quick
def test_random_keys(run, kind):
    keys = [jax.random.split(jax.random.key(rank, impl=kind), SIZE) for rank in RANKS]
    moved = [
        (run(lambda tree: hvd.broadcast(tree, SIZE - 1))({"key": keys[RANK][0], "w": own(2)})["key"], keys[-1][0]),
        (run(hvd.allgather)(keys[RANK]), jnp.concatenate(keys)),
        (run(hvd.alltoall)(keys[RANK]), jnp.stack([each[RANK] for each in keys])),
        (hvd.alltoall(keys[RANK], [1] * SIZE)[0], jnp.stack([each[RANK] for each in keys])),
        (hvd.broadcast_object([keys[RANK]], 0)[0], keys[0]),
    ]
    for result, expected in moved:
        assert (result == expected).all()
    with pytest.raises(rr.InputError, match="allgather: a 0-d array has no rows"):
        hvd.allgather(keys[RANK][0])


def test_alltoall_with_splits():
    _, received = hvd.alltoall(own(SIZE * (RANK + 1), 2), [RANK + 1] * SIZE)
    assert received.tolist() == [rank + 1 for rank in RANKS]
    with pytest.raises(rr.InputError, match=r"alltoall: splits inside jax.jit, grad or vmap, where the number"):
        jax.jit(lambda x: hvd.alltoall(x, [1] * SIZE))(own(SIZE))


@pytest.mark.quick
def test_barrier(run):
    def program(x):
        hvd.barrier()
        return hvd.allreduce(x)

    close(run(program)(own(1)), own(1, rank=RANKS.mean()))


@pytest.mark.quick
def test_program_order(run):
    channel = hvd.ordered()
    close(run(lambda x: hvd.allreduce(x, process_set=channel))(own(2)), own(2, rank=RANKS.mean()))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_process_set(run, size):
    if size >= SIZE:
        return  # it would be that of all ranks
    members = list(range(SIZE - size, SIZE))
    some = hvd.add_process_set(members)
    if some.included():
        close(run(lambda x: hvd.allreduce(x, process_set=some))(own(2)), own(2, rank=np.mean(members)))
        gathered = run(lambda x: hvd.allgather(x, process_set=some))(own(2))
        close(gathered, np.concatenate([own(2, rank=rank) for rank in members]))
        parts = np.array_split(own(5, rank=np.mean(members)), size)
        close(run(lambda x: hvd.reducescatter(x, process_set=some))(own(5)), parts[some.rank()])
    assert hvd.remove_process_set(some)


def test_gradient_of_a_tree_with_whole_numbers(run):
    def loss(x):
        reduced = hvd.allreduce({"x": x, "count": jnp.int32([1, 2])}, op=hvd.Sum)
        return (reduced["x"] * reduced["count"]).sum()

    close(run(jax.grad(loss))(own(2)), [SIZE * SIZE, 2 * SIZE * SIZE])


@pytest.mark.quick
def test_gradients_that_are_numbers_of_python(run):
    """As those of optax's line searches, inside of a program."""

    def transposed(like, gradient):
        return jax.linear_transpose(lambda x: hvd.allreduce(x.sum(), op=hvd.Sum), like)(gradient)[0]

    close(run(lambda x: transposed(x, 1.0))(own(2)), [SIZE, SIZE])
    close(run(lambda x: jax.jvp(lambda by: transposed(x, by), (1.0,), (2.0,))[1])(own(2)), [2 * SIZE, 2 * SIZE])


def test_an_op_without_a_gradient_says_so(run):
    with pytest.raises(rr.InputError, match=r"allreduce \(test_ops.py:\d+\): op=Max has no gradient; expected Average"):
        run(jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum()))(own(2))
    stopped = run(jax.grad(lambda x: (x * hvd.allreduce(jax.lax.stop_gradient(x), op=hvd.Max)).sum()))(own(2))
    close(stopped, own(2, rank=SIZE - 1))


def test_second_derivative(run):
    cube = jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 3).sum())
    total = SIZE * SIZE * 1.0
    close(run(jax.grad(lambda x: cube(x).sum()))(jnp.full(2, float(SIZE))), np.full(2, 6 * total * SIZE * SIZE))


def test_vmap(run):
    batch = own(4, 2, 3)
    close(run(jax.vmap(hvd.allreduce))(batch), own(4, 2, 3, rank=RANKS.mean()))
    close(run(jax.vmap(hvd.allreduce, in_axes=1, out_axes=1))(batch), own(4, 2, 3, rank=RANKS.mean()))
    everyones = np.stack([own(4, 2, 3, rank=rank) for rank in RANKS], 1)
    close(run(jax.vmap(hvd.allgather))(batch), everyones.reshape(4, 2 * SIZE, 3))
    squares = run(jax.vmap(jax.grad(lambda x: (hvd.allreduce(x) ** 2).sum())))(batch)
    close(squares, 2 * own(4, 2, 3, rank=RANKS.mean()))


def test_the_members_of_a_batch_would_mix_in_an_adasum(run):
    with pytest.raises(rr.InputError, match=r"allreduce \(test_ops.py:\d+\): op=Adasum under jax.vmap would mix the"):
        run(jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum)))(own(4, 2, 3))


def test_control_flow(jit):
    def program(x):
        total, _ = jax.lax.scan(lambda carry, _: (hvd.allreduce(carry) + RANK, None), x, None, length=3)
        total = jax.lax.while_loop(lambda each: each[0] < 1000, lambda each: hvd.allreduce(each, op=hvd.Sum) + 1, total)
        return jax.lax.cond(total[0] > 0, hvd.allreduce, lambda each: each, total)

    value = RANKS * 1.0
    for _ in range(3):
        value = value.mean() + RANKS
    while value[0] < 1000:
        value = np.full(SIZE, value.sum() + 1)
    close(jit(program)(jnp.float32([RANK])), [value.mean()])


def test_many_in_one_program_run_in_its_order(jit):
    """Rank by rank another of them has the most to compute before; two jitted functions are in flight at once."""

    @jit
    def program(x):
        results = []
        for number in range(20):
            work = x
            for _ in range(20 if number % SIZE == RANK else 1):
                work = jnp.sin(work @ work)
            results.append(hvd.allreduce(jnp.full(5 + number, float(number)) + 0 * work[0, 0], op=hvd.Sum))
        return results

    first, second = program(jnp.eye(50)), program(jnp.ones((50, 50)))
    between = hvd.allreduce(float(RANK))
    for results in (second, first):
        for number, result in enumerate(results):
            close(result, np.full(5 + number, float(number * SIZE)))
    close(between, RANKS.mean())


@pytest.mark.parametrize("count", [1, 100_003, 3_000_000])
def test_large_arrays_beside_a_computation(jit, count):
    """XLA has as many threads as the machine has cores, and one of them waits here."""
    program = jit(lambda x: hvd.allreduce(jnp.sqrt(x * x), op=hvd.Sum))
    other = jax.jit(lambda x: (x @ x).sum())
    waiting = [(program(jnp.full(count, 1.0 + RANK)), other(jnp.ones((300, 300)))) for _ in range(4)]
    for reduced, computed in waiting:
        close(reduced[:: max(1, count // 7)], (1.0 + RANKS).sum())
        assert computed == 300**3


def test_memory_is_not_copied(run, monkeypatch):
    """Results are written into the memory that JAX gives back; eagerly arguments are read where they are, too."""
    pointers = []
    collective = host.HostCollective.run

    def recorded(self, arrays, *arguments):
        results = collective(self, arrays, *arguments)
        pointers.append((arrays[0].ctypes.data, results[0].ctypes.data))
        return results

    monkeypatch.setattr(host.HostCollective, "run", recorded)
    x = own(1000)
    result = run(hvd.allreduce)(x)
    close(result, own(1000, rank=RANKS.mean()))
    ((argument, written),) = pointers
    assert written == result.unsafe_buffer_pointer()
    assert run in (jax.jit, hvd.jit) or argument == x.unsafe_buffer_pointer()


def test_a_program_that_would_leave_its_host_is_refused():
    with pytest.raises(
        rr.InputError, match=r"allreduce \(.*\): jax.export of a function with coll.*the part without them"
    ):
        jax.export.export(jax.jit(hvd.allreduce))(own(3))


def test_what_was_exported_is_called_beside_collectives(run):
    exported = jax.export.export(jax.jit(jnp.square))(own(3))
    close(
        run(lambda x: hvd.allreduce(exported.call(x)))(own(3)), np.mean([own(3, rank=each) ** 2 for each in RANKS], 0)
    )


@pytest.mark.skipif(SIZE == 1, reason="ranks must differ")
def test_after_an_error_in_a_program_that_takes_long_jax_goes_on(jit):
    @jit
    def program(x):
        w = jnp.full((500, 500), x[0])
        for _ in range(5):
            w = jnp.tanh(w @ w / 500)
        return hvd.allreduce(x + 0 * w[0, 0], name="w") + 0 * w[0, 0]

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MismatchError: rank 1 of \d, allreduce 'w'"):
        jax.block_until_ready(program(jnp.ones(3 + (RANK > 0))))
    for step in range(2):
        close(program(jnp.full(3, 1.0 + step + RANK)), np.full(3, 1 + step + RANKS.mean()))


def test_empty_arrays(run):
    assert run(hvd.allreduce)({"none": jnp.zeros((0, 3)), "two": own(2)})["none"].shape == (0, 3)


def test_results_are_where_the_arguments_are():
    x = jax.device_put(own(3), jax.devices()[0])
    assert hvd.allreduce(x).devices() == x.devices()
    assert hvd.allreduce(x).sharding == x.sharding


@pytest.mark.quick
def test_a_mismatch_is_told_and_the_job_goes_on():
    if SIZE == 1:
        pytest.skip("takes two ranks")
    with pytest.raises(rr.MismatchError, match=r"rank 1 of \d, allreduce 'w' .*float32\[3\], but rank 0 has float32"):
        hvd.allreduce({"w": own(2 + (RANK > 0))})
    with pytest.raises(Exception, match=r"(?s)MismatchError: rank 1 of \d, allreduce 'w' .*: float32\[3\], but rank 0"):
        jax.block_until_ready(jax.jit(hvd.allreduce)({"w": own(2 + (RANK > 0))}))
    close(jax.jit(hvd.allreduce)(own(2)), own(2, rank=RANKS.mean()))


def test_rows_that_differ_inside_jit_are_told():
    """On each rank whose number is not their mean, which is none here."""
    if SIZE == 1:
        pytest.skip("takes two ranks")
    with pytest.raises(Exception, match=r"(?s)allgather \(.*the result has shape .* must pass the same number"):
        jax.block_until_ready(jax.jit(hvd.allgather)(own(2 + (RANK == 0))))
    close(jax.jit(hvd.allreduce)(own(2)), own(2, rank=RANKS.mean()))


def deleted():
    array = own(2) * 1
    array.delete()
    return array


@pytest.mark.skipif(SIZE == 1, reason="ranks must differ")
@pytest.mark.parametrize(
    ("call", "refuses", "why"),
    [
        (hvd.allgather, lambda: 1.0, "a 0-d array has no rows"),
        (hvd.allreduce, lambda: jax.nn.relu, "pass only the arrays of a tree"),
        (hvd.allreduce, deleted, "the array has been deleted, as by donate_argnums; pass what the function"),
        (lambda x: hvd.allreduce(x, op=None if x.shape else "mean"), lambda: jnp.float32(1), "op='mean'; expected"),
        (lambda x: hvd.alltoall(x, [2] + [0] * (SIZE - 1)), lambda: "x", "pass only the arrays of a tree"),
    ],
)
def test_what_one_rank_refuses_fails_on_all_and_keeps_its_place(call, refuses, why):
    told = re.escape(why) if RANK == 1 else rf"^rank 1 of {SIZE}, .* was refused: .*{re.escape(why)}"
    with pytest.raises(rr.InputError if RANK == 1 else rr.MismatchError, match=told):
        call(refuses() if RANK == 1 else own(2))
    close(hvd.allreduce(own(2)), own(2, rank=RANKS.mean()))


def test_what_cannot_be_reduced_is_told():
    with pytest.raises(rr.InputError, match=r"allreduce 'f': .*pass only the arrays of a tree, such as equinox.filter"):
        hvd.allreduce({"f": jax.nn.relu})
    with pytest.raises(
        rr.InputError, match=r"allreduce 'k': elements of type key.* not reduced: they can be broadcast"
    ):
        hvd.allreduce({"k": jax.random.key(0)})
    sparse = jax.experimental.sparse.BCOO.fromdense(jnp.roll(jnp.arange(1.0, 5.0), RANK) * (jnp.arange(4) > 2))
    for call in hvd.allreduce, hvd.allgather, hvd.reducescatter, jax.jit(hvd.allreduce):
        with pytest.raises(rr.InputError, match=r" 'm': a BCOO's indices would change; pass matrix\.todense\(\)"):
            call({"m": sparse})
    close(hvd.broadcast_parameters({"m": sparse})["m"].todense(), [0, 0, 0, 4])
    with pytest.raises(rr.InputError, match="allgather 'a': a 0-d array has no rows"):
        hvd.allgather({"a": 1.0})
    with pytest.raises(rr.InputError, match="allgather 'w': a 0-d array has no rows"):
        hvd.allgather(1.0, name="w")
    if SIZE > 1:
        with pytest.raises(rr.InputError, match=r"alltoall 'b\.c': .* rows cannot be split equally"):
            hvd.alltoall({"a": own(SIZE), "b": {"c": own(SIZE + 1)}})
    with pytest.raises(rr.InputError, match="was not added"):
        jax.jit(lambda x: hvd.allreduce(x, process_set=hvd.ProcessSet([0])))(own(1))
    with pytest.raises(AttributeError, match="no allreduce_: JAX's arrays cannot be changed in place; use allreduce"):
        hvd.allreduce_(own(1))
    with pytest.raises(AttributeError, match=r"no allreduce_async: JAX dispatches .* ringreduce.allreduce_async takes"):
        hvd.allreduce_async(own(1))


@pytest.mark.parametrize("integers", [2**40, np.int64(-(2**31) - 1), np.array([0, 2**32 + 1], np.uint64)])
def test_an_integer_that_jax_would_cut_is_refused(integers):
    message = r"'s': an integer does not fit u?int32, JAX's longest; pass floats, or call jax.config"
    calls = [functools.partial(hvd.broadcast, root_rank=0), functools.partial(hvd.allreduce, op=hvd.Sum)]
    for call in calls if isinstance(integers, int) else [*calls, hvd.broadcast_parameters]:
        with pytest.raises(rr.InputError, match=message):
            call({"s": integers})
    assert hvd.broadcast_parameters({"s": np.int64(-(2**31))})["s"] == -(2**31)


MESH = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
ROWS = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("x"))
EVERYWHERE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())


@pytest.mark.parametrize("place", [ROWS, EVERYWHERE], ids=["sharded", "replicated"])
@pytest.mark.parametrize(
    "program",
    [
        jax.jit(hvd.allreduce),
        hvd.jit(hvd.allreduce),
        jax.jit(lambda x: jax.lax.cond(x[0] > 0, hvd.allreduce, jnp.sqrt, x)),
        jax.jit(
            jax.shard_map(lambda x: hvd.allreduce(x, name="w"), mesh=MESH, in_specs=ROWS.spec, out_specs=ROWS.spec)
        ),
        lambda x: jax.pmap(hvd.allreduce)(np.asarray(x).reshape(2, 4)),
    ],
    ids=["jit", "hvd.jit", "cond", "shard_map", "pmap"],
)
def test_a_program_of_several_devices_is_refused_and_what_it_says_works(program, place):
    x = jax.device_put(own(8), place)
    with pytest.raises(rr.InputError, match=r"allreduce \(.*\): this program runs on 2 devices .* between jitted"):
        program(x)
    squares = hvd.allreduce(jax.jit(jnp.square)(x))
    assert squares.sharding == place
    close(jax.jit(jnp.sqrt)(squares), np.sqrt(np.mean([np.square(own(8, rank=each)) for each in RANKS], axis=0)))


def test_results_that_cannot_be_sharded_as_the_arguments_are_on_all_of_their_devices():
    part = hvd.reducescatter(jax.device_put(own(2 * SIZE + 2, 1), ROWS))
    assert part.sharding == (ROWS if len(part) % 2 == 0 else EVERYWHERE)
    close(part, np.array_split(own(2 * SIZE + 2, 1, rank=RANKS.mean()), SIZE)[RANK])


def test_what_is_ours_has_its_names():
    names.assert_has_them(hvd)


def test_a_jax_without_what_is_relied_on_is_refused(monkeypatch):
    monkeypatch.delattr(primitive.mlir, "TokenSet")
    with pytest.raises(
        ImportError, match=r"ringreduce.jax needs jax\.interpreters\.mlir\.TokenSet, which JAX .* lacks"
    ):
        primitive.check_names()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_parameter_servers_arrays_come_back_as_jaxs(dtype):
    original = jax.device_put(jnp.arange(3.0, dtype=dtype), jax.devices()[1])
    values = to_numpy(original)
    assert values.dtype == np.float32
    back = as_kind(original, values)
    assert (back.dtype, back.sharding, back.tolist()) == (original.dtype, original.sharding, [0, 1, 2])


def helper(x):
    return hvd.allreduce(x)


HISTORIES = {
    "make_jaxpr": lambda: jax.make_jaxpr(helper)(own(1, 4)),
    "lower": lambda: jax.jit(helper).lower(own(7)).compile(),
    "hvd.jit's lower": lambda: hvd.jit(helper).lower(own(8)),
    "eval_shape": lambda: jax.eval_shape(helper, own(9)),
    "a gradient": lambda: jax.make_jaxpr(jax.vmap(jax.grad(lambda x: helper(x).sum())))(own(3, 2)),
    "clear_caches": lambda: (jax.jit(lambda x: helper(x[:1])).lower(own(6)), jax.clear_caches()),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_names_do_not_depend_on_what_a_rank_has_looked_at(jit, history):
    """Else rank 0 would wait for another name than the others."""
    if RANK == 0:
        history()

    @jit
    def program(x):
        first, second = jax.tree.map(helper, [x, x[:1]])
        total = jax.lax.fori_loop(0, 2, lambda _, each: helper(each) + RANK, first)
        return total + helper(second) + jax.jit(helper)(x)

    mean = RANKS.mean()
    close(program(own(5)), 2 * own(5, rank=mean) + own(1, rank=mean) + mean + RANK)


@pytest.mark.skipif(SIZE == 1, reason="takes two ranks")
def test_names_do_not_depend_on_what_another_process_set_has_run(run):
    alone, others = hvd.add_process_set([0]), hvd.add_process_set(list(range(1, SIZE)))
    mine = others if RANK else alone
    summed = lambda x, process_set: hvd.allreduce(x, process_set=process_set, op=hvd.Sum)  # noqa: E731
    for width in (2, 3, 4) if RANK else (3, 5):
        close(run(lambda x: summed(x, mine))(own(width)), sum(own(width, rank=each) for each in mine.ranks))
    close(run(lambda x: summed(x, hvd.global_process_set))(own(4)), sum(own(4, rank=each) for each in RANKS))
    for each in (alone, others):
        hvd.remove_process_set(each)


def test_collectives_of_one_line_have_a_name_each_and_shapes_are_no_part_of_it(monkeypatch):
    """In the branches of a condition, too: ranks that differ in it must not take one for the other."""
    names = []
    monkeypatch.setattr(primitive.HostCollective, "run_into", lambda self, arrays, results, name: names.append(name))

    @jax.jit
    def program(x):
        jax.lax.cond(x[0] > 0, helper, lambda x: 2 * helper(x), x)
        return jax.tree.map(helper, [x, x[:1]])

    for width in (2, 3):
        for sign in (1, -1):
            jax.block_until_ready(program(sign * jnp.ones(width)))
    first = f"jit_program.test_ops.py:{helper.__code__.co_firstlineno + 1}"
    assert {names[0], names[3]} == {first, f"{first}.1"}
    assert names == 2 * [names[0], f"{first}.2", f"{first}.3", names[3], f"{first}.2", f"{first}.3"]
