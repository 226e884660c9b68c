"""The collectives on TensorFlow's tensors: eagerly and inside tf.function, their gradients, their order."""

import inspect
import re

import numpy as np
import pytest
import tensorflow as tf

import ringreduce as rr
import ringreduce.tensorflow as hvd
from tests.support import names, operations
from tests.support.reference import REDUCES

RANK, SIZE = hvd.rank(), hvd.size()
SCALES = "prescale_factor postscale_factor"
HOROVODS = {  # of 0.28.1, by position
    "allreduce": "tensor average device_dense device_sparse compression op "
    f"{SCALES} name process_set ignore_name_scope",
    "grouped_allreduce": "tensors average device_dense device_sparse compression op "
    f"{SCALES} process_set ignore_name_scope name",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": f"tensor device_dense compression op name process_set ignore_name_scope {SCALES}",
    "broadcast_object": "obj root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "grouped_reducescatter": f"tensors device_dense compression op process_set {SCALES}",
}
RANKS = np.arange(SIZE)
MEAN = (RANKS + 1).mean()


def own(*shape, rank=RANK):
    """Other values on every rank and at every place."""
    return tf.constant(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * rank)


def close(result, expected):
    assert isinstance(result, tf.Tensor)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op", "reduce"), REDUCES.items())
@pytest.mark.quick
def test_allreduce(run, op, reduce):
    parts = np.stack([own(2, 3, rank=rank) for rank in RANKS]).astype(np.float64)
    close(run(lambda x: hvd.allreduce(x, op=op))(own(2, 3)), reduce(parts, axis=0))


def test_compression(run):
    third = run(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16))(tf.constant([1 / 3]))
    assert third.dtype == tf.float32
    assert third[0] == np.float16(1 / 3)
    wire, rows = hvd.Compression.int8.everywhere, own(30, 20)
    encoded = run(lambda x: hvd.allreduce(x, compression=wire))(rows)
    error, largest = (
        np.abs(encoded.numpy() - own(30, 20).numpy() - 100 * (RANKS.mean() - RANK)).max(),
        np.max(own(30, 20, rank=SIZE - 1)),
    )
    assert error < largest / 100
    assert (error > 0) == (SIZE > 1)
    with pytest.raises(
        rr.InputError, match=r"IndexedSlices with compression=Compression\.int8\.everywhere; expected d"
    ):
        hvd.allreduce(tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]), tf.constant([2, 1])), compression=wire)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32])
def test_compressors_take_tensors(run, dtype):
    """As a script's own compressor calls Horovod's."""
    tensor = tf.cast(own(5), dtype)

    def there_and_back():
        wire, context = hvd.Compression.fp16.compress(tensor)
        return wire, hvd.Compression.fp16.decompress(wire, context)

    wire, found = run(there_and_back)()
    assert wire.dtype == (tf.float16 if dtype.is_floating else dtype)
    assert found.dtype == dtype
    np.testing.assert_allclose(tf.cast(found, tf.float64), tf.cast(tensor, tf.float64), rtol=2e-3)


@pytest.mark.parametrize("dtype", [tf.bool, tf.int8, tf.uint16, tf.int64, tf.float16, tf.bfloat16, tf.float64])
def test_types_stay(run, dtype):
    result = run(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.cast([RANK == 0, True, False], dtype))
    assert result.dtype == dtype
    expected = [True, True, False] if dtype == tf.bool else [1, SIZE, 0]
    np.testing.assert_array_equal(tf.cast(result, tf.float32), expected)


@pytest.mark.quick
def test_groups_of_several_types(run):
    a, b = run(lambda x, y: hvd.grouped_allreduce([x, y], op=hvd.Sum))(own(3), tf.constant([RANK]))
    close(a, sum(own(3, rank=rank) for rank in RANKS))
    assert b[0] == RANKS.sum()


