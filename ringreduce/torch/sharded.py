"""ShardedOptimizer for PyTorch: each rank has the optimizer's state of a part of the parameters, and steps that."""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NoReturn

import torch

from ringreduce.api.objects import allgather_object
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.reduce import allreduce
from ringreduce.collectives.ops import Average, Max, ReduceOp, Sum
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.optim.exchange import check_passes
from ringreduce.optim.parameters import Named
from ringreduce.optim.shards import exchange_of
from ringreduce.torch.groups import Change, Groups, in_order_of
from ringreduce.torch.optimizer import check, named_of
from ringreduce.torch.outline import Outline
from ringreduce.torch.shards import Shard, ShardBucket, ShardReducer, flat, laid_out_as
from ringreduce.torch.wrapped import WrappedMixin, passed_on, wrap

NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
_REDUCED = "the reduced gradient"  # beside a piece's state, while all are divided anew
NUMBERS = ("step", "eta", "mu", "mu_product")  # of an optimizer's state: no elements of a parameter, whatever its shape


def ShardedOptimizer(  # noqa: N802 - beside DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    overlap: Iterable[torch.nn.Module] = (),
    shared_parameters: bool = False,
) -> Any:
    """Wrap a torch optimizer so that each of P ranks keeps 1/P of its state and updates 1/P of the elements.

    Gradients are reduced to the ranks that own their elements while backward runs, the user's own class steps a flat
    piece of each parameter, and the owners give the parameters to all. With RINGREDUCE_DETERMINISTIC=1 the parameters
    have the bits of a DistributedOptimizer's.

    optimizer: elementwise, as SGD, Adam, AdamW, RMSprop and most others are. In `param_groups`, which schedulers change
        as always, "params" are this rank's pieces.
    compression: `Compression.fp16` or `.bf16` send gradients in 16 bits; parameters travel as they are.
    overlap: modules, such as a model's blocks. step() does not wait for their parameters: a module's next forward does,
        or its state_dict(). Read them elsewhere only after `optimizer.wait_for_parameters()`.
    shared_parameters: see `ringreduce.ShardedOptimizer`; the parameters themselves are moved.
    named_parameters, backward_passes_per_step, op, gradient_predivide_factor, process_set: see DistributedOptimizer.

    From the end of backward() on there are no whole gradients: reading .grad raises InputError, and after step() it is
    None. Clip by `optimizer.clip_grad_norm_(max_norm)`. A parameter without a gradient contributes zeros. A GradScaler
    skips a step on all ranks.

    state_dict() is a collective, which every rank must call, and returns what the plain optimizer would: it can be
    loaded into that one, and at any number of ranks. state_dict(sharded=True) is this rank's part alone.

    Cost:   the bytes of a DistributedOptimizer, in two halves, and an agreement for each; memory for 1/P of the state,
            and after backward for 1/P of the gradients.
    Raises: InputError (a ValueError) for op=Adasum, fewer than 16 bits, sparse gradients, an optimizer that is known to
            need whole parameters, and two parameters that have memory in common (tied weights are one parameter, which
            may have several names); else as DistributedOptimizer.
    Source: ZeRO's stage 1 (Rajbhandari et al., 2020); torch's ZeroRedundancyOptimizer.
    """
    exchange = exchange_of(op, compression, gradient_predivide_factor, process_set)
    check(optimizer, op, process_set)
    if kind := next((each.__name__ for each in type(optimizer).__mro__ if each.__name__ in NOT_ELEMENTWISE), ""):
        raise InputError(
            f"ShardedOptimizer: {kind} needs whole parameters; expected an elementwise optimizer, such as AdamW"
        )
    passes, (named, others, are_named) = check_passes(backward_passes_per_step), named_of(optimizer, named_parameters)
    whole = optimizer.state_dict()["state"]
    reducer = ShardReducer(passes, exchange, shared_parameters)
    wrapped = wrap(optimizer, ShardedMixin, _reducer=reducer, shares_parameters=shared_parameters)
    wrapped._reducer.add(named)
    wrapped._take_over(whole, others, are_named)
    wrapped._overlap(list(overlap))
    return wrapped


