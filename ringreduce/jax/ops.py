"""The collectives on JAX's arrays and trees of them, by Horovod's names and arguments.

They work eagerly, inside jax.jit, and under jax.grad and jax.vmap. A tree is reduced whole, as a group: one agreement,
few messages. Results are JAX arrays where the arguments are.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce import runtime
from ringreduce.api import broadcast as broadcasts
from ringreduce.api import gather, reduce
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.process_sets import placed as in_place
from ringreduce.arrays.dtypes import check_reducible, element_type
from ringreduce.collectives.ops import Average
from ringreduce.compression import Compression, check_compression, wire_of
from ringreduce.errors import InputError, UnsupportedArrayError
from ringreduce.execution.signature import calling_line
from ringreduce.frameworks.collective import Call, with_signature_of
from ringreduce.jax.host import HostCollective
from ringreduce.jax.primitive import bind, held, in_program, placed
from ringreduce.runtime.submit import which_op

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allgather", "grouped_allreduce"]
__all__ += ["grouped_reducescatter", "reducescatter"]

MOVING = "broadcast", "allgather", "alltoall"  # the collectives that random keys can take part in


@with_signature_of(reduce.allreduce)
def allreduce(call: Call) -> Any:
    """Reduce an array, or a tree of arrays, over all ranks; the same bits on every rank.

    tensor:   arrays, Refs and numbers in any tree that JAX knows; equal in form, shapes and types on all ranks.
    Gradient: for Average and Sum the same allreduce, compressed too; for other ops InputError.
    vmap:     the same allreduce of the whole batch; for Adasum, whose members would mix, InputError.
    Cost:     as `ringreduce.grouped_allreduce`; on the CPU no copies, inside jit neither.
    Raises:   as `ringreduce.allreduce`. Inside jit what ranks find out together is a JaxRuntimeError with that text.
    Source:   Horovod's allreduce.
    """
    return _on_leaves("allreduce", call.tensor, call)


@with_signature_of(gather.allgather)
def allgather(call: Call) -> Any:
    """Concatenate the arrays of all ranks along dim 0, in rank order; of a tree each array.

    Shape:    as `ringreduce.allgather`; inside jit, and under grad, all ranks pass the same number of rows.
    Gradient: this rank's rows of the result's gradient, averaged over the ranks.
    Source:   Horovod's allgather.
    """
    return _on_leaves("allgather", call.tensor, call)


@with_signature_of(broadcasts.broadcast)
def broadcast(call: Call) -> Any:
    """The root's array, or tree of arrays, on every rank; otherwise as `ringreduce.broadcast`.

    Gradient: on the root the result's, averaged over the ranks; elsewhere zeros.
    Source:   Horovod's broadcast.
    """
    return _on_leaves("broadcast", call.tensor, call)


@with_signature_of(gather.alltoall)
def alltoall(call: Call) -> Any:
    """Send each rank its part of the rows, and return what all ranks sent to this one, in rank order.

    splits:   the rows for each rank, (size,), and the result is (rows, received_splits): for one array, and outside of
              jit and grad, since no rank knows there how many rows it will get. None: equal parts.
    Gradient: sent back to where the rows came from.
    Source:   Horovod's alltoall.
    """
    if call.splits is None:
        return _on_leaves("alltoall", call.tensor, call)
    if isinstance(call.tensor, jax.core.Tracer) or isinstance(call.splits, jax.core.Tracer):
        raise InputError(
            "alltoall: splits inside jax.jit, grad or vmap, where the number of received rows must be known in "
            "advance; "
            "expected None: pad to equal parts, or call it outside"
        )
    tensor = held(call.tensor)
    make = functools.partial(_array, "alltoall", "", tensor)
    sent = np.asarray(in_place("alltoall", call.name, call.process_set, make))
    rows, received = gather.alltoall(sent, np.asarray(call.splits), call.name, call.process_set)
    return _like(tensor, placed(rows, tensor)), jax.device_put(received)


@with_signature_of(reduce.reducescatter)
def reducescatter(call: Call) -> Any:
    """Reduce over all ranks; returns this rank's part of the rows, of a tree those of each array.

    Gradient: an allgather of the parts' gradients, times both factors, and for Sum times the number of ranks.
    Otherwise as `ringreduce.reducescatter`.
    Source: Horovod's reducescatter.
    """
    return _on_leaves("reducescatter", call.tensor, call)


grouped_allreduce = allreduce
grouped_allgather = allgather
grouped_reducescatter = reducescatter


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it; inside jit it has its place in the order of the collectives."""
    runtime.current("barrier")
    number_of(process_set, "barrier")
    bind(HostCollective("barrier", calling_line(), process_set=process_set), [])