def gradient(function):
    """Of the sum of the results, times another factor on every rank."""

    def of(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(function(x) * (RANK + 1.0))
        return tape.gradient(total, x)

    return of


@pytest.mark.quick
@pytest.mark.parametrize("name", operations.ALL)
def test_results_and_gradients(run, name):
    x, result, weights, of_x = operations.case(name, RANK, SIZE)

    @run
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = operations.ALL[name].call(hvd, x)
            total = tf.reduce_sum(found * tf.constant(weights, tf.float32))
        return found, tape.gradient(total, x)

    found, gradient = both(tf.constant(x, tf.float32))
    close(found, result)
    close(gradient, of_x)


@pytest.mark.quick
def test_splits_of_a_tensor_and_what_came(run):
    _, received = run(lambda x: hvd.alltoall(x, tf.ones(SIZE, tf.int32)))(own(SIZE))
    np.testing.assert_array_equal(received, np.ones(SIZE))


def test_gradient_in_a_group(run):
    function = lambda x: hvd.grouped_allreduce([x, tf.constant([1])])[0]  # noqa: E731
    close(run(gradient(function))(own(2)), [MEAN] * 2)


@pytest.mark.quick
def test_trees(run):
    tree = {"w": own(3), "rest": [tf.Variable(own(2)), (tf.constant(RANK), None)]}
    result = run(lambda: hvd.allreduce(tree, op=hvd.Sum))()
    close(result["w"], sum(own(3, rank=rank) for rank in RANKS))
    close(result["rest"][0], sum(own(2, rank=rank) for rank in RANKS))
    assert (result["rest"][1][0], result["rest"][1][1]) == (RANKS.sum(), None)
    close(run(gradient(lambda x: hvd.allreduce({"b": x, "a": [2 * x]})["a"][0]))(own(2)), [2 * MEAN] * 2)
    if SIZE > 1:
        with pytest.raises((rr.MismatchError, tf.errors.OpError), match="name 'c', but rank 0 has name 'b'"):
            run(lambda: hvd.allreduce({"a": own(2), "c" if RANK else "b": own(3)}))()
        hvd.barrier()


def test_gradient_of_gradient(run):
    close(run(gradient(gradient(lambda x: hvd.allreduce(x) ** 2 / 2)))(own(2)), [MEAN**2] * 2)


def test_an_op_without_gradient(run):
    with pytest.raises(Exception, match=r"op=Max has no gradient; expected Average or Sum, or tf.stop_gradient"):
        run(gradient(lambda x: hvd.allreduce(x, op=hvd.Max)))(own(2))


def slices():
    """This rank's row, and one that all have."""
    return tf.IndexedSlices(own(2, 2), tf.constant([RANK, 9]), tf.constant([10, 2]))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.quick
def test_sparse(run, op):
    result = run(lambda: hvd.allreduce(slices(), op=op))()
    assert isinstance(result, tf.IndexedSlices)
    assert len(result.indices) == 2 * SIZE
    dense = run(lambda: hvd.allreduce(tf.convert_to_tensor(slices()), op=op))()
    close(tf.convert_to_tensor(result), dense)
    with pytest.raises(Exception, match=r"op=Max of IndexedSlices; expected Average or Sum, or tf.convert_to_tensor"):
        run(lambda: hvd.allreduce(slices(), op=hvd.Max))()


def test_sparse_whole_numbers_are_averaged_as_dense_ones(run):
    rows = tf.IndexedSlices(tf.constant([[7 * RANK + 5]]), tf.constant([1]), tf.constant([2, 1]))
    result = tf.convert_to_tensor(run(lambda: hvd.allreduce(rows))())
    assert result.dtype == tf.int32
    assert result.numpy().tolist() == [[0], [sum((7 * rank + 5) // SIZE for rank in RANKS)]]


def test_in_loops_and_branches_all_has_its_order():
    """Unordered, ranks would do different operations at once: each has other shapes."""

    @tf.function
    def program(x):
        a, b = hvd.allreduce(x), hvd.allreduce(x[:1])
        for i in tf.range(5):
            gathered = hvd.allgather(tf.cast([i], tf.float32))
            if i % 2 == 0:
                b += hvd.broadcast(x[:1], 0) + tf.reduce_sum(gathered)
            hvd.barrier()
        return a, b, hvd.allreduce(x[:2], op=hvd.Max)

    for _ in range(10):
        a, b, most = program(own(3))
        mean = own(3) - 100 * RANK + 100 * RANKS.mean()
        close(a, mean)
        close(b, mean[:1] + 6 * SIZE)
        close(most, own(2, rank=SIZE - 1))


def test_what_is_ours_has_its_names():
    names.assert_has_them(hvd)


def test_every_name_of_horovods_is_there_or_says_what_to_use():
    with names.standing_in():
        assert names.unexplained("horovod.tensorflow") == []


@pytest.mark.quick
def test_graphs_of_tensorflow_1_are_refused(run):
    """Their operations have no order that all ranks share; and a tf.function that comes after is none of theirs."""
    with tf.Graph().as_default(), pytest.raises(rr.InputError, match=r"^allreduce: .* a graph of TensorFlow 1 .*eager"):
        hvd.allreduce(tf.constant([RANK]))
    assert run(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.constant([RANK]))[0] == RANKS.sum()


def test_xla_is_refused():
    with pytest.raises(Exception, match=r"XLA cannot call it .* pass jit_compile=False to model.compile"):
        tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(own(2))


SLICES = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]), tf.constant([2, 1]))
RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0]])
NO_TENSORS = [
    (hvd.allreduce, RAGGED, r"allreduce: a \S*RaggedTensor is no tensor; pass its values and its row_splits"),
    (
        lambda x: hvd.allgather(x, name="s"),
        tf.sparse.eye(2),
        r"allgather 's': a \S*SparseTensor is no tensor; pass its",
    ),
    (lambda x: hvd.allreduce({"a": own(1), "b": x}), RAGGED, r"allreduce 'b': a \S*RaggedTensor is no tensor"),
    (lambda x: hvd.grouped_allreduce([own(1), x]), RAGGED, r"allreduce, tensor 2 of 2: a \S*RaggedTensor is no tensor"),
    (lambda x: hvd.broadcast(x, 0), None, "broadcast: None is no tensor; leave it out on all ranks, or pass"),
]