class ShardedMixin(WrappedMixin):
    """The methods of an optimizer that steps its rank's pieces; precedes the user's class in the MRO."""

    is_sharded = True  # see `elastic.state.State`
    _reducer: ShardReducer
    _whole: dict[int, Any] | None
    """The state of whole parameters by number, from when it was loaded to the next step: till then ranks may change."""
    _early: tuple[ShardBucket, ...] = ()  # those that the next forward waits for
    _overlapping: set[int] | frozenset[int] = frozenset()  # parameters, by id
    _away: dict[int, tuple[Callable[[], Any], dict[str, Any]]]
    """The whole state of parameters that groups have had, by id: they may come again."""
    state: dict[Any, Any]

    def _take_over(self, whole: dict[int, Any], others: Named, are_named: bool) -> None:
        """Have pieces in place of the parameters, and of their state."""
        self._put_pieces()
        self._away, reducer = {}, self._reducer
        reducer.owned = Groups(self, [(shard.name, shard.piece) for shard in self._shards()], others, are_named)  # type: ignore[arg-type]
        self._whole = whole
        reference = weakref.ref(self)

        def divide_state() -> None:
            alive = reference()
            if alive is not None:
                alive._divide_state()

        def change_shards(change: Change) -> None:
            alive = reference()
            if alive is not None:
                alive._change_shards(change)

        def refusal(change: Change) -> str:
            alive = reference()
            return "" if alive is None else alive._refusal(change)

        reducer.on_new_world, reducer.on_change, reducer.why_not = divide_state, change_shards, refusal
        divide_state()

    def _put_pieces(self) -> None:
        """In place of the parameters that groups have."""
        pieces = {id(parameter): self._reducer.shard(parameter).piece for parameter in self._reducer.names}
        for group in self.param_groups:
            group["params"] = [pieces.get(id(each), each) for each in group["params"]]

    def add_param_group(self, *args: Any, **kwargs: Any) -> None:
        """See its base.  Raises: InputError where a parameter shares memory with another one."""
        super().add_param_group(*args, **kwargs)
        if why := self._reducer.refusal(self._reducer.owned.change()):
            del self.param_groups[-1]
            raise InputError(why)

    def _refusal(self, change: Change) -> str:
        """Why parameters that have come cannot be divided: their state must be that of whole ones, on all ranks."""
        for name, parameter in change.new:
            for key, value in self.state.get(parameter, {}).items():
                if _is_elements(key, value, parameter) and value.shape != parameter.shape:
                    return (
                        f"ShardedOptimizer: parameter {name!r} of shape {tuple(parameter.shape)} has come into "
                        f"param_groups with {key} of another shape in optimizer.state. The state there is "
                        "that of a rank's piece: leave it out, or use a DistributedOptimizer"
                    )
        return ""

    def _change_shards(self, change: Change) -> None:
        """Divide parameters that have come; where some are gone, all others anew, which keep their state."""
        if change.gone:
            self._divide_anew({id(piece) for _, piece in change.gone})
        if change.new:
            self._reducer.add(sorted(change.new, key=operator.itemgetter(0)))
            self._put_pieces()
        for _, parameter in change.new:
            reference, away = self._away.pop(id(parameter), (lambda: None, {}))
            values = self.state.pop(parameter, away if reference() is parameter else {})
            if values:
                shard = self._reducer.shard(parameter)
                self.state[shard.piece] = self._cut(shard, values)
                self.state[shard.piece].pop(_REDUCED, None)
        self._whole = None
        self._note_early()

    def _divide_anew(self, gone: Container[int] = ()) -> None:
        """All but these, as the parameters lie in memory now, with their state and gradients."""
        shards = [shard for bucket in self._reducer.buckets for shard in bucket.members]
        own = {each: {**self.state.get(each.piece, {}), _REDUCED: each.reduced} for each in shards}
        whole = self._gathered(own)
        self._reducer.drop([each for each in shards if id(each.piece) in gone])
        for each, values in whole.items():
            if id(each.piece) not in gone:
                each.note_layout()
                mine = self._cut(each, values)
                each.reduced = mine.pop(_REDUCED)
                self.state[each.piece] = mine
            elif self.state.pop(each.piece, None):
                self._away[id(each.parameter)] = weakref.ref(each.parameter), values

    def outline(self) -> Outline:
        """Its whole state by name; all ranks call it."""
        whole = self.state_dict()
        shards, groups, parameters = self._shards(), whole["param_groups"], self.wholes()
        of_parameters, others = _parted(whole["state"])
        return Outline(
            [[shards[number].name for number in group["params"]] for group in groups],
            {name: tuple(parameter.shape) for name, parameter in parameters.items()},
            [{key: value for key, value in group.items() if key != "params"} for group in groups],
            {shards[number].name: values for number, values in of_parameters.items()},
            others,
            parameters,
        )

    def wholes(self) -> dict[str, torch.Tensor]:
        """The parameters of which the groups have pieces, by name."""
        return {name: parameter for parameter, name in reversed(self._reducer.names.items())}

    def adopt(self, outline: Outline, parameters: Mapping[str, torch.Tensor]) -> None:
        """Have these groups and this state of whole parameters, on all ranks; nothing is communicated."""
        self._give_up_gradients()
        self.state.clear()
        shards = {id(parameter): self._reducer.shard(parameter) for parameter in self._reducer.names}
        groups = self.param_groups
        del groups[len(outline.names) :]
        groups.extend({} for _ in range(len(outline.names) - len(groups)))
        for group, names in zip(groups, outline.names, strict=True):
            own = [parameters[name] for name in names]
            group["params"] = [shards[id(each)].piece if id(each) in shards else each for each in own]
        self._reducer.follow_told()
        numbers = {name: number for number, name in enumerate(itertools.chain.from_iterable(outline.names))}
        both = zip(outline.names, outline.options, strict=True)
        of_parameters = {numbers[name]: values for name, values in outline.of_parameters.items()}
        self.load_state_dict(
            {
                "state": {**outline.others, **of_parameters},
                "param_groups": [{**options, "params": [numbers[name] for name in names]} for names, options in both],
            }
        )

    def _overlap(self, modules: list[torch.nn.Module]) -> None:
        reference = weakref.ref(self)
        for module in modules:
            mine = {id(each) for each in module.parameters()}

            def wait(*_: Any, mine: set[int] = mine) -> None:
                alive = reference()
                for bucket in alive._reducer.buckets if alive is not None else ():
                    if any(id(each.parameter) in mine for each in bucket.members):
                        bucket.wait()

            module.register_forward_pre_hook(wait)
            module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
        self._overlapping = {id(each) for module in modules for each in module.parameters()}
        self._note_early()

    def _note_early(self) -> None:
        inside = lambda bucket: all(id(each.parameter) in self._overlapping for each in bucket.members)  # noqa: E731
        self._early = tuple(filter(inside, self._reducer.buckets))

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wait for this rank's gradients, step its pieces, and begin to give them to all ranks.

        Further arguments are those of the user's class.
        Raises: MismatchError, PeerLostError: what went wrong with a gradient.
        """
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss, closure = closure(), None
        self._before_step()
        super().step(*passed_on(closure, args), **kwargs)  # type: ignore[misc]
        stepped = [bucket for bucket in reversed(self._reducer.buckets) if bucket.begun]
        self._reducer.stepped()
        self._reducer.gather(stepped, waits=not self._early)
        for bucket in reversed(stepped):  # the last one first, as in `Reducer.synchronize`
            if bucket not in self._early:
                bucket.wait()
        return loss

    step.hooked = True  # type: ignore[attr-defined] # torch puts its step hooks around the user's class only

    def _before_step(self) -> None:
        self._reducer.synchronize()
        if any(each.divided is not each.parameter for each in self._shards()):
            self._divide_anew()
        self._reducer.hand_over()
        self._whole = None

    def wait_for_parameters(self) -> None:
        """Wait until all parameters are the stepped ones; with `overlap`, before they are read outside of forward."""
        for bucket in self._reducer.buckets:
            bucket.wait()

    def synchronize(self) -> None:
        """Reduce all gradients now, on all ranks; step() does, too."""
        self._reducer.synchronize()

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """For Horovod's scripts: a step never reduces what `synchronize()` has."""
        return contextlib.nullcontext()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Let all gradients go, and begin a new step; raises BackwardError while some are being reduced."""
        super().zero_grad(*args, **kwargs)
        for parameter in self._reducer.names:
            parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, over all ranks, is at most `max_norm`; returns what it was.

        All ranks call it, between backward() and step().  Cost: waits for gradients; an allreduce of a number.
        """
        if not norm_type > 0:
            raise InputError(f"clip_grad_norm_: norm_type={norm_type}; expected a number above 0, or inf")
        self._reducer.synchronize()
        found = [each.reduced for each in self._shards() if each.reduced is not None]
        norms = [torch.linalg.vector_norm(each, norm_type).double().cpu() for each in found if each.numel()]
        together = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device="cpu")
        is_largest = norm_type == float("inf")
        total = together.max() if is_largest else together.pow(norm_type).sum()
        exchange, name = self._reducer.exchange, f"{self._reducer.buckets[0].name}.norm"
        if exchange.size > 1:
            total = allreduce(total, name=name, op=Max if is_largest else Sum, process_set=exchange.process_set)
        norm = total if is_largest else total.pow(1 / norm_type)
        torch._foreach_mul_(found, (max_norm / (norm + 1e-6)).clamp(max=1.0).item())
        return norm

    def _follow(self) -> None:
        """Divide what the groups have got by themselves; all ranks call this."""
        self.wait_for_parameters()
        if self._reducer.pending:
            self._reducer.synchronize()
        else:
            self._reducer.follow()

    def _shards(self) -> list[Shard]:
        """In the order of the groups."""
        by_piece = {id(shard.piece): shard for bucket in self._reducer.buckets for shard in bucket.members}
        return [by_piece[id(piece)] for group in self.param_groups for piece in group["params"]]

    def state_dict(self, sharded: bool = False) -> dict[str, Any]:
        """The plain optimizer's state, the same on all ranks, which must all call it; sharded: this rank's part alone.

        Cost: memory for the whole state on each rank, and an allgather of it; sharded: nothing.
        """
        if self._reducer.owned.have_changed():
            self._follow()
        own: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if sharded:
            return {**own, "shards": self._division()}
        if self._whole is not None:
            return {**own, "state": dict(self._whole)}
        shards = self._shards()
        of_parameters, others = _parted(own["state"])
        whole = self._gathered({shards[number]: values for number, values in of_parameters.items()})
        numbers = {shard: number for number, shard in enumerate(shards)}
        return {**own, "state": {**others, **{numbers[shard]: values for shard, values in whole.items()}}}

    def _division(self) -> dict[str, Any]:
        first = self._reducer.buckets[0].shards
        names, pieces = zip(*((each.name, each.piece.numel()) for each in self._shards()), strict=True)
        return {"rank": first.rank, "ranks": first.size, "sizes": list(pieces), "names": list(names)}

    def _gathered(self, state: Mapping[Shard, dict[str, Any]]) -> dict[Shard, dict[str, Any]]:
        """The state of whole parameters; raises InputError on all ranks unless all have the same keys."""
        whole = {shard: dict(values) for shard, values in state.items()}
        self._check_keys(whole)
        handles = []
        for bucket in self._reducer.buckets:
            members = [(each, state.get(each, {})) for each in bucket.members]
            keys = {
                key: value.dtype for each, values in members for key, value in values.items() if _is_cut(key, value)
            }
            for key, dtype in keys.items():
                full = [
                    torch.empty_like(each.divided, dtype=dtype, device=each.parameter.device, requires_grad=False)
                    for each, _ in members
                ]
                pieces = bucket.shards.own([flat(each) for each in full])
                for (each, values), array, piece in zip(members, full, pieces, strict=True):
                    if _is_cut(key, values.get(key)):
                        piece.copy_(values[key])
                        whole[each][key] = array
                handles.append(bucket.shards.gather([flat(each) for each in full], f".{key}"))
        for handle in handles:
            handle.wait()
        return whole

    def _check_keys(self, state: Mapping[Shard, dict[str, Any]]) -> None:
        """Raise InputError on all ranks where pieces of one parameter differ in what they have."""
        exchange, buckets = self._reducer.exchange, self._reducer.buckets
        own = {
            (shard.name, key): str(value.dtype) if value.numel() == shard.piece.numel() else f"{value.numel()} elements"
            for shard, values in state.items()
            for key, value in values.items()
            if _is_cut(key, value)
        }
        if exchange.size == 1:
            return
        everyones = allgather_object(own, f"{buckets[0].name}.keys", exchange.process_set)
        for name, key in sorted({each for one in everyones for each in one}):
            found = [one.get((name, key), "none") for one in everyones]
            if len(set(found)) > 1 or found[0].endswith("elements"):
                texts = ", ".join(f"{value} on rank {number}" for number, value in enumerate(found))
                raise InputError(
                    f"ShardedOptimizer: {key} of {name!r} is no state of that parameter's elements: {texts}; expected "
                    "an elementwise optimizer, and the same state on all ranks"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of any number of ranks, or of a plain optimizer; not a collective.

        Raises: InputError for the part of another rank, or of another number of ranks, and for another model's state.
        """
        self._give_up_gradients()
        given = dict(in_order_of(self, state_dict))  # type: ignore[arg-type]
        if (of := given.pop("shards", None)) is not None:
            mine = self._division()
            if any(mine.get(key) != value for key, value in of.items()):
                raise InputError(
                    f"load_state_dict: this is the part of rank {of['rank']} of {of['ranks']}; expected that of rank "
                    f"{mine['rank']} of {mine['ranks']}, of the same model, its parameters in the same order. To load "
                    "it at another number of ranks, save state_dict() without sharded=True"
                )
            super().load_state_dict(given)
            self._whole = None
            return
        shards = self._shards()
        of_parameters, others = _parted(given["state"])
        cut = {number: self._cut(shards[number], values) for number, values in of_parameters.items()}
        super().load_state_dict({**given, "state": {**others, **cut}})
        self._whole = given["state"]

    def _give_up_gradients(self) -> None:
        if self._reducer.pending:
            self._reducer.synchronize(quiet=True)
        self._reducer.reset()

    def _cut(self, shard: Shard, values: dict[str, Any]) -> dict[str, Any]:
        """The state of a piece, of that of its whole parameter."""
        found = {}
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                found[key] = value
                continue
            if _is_elements(key, value, shard.parameter):
                if value.shape != shard.parameter.shape:
                    raise InputError(
                        f"load_state_dict: {key} of {shard.name!r} has shape {tuple(value.shape)}; expected "
                        f"{tuple(shard.parameter.shape)}: is it of another model?"
                    )
                value = flat(laid_out_as(value, shard.divided))[slice(*shard.bounds)]
            found[key] = value.clone()
        return found

    def _divide_state(self) -> None:
        """Have the state of this rank's pieces; raises InputError where ranks that are gone had some of it."""
        if self._whole is None:
            raise InputError(
                "ShardedOptimizer: the ranks have changed, and each had its part of the state; go back to a commit, or "
                "load_state_dict() of what state_dict() returned"
            )
        shards = self._shards()
        of_parameters, others = _parted(self._whole)
        cut = {shards[number].piece: self._cut(shards[number], values) for number, values in of_parameters.items()}
        self.state.clear()
        self.state.update(others | cut)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises InputError."""
        raise InputError("a ShardedOptimizer cannot be copied or pickled: save its state_dict(), on all ranks")


def _parted(state: Mapping[Any, Any]) -> tuple[dict[int, dict[str, Any]], dict[Any, Any]]:
    """The state of parameters, by number, and what the user's class keeps beside it, which each rank has whole."""
    numbered = {key: values for key, values in state.items() if isinstance(key, int)}
    return numbered, {key: values for key, values in state.items() if key not in numbered}


def _is_elements(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """True for what a whole parameter's state has for each element."""
    return isinstance(value, torch.Tensor) and key not in NUMBERS and (value.dim() > 0 or not parameter.dim())


def _is_cut(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and key not in NUMBERS and value.dim() == 1
