"""Gradients that are reduced to the ranks that own them, and parameters that these give to all. See optim/shards.py.

    backward: hook ── reduce ──> Shard.reduced ── step() of a piece of each parameter ── gather ──> parameters

The pieces are views of the parameters, in the order of their memory, so nothing is copied. Every rank has one of each
parameter, though it may be empty: all ranks' optimizers have a state of the same form.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ringreduce.api.objects import allgather_object
from ringreduce.arrays.memory import Memory
from ringreduce.errors import BackwardError, CollectiveError, InputError, MismatchError
from ringreduce.execution.submission import Handle
from ringreduce.optim.buckets import DENSE, GradientBucket, fill
from ringreduce.optim.exchange import Exchange
from ringreduce.optim.shards import Shards, check_apart
from ringreduce.optim.shared_parameters import OPTION, SharedParameters
from ringreduce.torch.gradient import Gradient
from ringreduce.torch.groups import Change
from ringreduce.torch.hooks import too_often
from ringreduce.torch.parts import Parts
from ringreduce.torch.pending import PendingGradient
from ringreduce.torch.reducer import GradientReducer

UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order of its memory, which it shares."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements in the order in which those of `like` lie in memory; a copy only if need be."""
    if _have_one_order(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _have_one_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True when the elements of both, of one shape, lie in the same order in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


class ShardGradient(PendingGradient):
    """Stands for a piece's gradient until step(): the first use waits, and ranks agree on what is infinite."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As its base's; where GradScaler looks for infinities, it finds those of all ranks."""
        result = super().__torch_function__(func, types, args, kwargs)
        if func is UNSCALE:
            pieces: list[Any] = [each.owner() for each in args[0] if isinstance(each, ShardGradient)]
            pieces[0].shard.reducer.agree(args[1])
        return result


def _memory_of(name: str, parameter: torch.Tensor) -> Memory:
    return Memory(str(parameter.device), parameter.data_ptr(), 0 if parameter.is_meta else parameter.nbytes, name)


class _Piece:
    """What a ShardGradient asks: its `owner`."""

    def __init__(self, shard: Shard) -> None:
        self.shard = weakref.proxy(shard)
        self.pending: ShardGradient = torch.Tensor._make_subclass(ShardGradient, shard.piece)
        self.pending.value, self.pending.owner = shard.piece, weakref.ref(self)

    def begin(self) -> None:
        if self.shard.reduced is None:
            self.shard.reducer.synchronize()

    def wait(self) -> None:
        self.pending.value = self.shard.reduced


class Shard(Gradient):
    """One parameter, its gradient, and this rank's piece of both."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, reducer: ShardReducer) -> None:
        super().__init__(name, parameter, reducer)
        self.note_layout()
        self.reducer = weakref.proxy(reducer)
        self.may_be_sparse, self.layout = False, DENSE
        self.piece = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.reduced: torch.Tensor | None = None
        self._count = parameter.numel()
        self.bounds = -1, -1  # of the piece, among the parameter's elements
        self._address = -1  # of the parameter, when its piece was taken
        self._of_piece: _Piece | None = None

    def note_layout(self) -> None:
        """The elements of the piece are in the order in which those of the parameter lie in memory now."""
        parameter = self.parameter
        self._divided = torch.empty_like(parameter, device="meta")
        if self._divided.stride() != parameter.stride():
            raise InputError(
                f"ShardedOptimizer: parameter {self.name!r} of shape {tuple(parameter.shape)} and strides "
                f"{parameter.stride()} has gaps in its memory; make it from a contiguous() tensor"
            )

    @property
    def divided(self) -> torch.Tensor:
        """The parameter; if its elements lie in another order now, as after model.to(memory_format=…), a stand-in."""
        return self.parameter if _have_one_order(self.parameter, self._divided) else self._divided

    def take_piece(self, low: int, high: int) -> bool:
        """Have the piece in the parameter's memory, which may be another one now; True when it is."""
        is_another = (low, high) != self.bounds or self.parameter.data_ptr() != self._address
        if is_another:
            self.bounds, self._address = (low, high), self.parameter.data_ptr()
            self.piece.data = flat(self.parameter)[low:high]
        return is_another

    @property
    def memory(self) -> Memory:
        """The parameter's."""
        return _memory_of(self.name, self.parameter)

    def check_memory(self) -> None:
        """Raise InputError where the parameter cannot have other memory."""
        parameter = self.parameter
        if parameter.device.type != "cpu" or parameter.untyped_storage().nbytes() != parameter.nbytes:
            raise InputError(
                f"{OPTION}: parameter {self.name!r} on {parameter.device} has no host memory of its own, as "
                "parameter.data = parameter.data.cpu().clone() gives it"
            )

    def check_address(self) -> None:
        """Raise InputError where the parameter has left the memory in which its piece is."""
        if self.parameter.data_ptr() != self._address:
            raise InputError(
                f"{OPTION}: parameter {self.name!r} has left the memory that the ranks share, as by model.to() or "
                "parameter.data = …; do that before you create the optimizer, or in place: parameter.data.copy_(…)"
            )

    def load(self) -> tuple[int, torch.Tensor]:
        """What this rank sends; zeros where it computed none."""
        self._follow_stream()
        if self.parameter.numel() != self._count:
            raise InputError(
                f"ShardedOptimizer: parameter {self.name!r} has {self.parameter.numel()} elements now, but "
                f"{self._count} when it was divided; put a new Parameter into param_groups in place of this one"
            )
        local = self.local
        if local is None:
            return DENSE, torch.zeros_like(self.divided, device=self.parameter.device)
        if local.layout is not torch.strided:
            raise InputError(
                f"ShardedOptimizer: the gradient of {self.name!r} is sparse; expected a dense one: pass "
                "sparse=False to its Embedding, or use a DistributedOptimizer"
            )
        return DENSE, laid_out_as(local.detach(), self.divided)

    def begin(self) -> None:
        """It is read: raises InputError."""
        raise InputError(
            f"the gradient of {self.name!r} is reduced to the ranks that own its pieces: a ShardedOptimizer has no "
            "whole gradient from backward() on; to clip, call optimizer.clip_grad_norm_(max_norm)"
        )

    def show_zeros(self) -> None:
        """Nothing: there is none to be read."""

    show_placeholder = show_zeros

    def show_piece(self) -> None:
        """Let the piece's gradient be what will be reduced."""
        if self._of_piece is None:
            self._of_piece = _Piece(self)
            self.piece.grad = self._of_piece.pending

    def arrive(self, reduced: torch.Tensor) -> None:
        """Keep the piece, and let the whole gradient go."""
        self.reduced = reduced if self.trains else None
        self.detach_pending(None)
        self.parameter.grad = None

    def hand_over(self) -> None:
        """Give the reduced gradient to the user's optimizer."""
        self.piece.grad, self._of_piece = self.reduced, None

    def lack(self) -> None:
        """No rank has one in this step."""
        self.reduced = None

    def give_up(self) -> None:
        """Begin a new step."""
        super().give_up()
        self.let_go()

    def let_go(self) -> None:
        """Of what was reduced."""
        self.piece.grad = self.reduced = self._of_piece = None


class ShardBucket(GradientBucket):
    """Parameters that are divided among the ranks together."""

    members: Sequence[Shard]
    shards: Shards
    gathered: Handle | None = None  # of all ranks' pieces, if they are on their way

    def divide(self, exchange: Exchange) -> None:
        """Have this rank's pieces."""
        members = self.members
        counts = [each.parameter.numel() for each in members]
        self.shards = Shards(self.name, [each.name for each in members], counts, exchange)
        self.take_pieces()

    def take_pieces(self) -> bool:
        """Have this rank's pieces where the parameters are now; True when one is elsewhere than it was."""
        moved = [each.take_piece(*bounds) for each, bounds in zip(self.members, self.shards.bounds, strict=True)]
        return any(moved)

    def begin(self, exchange: Exchange, line: str) -> None:
        """Begin to reduce all gradients, those of frozen parameters as zeros, unless all are frozen."""
        trained = self.trained
        if not trained:
            self._begin_frozen(exchange, "reduce_shards")
            return
        arrays = [member.load()[1] for member in self.members]
        self.begun, self.has_told = True, False
        for member, array in zip(self.members, arrays, strict=True):
            if member.trains:
                member.attach(array)
        frozen = tuple(each.name for each in self.members if each not in trained)
        flats = [each if each.is_contiguous() else flat(each) for each in arrays]
        self.parts = [(self.members, self.shards.reduce(flats, frozen, line=line or None, of_step=True))]

    def wait(self) -> None:
        """Wait for the other ranks' pieces of the parameters."""
        gathered, self.gathered = self.gathered, None
        if gathered is not None:
            gathered.wait()


class ShardReducer(GradientReducer):
    """Reduces gradients to their owners, as hooks report them ready.

    on_new_world: called where the ranks have changed, before anything is divided anew.
    on_change: called where the groups have changed; adds and drops shards.  why_not: says why it cannot.
    shares: parameters are moved into memory that all ranks have.
    """

    def __init__(self, passes: int, exchange: Exchange, shares: bool = False) -> None:
        self.on_new_world: Callable[[], None] = lambda: None
        self.on_change: Callable[[Change], None] = lambda change: None
        self.why_not: Callable[[Change], str] = lambda change: ""
        self.shared = SharedParameters(exchange) if shares and exchange.size > 1 else None
        self._ordered_since: tuple[Any, ...] = ()
        super().__init__(passes, exchange, sparse_as_dense=False, wait_in_backward=False)

    def add(self, named: Iterable[tuple[str, Any]]) -> None:
        """Divide these parameters, in the order in which backward is likely to compute their gradients."""
        shards = [Shard(name, parameter, self) for name, parameter in named][::-1]
        check_apart([each.memory for each in (*self._gradients.values(), *shards)])
        for shard in shards:
            shard.position, shard.is_loose = len(self._gradients), False
            self._gradients[id(shard.parameter)] = shard
            self._hooks.watch(shard)
        if self.shared is not None:
            for shard in shards:
                shard.check_memory()
            moved = self.shared.move({each.name: flat(each.parameter).view(torch.uint8).numpy() for each in shards})
            for shard in shards:
                own = torch.from_numpy(moved[shard.name]).view(shard.parameter.dtype)
                shard.parameter.data = own.as_strided(shard.parameter.shape, shard.parameter.stride())
        self._lay_out(shards)

    def _lay_out(self, shards: Sequence[Shard], begun: bool = False) -> None:
        """Put shards into buckets, and divide these."""
        for numbers in fill([each.size_and_kind for each in shards]):
            bucket = ShardBucket([shards[number] for number in numbers])
            bucket.begun = begun
            bucket.divide(self.exchange)
            for member in bucket.members:
                member.bucket = bucket

    def drop(self, gone: Sequence[Shard]) -> None:
        """Divide the parameters anew without these."""
        begun = any(each.begun for each in self.buckets)
        for shard in gone:
            del self._gradients[id(shard.parameter)]
            self._hooks.forget(id(shard.parameter))
            shard.give_up()
        self._lay_out(list(self._gradients.values()), begun)

    @property
    def trusts(self) -> bool:
        """See `optim.reducer`; not before the ranks have agreed on the order of parameters."""
        return self._ordered_since == self._known_since[:2] and super().trusts

    def _agree_on_the_order(self) -> None:
        """Once in a world: have the first rank's order, as groups that are made from sets have another on each rank."""
        self._look_at_the_world()
        if self.exchange.size == 1 or self._ordered_since == self._known_since[:2]:
            return
        shards = {each.name: each for each in self._gradients.values()}
        orders = allgather_object(list(shards), f"{min(shards, default='')}.order", self.exchange.process_set)
        for number, names in enumerate(orders):
            if differing := sorted(set(names) ^ set(orders[0])):
                who, other = (0, number) if differing[0] in orders[0] else (number, 0)
                which = f"rank {who} has a parameter {differing[0]!r}, but rank {other} does not"
                raise InputError(f"ShardedOptimizer: {which}; expected the same on all ranks")
        if orders[0] != list(shards):
            self._gradients = {id(shards[name].parameter): shards[name] for name in orders[0]}
            for position, shard in enumerate(self._gradients.values()):
                shard.position = position
            self._lay_out(list(self._gradients.values()))
            self.on_new_world()
        self._ordered_since = self._known_since[:2]  # the world, and how often a rank has joined

    def _say(self, bucket: GradientBucket, what: str, text: str) -> None:
        """See `optim.reducer`; where gradients have been reduced, the next is what `gather` begins with."""
        if not bucket.begun:
            self.exchange.say(bucket.name, what, text, "reduce_shards")
        elif self.shared is None:
            self.exchange.say(bucket.name, what, text, "gather_shards", ())
        else:
            self.exchange.say(None, what, text, "barrier", ())

    def _go_along(self, bucket: GradientBucket) -> None:
        """See `optim.reducer`."""
        if not bucket.begun:
            super()._go_along(bucket)
        elif self.shared is None:
            others = [each for each in self.buckets if each.begun and each is not bucket]
            for begun in [each.shards.gather([flat(one.parameter).clone() for one in each.members]) for each in others]:
                with contextlib.suppress(MismatchError):
                    begun.wait()

    def refusal(self, change: Change) -> str:
        """See its base."""
        gone = {id(piece) for _, piece in change.gone}
        staying = [each.memory for each in self._gradients.values() if id(each.piece) not in gone]
        try:
            check_apart([*staying, *itertools.starmap(_memory_of, change.new)])
        except InputError as error:
            return str(error)
        return self.why_not(change)

    def take(self, change: Change) -> None:
        """Divide what the groups have now."""
        before = list(self._gradients.values())
        self.on_change(change)
        self._parts = Parts()
        shards = {each.name: each for each in self._gradients.values()}
        pieces = {id(each.piece): each for each in before}
        self.owned.take(change._replace(new=[(name, shards[name].piece) for name, _ in change.new]))
        self.owned.remember([(name, pieces[id(piece)].parameter) for name, piece in change.gone])

    def _find(self) -> None:
        """Nothing: a gradient that nobody has hooks on is not divided before step()."""

    def regroup(self) -> None:
        """Nothing: `drop` has."""

    @property
    def buckets(self) -> list[ShardBucket]:
        """All, in the order in which backward fills them."""
        buckets: list[Any] = self._buckets
        return buckets

    def shard(self, parameter: torch.Tensor) -> Shard:
        """Return what stands for a parameter: its pieces on all ranks."""
        shard: Shard = self._gradients[id(parameter)]
        return shard

    def on_gradient(self, gradient: Gradient) -> None:
        """As its base's; raises BackwardError for a gradient that was reduced, and is gone, before step()."""
        if gradient.bucket.begun:
            raise BackwardError(too_often(gradient.name, gradient.seen + 1, self.passes))
        super().on_gradient(gradient)

    def _at_the_end(self) -> None:
        """As its base's; a GradScaler on any rank must find the same pieces, also those of what this rank lacks."""
        super()._at_the_end()
        shards = self._gradients.values()
        if any(each.seen >= self.passes or each.bucket.begun for each in shards):
            for shard in shards:
                if shard.trains:
                    shard.show_piece()

    def _forget(self) -> None:
        """The world may be another one."""
        if any(not each.shards.fits(self.exchange) for each in self.buckets):
            for bucket in self.buckets:
                bucket.divide(self.exchange)
            self.on_new_world()

    def synchronize(self, quiet: bool = False) -> None:
        """Reduce what is left; see its base."""
        for bucket in self.buckets:
            bucket.wait()
        if not quiet:
            self._agree_on_the_order()
        super().synchronize(quiet)

    def reset(self) -> None:
        """Begin a new step."""
        super().reset()
        for shard in self._gradients.values():
            shard.let_go()

    def hand_over(self) -> None:
        """Give the reduced pieces to the user's optimizer."""
        if self.shared is not None:
            for shard in self._gradients.values():
                shard.check_address()
            self.shared.barrier().wait()
        moved = [bucket.take_pieces() for bucket in self.buckets]
        if any(moved):
            check_apart([each.memory for each in self._gradients.values()])
        for shard in self._gradients.values():
            shard.hand_over()

    def gather(self, stepped: Sequence[ShardBucket], waits: bool) -> None:
        """Begin to get the other ranks' pieces of the parameters.  waits: the caller does at once."""
        written = None if self.shared is None else self.shared.barrier(waits)
        for bucket in stepped:
            bucket.gathered = written or bucket.shards.gather([flat(each.parameter) for each in bucket.members])

    def agree(self, found_inf: torch.Tensor) -> None:
        """Have a number, 0 or 1, be 1 where it is on any rank."""
        if self.exchange.size > 1:
            name = f"{self.buckets[0].name}.found_inf"
            found_inf.fill_(float(self.exchange.begin_maximum(name, [int(found_inf.item())]).wait()[0]))

    def abandon(self) -> None:
        """As its base's; waits until nothing is written to parameters any more."""
        for bucket in self.buckets:
            with contextlib.suppress(CollectiveError):
                bucket.wait()
        super().abandon()