@pytest.mark.parametrize(("call", "what", "why"), NO_TENSORS)
def test_what_is_no_tensor_is_named(run, call, what, why):
    with pytest.raises(Exception, match=why):  # in a graph AutoGraph quotes it
        run(lambda: call(what))()


@pytest.mark.skipif(SIZE == 1, reason="ranks must differ")
@pytest.mark.parametrize(
    ("call", "what", "why"),
    [
        (hvd.allreduce, RAGGED, "RaggedTensor is no tensor"),
        (lambda x: hvd.allreduce(SLICES, op=hvd.Sum if x is not None else hvd.Min), None, "op=Min of IndexedSlices; "),
        (lambda x: hvd.alltoall(own(SIZE), [1.0 if x is None else 1] * SIZE), None, "alltoall: splits of type float32"),
    ],
)
def test_what_one_rank_refuses_fails_on_all_and_keeps_its_place(call, what, why):
    told = why if RANK == 1 else rf"^rank 1 of {SIZE}, .* was refused: .*{why}"
    with pytest.raises(rr.InputError if RANK == 1 else rr.MismatchError, match=told):
        call(what if RANK == 1 else own(2))
    close(hvd.allreduce(own(2)), own(2, rank=RANKS.mean()))


@pytest.mark.skipif(SIZE == 1, reason="ranks must differ")
def test_a_mismatch_says_where(run):
    with pytest.raises((rr.MismatchError, tf.errors.OpError)) as error:
        run(lambda x: hvd.allreduce(x))(own(2 + (RANK > 0)))
    assert re.search(r"rank 1 of \d, allreduce .*: float32\[3\], but rank 0 has float32\[2\]", str(error.value))
    assert "test_ops.py" in str(error.value) or "autograph" in str(error.value)
    hvd.barrier()


@pytest.mark.skipif(SIZE == 1, reason="the only set is that of all ranks")
def test_a_process_set(run):
    others = hvd.add_process_set([SIZE - 1])
    if RANK == SIZE - 1:
        close(run(lambda x: hvd.allreduce(x, process_set=others))(own(2)), own(2))
    hvd.remove_process_set(others)


@pytest.mark.quick
def test_arguments_have_horovods_order():
    for name, order in HOROVODS.items():
        parameters = inspect.signature(getattr(hvd, name)).parameters.items()
        assert [each for each, it in parameters if it.kind is it.POSITIONAL_OR_KEYWORD] == order.split(), name


@pytest.mark.quick
def test_objects_by_position():
    last = hvd.add_process_set([SIZE - 1]) if SIZE > 1 else hvd.global_process_set
    assert hvd.broadcast_object({"of": RANK}, SIZE - 1, None, "b") == {"of": SIZE - 1}
    assert hvd.allgather_object(RANK, None, "g") == list(RANKS)
    if last.included():
        assert hvd.broadcast_object(RANK, SIZE - 1, None, "b", last) == SIZE - 1
        assert hvd.allgather_object(RANK, None, "g", last) == [SIZE - 1]
    hvd.remove_process_set(last)


@pytest.mark.quick
def test_devices_and_name_scopes_are_taken_without_effect(run):
    none, all_ranks = hvd.Compression.none, [own(SIZE, rank=rank) for rank in RANKS]
    close(run(lambda x: hvd.allreduce(x, None, "/cpu:0", "/cpu:0", none, hvd.Max))(own(SIZE)), all_ranks[-1])
    close(run(lambda x: hvd.broadcast(x, SIZE - 1, "b", True))(own(2)), own(2, rank=SIZE - 1))
    close(run(lambda x: hvd.reducescatter(x, "/cpu:0", op=hvd.Sum))(own(SIZE)), sum(all_ranks)[RANK : RANK + 1])
