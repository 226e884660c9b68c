"""ShardedOptimizer for arrays of NumPy and CuPy: an optimizer of this rank's pieces of the parameters."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringreduce import runtime
from ringreduce.api.objects import allgather_object
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.arrays import trees
from ringreduce.arrays.memory import Memory
from ringreduce.checks import divergence
from ringreduce.collectives.ops import Average, ReduceOp
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.frameworks.registry import adapter, adapter_of
from ringreduce.numpy.optimizer import Accumulation, InPlace, has_state_dict
from ringreduce.optim.exchange import Exchange
from ringreduce.optim.shards import Shards, check_apart, exchange_of, flat
from ringreduce.optim.shared_parameters import SharedParameters


def ShardedOptimizer(  # noqa: N802 - beside DistributedOptimizer
    optimizer: Any,
    named_parameters: Any = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    shared_parameters: bool = False,
    **options: Any,
) -> Any:
    """An optimizer that is sharded over P ranks: each keeps 1/P of the state and updates 1/P of the elements.

    optimizer: a torch.optim.Optimizer: see `ringreduce.torch.ShardedOptimizer`, which has further options. Else a
        function that makes one: it gets a tree of the form of the parameters, with this rank's piece of each, in one
        dimension, in the memory of the parameters. It returns an object with step(grads), or a callable on gradients,
        which changes these in place, element by element, and returns no new ones. It is called again when the ranks
        have changed.
    named_parameters: the parameters: an array of NumPy or CuPy, or nested dicts, lists and tuples of arrays.
    shared_parameters: of NumPy's arrays and ranks on one host: have the parameters in memory that all ranks share, with
        the first rank's values; all ranks make the optimizer at once. From then on `optimizer.params` are the
        parameters. What changes them between steps, one rank does for all.
    compression, backward_passes_per_step, op, gradient_predivide_factor, process_set: see DistributedOptimizer.

    What is returned has step(grads), and is callable: it takes whole gradients in the form of the parameters; when it
    returns, all ranks have all parameters. Its `optimizer` is the user's own. state_dict(), which all ranks call, is
    what an optimizer of whole parameters has there, or in its attributes: what it keeps for a parameter is found by the
    parameter's name, wherever that stands, as in velocity.w or adam.w.m. load_state_dict() takes it at any number of
    ranks, and is no collective.

    Cost:   the bytes of a DistributedOptimizer, in two halves.
    Raises: InputError for arrays that cannot be changed in place, or have memory in common, as one array under two
            names has; and for gradients of another form.
    Source: ZeRO's stage 1 (Rajbhandari et al., 2020).

    >>> optimizer = ShardedOptimizer(lambda pieces: Momentum(pieces, lr=0.1), params)                  # doctest: +SKIP
    >>> optimizer.step(grads)                                                                          # doctest: +SKIP
    """
    exchange = exchange_of(op, compression, gradient_predivide_factor, process_set)
    if (name := adapter_of(optimizer)) == "torch":
        settings = compression, backward_passes_per_step, op, gradient_predivide_factor, process_set
        make = adapter(name).ShardedOptimizer
        return make(optimizer, named_parameters, *settings, shared_parameters=shared_parameters, **options)
    if options:
        raise InputError(f"ShardedOptimizer: {', '.join(options)}: only for a torch optimizer")
    if not callable(optimizer) or named_parameters is None:
        raise InputError(
            f"ShardedOptimizer: got a {type(optimizer).__qualname__}; expected a torch optimizer, or a function that "
            "makes an optimizer of pieces, and the parameters: ShardedOptimizer(lambda pieces: Adam(pieces), params)"
        )
    accumulation = Accumulation(backward_passes_per_step, averages=False)
    return ShardedArrays(optimizer, named_parameters, exchange, accumulation, shared_parameters)


class Place(NamedTuple):
    """The name of a parameter in that of a leaf of the state."""

    before: str
    name: str
    after: str


class ShardedArrays:
    """See `ShardedOptimizer`."""

    is_sharded = True  # see `elastic.state.State`
    optimizer: Any

    def __init__(
        self, make: Callable[[Any], Any], params: Any, exchange: Exchange, accumulation: Accumulation, shares: bool
    ) -> None:
        self._make, self.params, self._exchange, self._accumulation = make, params, exchange, accumulation
        self.shares_parameters = shares
        self._shared = SharedParameters(exchange) if shares and exchange.size > 1 else None
        self._params = dict(trees.named_leaves(params))
        for name, each in self._params.items():
            flags = None if isinstance(each, np.ma.MaskedArray) else getattr(each, "flags", None)
            if flags is None or not (flags.c_contiguous and getattr(flags, "writeable", True)):
                raise InputError(
                    f"ShardedOptimizer: parameter {name!r} is a {type(each).__qualname__} that cannot be cut in place; "
                    "expected a writable, contiguous array of NumPy or CuPy"
                )
        check_apart([Memory.of(name, each) for name, each in self._params.items()])
        if self._shared is not None:
            self._params = self._shared.move(self._params)
            self.params = trees.map_leaves(params, lambda name, _: self._params[name])
        self._divide()
        self._whole: Callable[[], Any] | None = self._initial
        """The whole state, from when it was loaded to the next step: till then ranks may change."""

    def _initial(self) -> Any:
        return _state_of(self._make(trees.map_leaves(self.params, lambda _, array: array.copy())))

    def _divide(self) -> None:
        by_type: dict[Any, list[str]] = {}
        for name, array in sorted(self._params.items()):  # ranks may have them in another order
            by_type.setdefault(array.dtype, []).append(name)
        self._shards: list[tuple[list[str], Shards]] = []
        self._pieces: dict[str, Any] = {}
        for dtype, names in by_type.items():
            arrays = [self._params[name] for name in names]
            shards = Shards(f"params of {dtype}", names, [each.size for each in arrays], self._exchange)
            self._shards.append((names, shards))
            self._pieces |= zip(names, shards.own(flat(arrays)), strict=True)
        self._given = trees.map_leaves(self.params, lambda name, _: self._pieces[name])
        self.optimizer = self._make(self._given)
        self._in_place = InPlace("ShardedOptimizer", self.optimizer, self._pieces)

    def step(self, grads: Any) -> Any:
        """Reduce these gradients to the ranks that own them, step this rank's pieces, and get all ranks' parameters.

        Returns what the user's optimizer does; before the last pass of a step None.
        """
        self._look_at_the_world()
        if not self._accumulation.add(grads):
            return None
        grads = self._accumulation.take(grads)
        whole = self._whole_gradients(grads)
        if self._exchange.size > 1:
            divergence.compare(self, self._exchange.process_set, self._alike)
        pieces = self._reduced(whole)
        self._whole = None
        if self._shared is not None:
            self._shared.barrier().wait()
        function = getattr(self.optimizer, "step", self.optimizer)
        result = function(trees.map_leaves(grads, lambda name, _: pieces[name]))
        for name, piece in trees.named_leaves(self._given):
            if piece is not self._pieces[name]:
                raise InputError(
                    f"ShardedOptimizer: the optimizer has another array for {name!r} now; change it in place"
                )
        self._in_place.check(result)
        if self._shared is not None:
            self._shared.barrier().wait()
        else:
            for begun in [shards.gather([self._params[name] for name in names]) for names, shards in self._shards]:
                begun.wait()
        runtime.stepped(id(self))
        return result

    __call__ = step

    def _whole_gradients(self, grads: Any) -> dict[str, Any]:
        """By name; raises InputError where they are not of the form of the parameters."""
        numbers = int | float | complex
        named = trees.named_leaves(grads)
        whole = {name: np.asarray(each) if isinstance(each, numbers) else each for name, each in named}
        shapes = [{name: each.shape for name, each in arrays.items()} for arrays in (whole, self._params)]
        for name in {**shapes[1], **shapes[0]} if shapes[0] != shapes[1] else ():
            got, expected = (each.get(name, "none") for each in shapes)
            if got != expected:
                raise InputError(
                    "ShardedOptimizer: the gradients are not of the form and shapes of the parameters: the shape of "
                    f"{name!r} is {got}, expected {expected}"
                )
        return whole

    def _reduced(self, whole: dict[str, Any]) -> dict[str, Any]:
        """This rank's pieces of the gradients, of their types; those that are reduced together have one meanwhile."""
        begun = [
            (names, shards.reduce(_of_one_type([whole[name] for name in names]))) for names, shards in self._shards
        ]
        pieces = [pair for names, handle in begun for pair in zip(names, handle.wait(), strict=True)]
        return {name: piece.astype(whole[name].dtype, copy=False) for name, piece in pieces}

    def _alike(self) -> dict[str, Any]:
        """What all ranks should have alike: the parameters, and numbers such as a learning rate."""
        numbers = {name: each for name, each in trees.leaves(_state_of(self.optimizer)) if not hasattr(each, "shape")}
        return {**numbers, **self._params}

    def _look_at_the_world(self) -> None:
        self._exchange.check_world()
        if all(shards.fits(self._exchange) for _, shards in self._shards):
            return
        if self._whole is None:
            raise InputError(
                "ShardedOptimizer: the ranks have changed, and each had its part of the state; go back to a commit, or "
                "load_state_dict() of what state_dict() returned"
            )
        whole, live = self._whole(), dict(trees.named_leaves(_state_of(self.optimizer)))
        places_of = _finder(self._params, dict(trees.named_leaves(whole)))
        self._divide()

        def newest(leaf: str, value: Any) -> Any:
            """What was set since, such as a learning rate, stays."""
            return value if places_of(leaf, value) else live.get(leaf, value)

        self.load_state_dict(trees.map_leaves(whole, newest))

    def state_dict(self) -> Any:
        """The whole state, the same on all ranks, which must all call it.  Cost: memory for it, and an allgather.

        Raises: InputError on all ranks for an array that is in no tree of the form of the parameters, and is another
                one on each rank.
        """
        if self._whole is not None:
            return self._whole()
        state, whole = _state_of(self.optimizer), dict[str, Any]()
        found: dict[tuple[str, str], dict[str, Any]] = collections.defaultdict(dict)
        of = self._places_of_all(state)
        for leaf, array in trees.named_leaves(state):
            if leaf in of:
                before, name, after = of[leaf]
                found[before, after][name] = array
        for (before, after), arrays in found.items():  # such as velocity
            for names, shards in self._shards:
                kinds = [arrays[name].dtype for name in names if name in arrays]
                full = [self._params[name].astype(kind) for kind in kinds[:1] for name in names]
                for name, piece in zip(names, shards.own(flat(full)), strict=False):
                    piece[...] = arrays.get(name, 0)
                if full:
                    shards.gather(full, f".{before}{after}").wait()
                whole |= {before + name + after: each for name, each in zip(names, full, strict=False)}
        return trees.map_leaves(state, lambda leaf, own: whole.get(leaf, own))

    def _places_of_all(self, state: Any) -> dict[str, Place]:
        """Where a parameter's name stands in those of its leaves; the ranks agree, whose pieces have other shapes."""
        arrays = {leaf: each for leaf, each in trees.named_leaves(state) if _shape(each)}
        places_of = _finder(self._pieces, arrays)
        own = {leaf: (each.shape, places_of(leaf, each)) for leaf, each in arrays.items()}
        taking_part = self._exchange.process_set
        said = allgather_object(own, "ShardedOptimizer", taking_part) if self._exchange.size > 1 else [own]
        of = {}
        for leaf in dict.fromkeys(itertools.chain(*said)):
            shapes, places = zip(*(each.get(leaf, (None, ())) for each in said), strict=True)
            agreed = [place for place in places[0] if all(place in each for each in places)]
            if agreed:
                of[leaf] = agreed[0]
            elif len(set(shapes)) > 1:
                raise InputError(
                    f"ShardedOptimizer: {leaf!r} in the optimizer's state belongs to no parameter by its name, and its "
                    f"shape is {', '.join(map(str, shapes))} by rank; expected what it keeps for each parameter in "
                    "dicts or lists of their form, as velocity.layers.0.w, or adam.layers.0.w.m"
                )
        return of

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned, at any number of ranks; not a collective."""
        self._accumulation.reset()
        own = dict(trees.named_leaves(_state_of(self.optimizer)))
        bounds = {name: at for names, shards in self._shards for name, at in zip(names, shards.bounds, strict=True)}
        places_of = _finder(self._params, dict(trees.named_leaves(state_dict)))

        def cut(leaf: str, value: Any) -> Any:
            if not (places := places_of(leaf, value)):
                return copy.copy(value)
            name = places[0].name
            if own.get(leaf) is self._pieces[name]:  # the parameters themselves
                self._params[name][...] = value
                return own[leaf]
            low, high = bounds[name]
            return flat([value])[0][low:high].copy()

        pieces = trees.map_leaves(state_dict, cut)
        if has_state_dict(self.optimizer):
            self.optimizer.load_state_dict(pieces)
        else:
            vars(self.optimizer).clear()  # of what has come since
            vars(self.optimizer).update(pieces)
        self._whole = lambda: state_dict


def _finder(params: dict[str, Any], leaves: dict[str, Any]) -> Callable[[str, Any], list[Place]]:
    """Finds where a parameter's name stands in that of a leaf: w in velocity.w, adam.w.m and state.w.0; best first.

    Where other parameters' names stand in its place, there are leaves of the shapes of these: a number of steps for
    each is no parameter's. The longest name counts, then the place with most parameters, then the last.
    params: all, or all pieces.  leaves: all of the state.
    """

    @functools.cache
    def parameters_at(before: str, after: str) -> int:
        """How many have a leaf there; 0 where one of these is of another shape."""
        found = {name: leaves[before + name + after] for name in params if before + name + after in leaves}
        return len(found) if all(_shape(each) == params[name].shape for name, each in found.items()) else 0

    def places(leaf: str, value: Any) -> list[Place]:
        shape, whole, found = _shape(value), f".{leaf}.", list[tuple[Any, Place]]()
        for name in (each for each in params if params[each].shape == shape and (not each or f".{each}." in whole)):
            part = f".{name}."
            for at in [at for at in range(len(leaf)) if whole.startswith(part, at)] if name else [len(leaf)]:
                place = Place(leaf[:at], name, leaf[at + len(name) :])
                if count := parameters_at(place.before, place.after):
                    found.append(((len(name), count, at), place))
        return [place for _, place in sorted(found, key=operator.itemgetter(0), reverse=True)]

    return places


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _of_one_type(arrays: list[Any]) -> list[Any]:
    """Arrays that are reduced in one memory; all of the widest type, where they differ and are numbers."""
    types = {each.dtype for each in arrays}
    if len(types) == 1 or any(each.kind not in "biufc" for each in types):
        return arrays
    return [each.astype(np.result_type(*types), copy=False) for each in arrays]


def _state_of(optimizer: Any) -> Any:
    """Its state_dict(), or where it has none its attributes."""
    return optimizer.state_dict() if has_state_dict(optimizer) else dict(vars(optimizer))