def _on_leaves(function: str, tree: Any, call: Call) -> Any:
    """The tree with what a collective makes of its arrays."""
    runtime.current(function)
    number_of(call.process_set, function)
    if not jax.tree.leaves(tree):
        return tree
    make = functools.partial(_taken_apart, function, tree, call)
    made = make() if in_program() else in_place(function, call.name, call.process_set, make)
    results = bind(made.collective, [array for array, _ in made.pairs])
    restored = [
        _like(leaf, made.compression.decompress(result, context))
        for leaf, result, (_, context) in zip(made.leaves, results, made.pairs, strict=True)
    ]
    return jax.tree.unflatten(made.form, restored)


class _Made(NamedTuple):
    """What a call of a collective is made of."""

    collective: HostCollective
    leaves: list[Any]
    form: Any
    compression: Any
    pairs: list[tuple[Any, Any]]  # of an array that travels, and what `compression` undoes that by


def _taken_apart(function: str, tree: Any, call: Call) -> _Made:
    """Raises InputError where the tree cannot travel."""
    paths, form = jax.tree_util.tree_flatten_with_path(tree, None if function == "broadcast" else _is_sparse)
    leaves = [held(leaf) for _, leaf in paths]
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)
    compression = getattr(call, "compression", Compression.none)
    check_compression(compression)
    averages = hasattr(call, "op") and which_op(function, getattr(call, "average", None), call.op) is Average
    said = [own or call.name or "" for own in names]  # in errors
    pairs = []
    for own, leaf in zip(said, leaves, strict=True):
        array = _array(function, own, float(leaf) if averages and type(leaf) is int else leaf)
        pairs.append(compression.compress(array))
    own_ones = {"place": calling_line(), "names": None if names == ("",) else names}
    travelling = {"compression": wire_of(compression) or Compression.none}  # others compress here
    collective = HostCollective.of(function, vars(call) | own_ones | travelling)
    for own, leaf in zip(said, leaves, strict=True):
        if collective.by_rows and not jnp.ndim(leaf):
            raise InputError(f"{function}{_quoted(own)}: a 0-d array has no rows; pass one of at least 1 dimension")
        if function == "alltoall":
            try:
                gather.equal_splits(len(leaf), call.process_set.size() or 1)
            except InputError as error:
                raise InputError(f"{function}{_quoted(own)}: {error}") from None
    return _Made(collective, leaves, form, compression, pairs)


def _is_sparse(node: Any) -> bool:
    """A sparse matrix, whose indices are leaves beside its elements: only as a whole they mean something."""
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(node, sparse.JAXSparse)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf: Any, result: Any) -> Any:
    """The result, as random keys where the leaf was some."""
    return jax.random.wrap_key_data(result, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else result


def _array(function: str, name: str, leaf: Any) -> Any:
    """The leaf as JAX's array, or what stands for one; of random keys their data, where it is moved only."""
    if _is_key(leaf) and function in MOVING:
        return jax.random.key_data(leaf)
    if _is_sparse(leaf):
        why = f"a {type(leaf).__name__}'s indices would change"
        cure = "pass matrix.todense(), or matrix.data where all ranks have the same indices"
        raise UnsupportedArrayError(f"{function}{_quoted(name)}: {why}; {cure}")
    try:
        array = jnp.asarray(leaf)
        element = element_type(array.dtype)
        fits = _fits(leaf, array.dtype)
    except OverflowError:  # of an integer of Python's
        fits = False
    except (TypeError, UnsupportedArrayError) as exc:
        cure = "pass only the arrays of a tree, such as equinox.filter(tree, equinox.is_array)"
        raise UnsupportedArrayError(f"{function}{_quoted(name)}: {exc}; {cure}") from exc
    if not fits:
        longest = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", np.int64))
        cure = "pass floats, or call jax.config.update('jax_enable_x64', True) first"
        raise InputError(f"{function}{_quoted(name)}: an integer does not fit {longest}, JAX's longest; {cure}")
    if not isinstance(array, jax.core.Tracer) and array.is_deleted():
        cure = "pass what the function that it was donated to has returned"
        raise InputError(f"{function}{_quoted(name)}: the array has been deleted, as by donate_argnums; {cure}")
    if function not in MOVING:
        check_reducible(element, f"{function}{_quoted(name)}: ")
    return array


def _fits(leaf: Any, dtype: Any) -> bool:
    """False where JAX, without jax_enable_x64, has kept the lower half of an integer of NumPy's."""
    is_numpys = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu"
    return not is_numpys or leaf.dtype == dtype or np.array_equal(leaf.astype(dtype), leaf)


def _quoted(name: str) -> str:
    return f" {name!r}" if name else ""
