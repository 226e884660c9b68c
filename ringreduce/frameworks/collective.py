"""A collective as a value: its arguments by name, and the collective that makes its gradient.

    collective      its gradient, made of the results'
    allreduce       the same allreduce, compressed too; ops other than Average and Sum have none
    allgather       this rank's rows of the average over the ranks
    broadcast       on the root the average over the ranks, elsewhere zeros
    reducescatter   an allgather, times both factors, and for Sum times the number of ranks
    alltoall        sent back to where the rows came from

The scale is Horovod's: for allgather and broadcast that of a loss averaged over the ranks, and for a reduction the same
reduction again. All ranks must run backward through the same functions, since what makes a gradient is a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.world import rank
from ringreduce.collectives.ops import Average, ReduceOp, Sum
from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.runtime.submit import which_op, whole

Call = types.SimpleNamespace  # the arguments of a call, by name
Tensors = Sequence[Any]
Self = TypeVar("Self", bound="Collective")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_BY_POSITION, _BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective with its arguments, equal where compiled code can be reused.

    kind:   the name of its function, for groups too; "average on root" is the gradient of a broadcast.
    place:  the line of the user's script, where it is known.
    names:  of the tensors, for error messages.
    op:     of an allgather Sum, which multiplies its results by the number of ranks, is the gradient of such a
            reducescatter.
    scales: of an allreduce and a reducescatter, before and after the sum; of an allgather both multiply its results.
    """

    kind: str
    place: str = ""
    name: str | None = None
    names: Sequence[str] | None = None
    process_set: ProcessSet = global_process_set
    compression: AnyCompressor = Compression.none
    op: ReduceOp = Average
    scales: tuple[float, float] = (1.0, 1.0)
    root_rank: int = 0
    ends_step: bool = False  # of training: it reduces an optimizer's gradients

    @classmethod
    def of(cls: type[Self], kind: str, arguments: Mapping[str, Any]) -> Self:
        """A call of a public function with these arguments."""
        fields = {each.name for each in dataclasses.fields(cls)}
        own = {name: value for name, value in arguments.items() if name in fields}
        if "op" in own:
            own["op"] = which_op(kind, arguments.get("average"), own["op"])
        if "root_rank" in own:
            own["root_rank"] = whole(own["root_rank"])
        scales = [float(arguments.get(name, 1.0)) for name in ("prescale_factor", "postscale_factor")]
        return cls(kind, scales=(scales[0], scales[1]), ends_step=_ends_step.get(), **own)

    def ended(self) -> None:
        """It has run: also inside compiled code, where no optimizer is called, this shows where a step ends."""
        if self.ends_step:
            runtime.stepped((self.place, self.name, *(self.names or ())))

    @property
    def by_rows(self) -> bool:
        """True where dim 0 has a meaning."""
        return self.kind in ("allgather", "alltoall", "reducescatter")

    def only(self: Self, numbers: Sequence[int]) -> Self:
        """The same for some of the tensors."""
        return dataclasses.replace(self, names=self.names and tuple(self.names[number] for number in numbers))

    def transposed(self: Self, stop: str) -> Self:
        """The collective that makes the gradients of the inputs from those of the results.

        That of an allgather is a reducescatter, whose parts have as many rows as the ranks gave.

        stop:   how a user keeps gradients from a tensor.
        Raises: InputError for an op that has none.
        """
        place, name = self.place and f"{self.place}.gradient", self.name and f"{self.name}.gradient"
        back = functools.partial(dataclasses.replace, self, place=place, name=name, ends_step=False)
        match self.kind:
            case "allreduce" if self.op not in (Average, Sum):
                where = f"allreduce ({self.place})" if self.place else "allreduce"
                raise InputError(f"{where}: op={self.op!r} has no gradient; expected Average or Sum, or {stop}")
            case "broadcast":
                return back(kind="average on root", op=Average)
            case "average on root":
                return back(kind="broadcast")
            case "allgather":
                return back(kind="reducescatter")
            case "reducescatter":
                return back(kind="allgather")
        return back()


_ends_step: ContextVar[bool] = ContextVar("ends_step", default=False)


@contextlib.contextmanager
def ending_step() -> Iterator[None]:
    """Collectives that are called, or traced, inside end a step of training."""
    token = _ends_step.set(True)
    try:
        yield
    finally:
        _ends_step.reset(token)


class Framework(NamedTuple):
    """What `gradients_of` needs of a framework whose autograd calls it."""

    collectives: Any  # the module of its own, which have gradients, too
    cumsum: Callable[[Any, int], Any]
    stop: str  # how a user keeps gradients from a tensor
    number: Callable[[Callable[[], int | None]], Any]  # of ranks, or a rank's, at the time when gradients are computed
    scaled: Callable[[Any, Any], Any]  # a tensor times a number
    kept: Callable[[Any, Any], Any]  # if this is true a tensor, otherwise zeros of its shape


def gradients_of(collective: Collective, gradients: Tensors, framework: Framework, rows: Any, received: Any) -> Tensors:
    """The gradients of a collective's inputs, made of those of its results.

    rows: how many each input had, as a tensor of the framework.  received: by an alltoall, from each rank.
    """
    back = collective.transposed(framework.stop)
    name, process_set = back.name, back.process_set
    match back.kind:
        case "allgather":
            for factor in (math.prod(back.scales), framework.number(process_set.size) if back.op is Sum else 1):
                gradients = [framework.scaled(each, factor) for each in gradients]
            gathered: Tensors = framework.collectives.grouped_allgather(gradients, name, process_set=process_set)
            return gathered
        case "alltoall":
            sent_back, _ = framework.collectives.alltoall(gradients[0], received, name, process_set=process_set)
            return [sent_back]
    arguments: dict[str, Any] = {"name": name, "op": back.op, "process_set": process_set}
    if back.kind == "allreduce":
        scales = dict(zip(("prescale_factor", "postscale_factor"), back.scales, strict=True))
        arguments |= {"compression": back.compression, "names": back.names, **scales}
    reduced: Tensors = framework.collectives.grouped_allreduce(gradients, **arguments)
    if back.kind == "average on root":
        is_root = framework.number(rank) == back.root_rank
        return [framework.kept(is_root, each) for each in reduced]
    if back.kind == "reducescatter":
        all_rows = framework.collectives.allgather(rows[None], name and f"{name}.rows", process_set=process_set)
        ends = framework.cumsum(all_rows, 0)[framework.number(process_set.rank)]
        return [each[ends[at] - rows[at] : ends[at]] for at, each in enumerate(reduced)]
    return reduced


def with_signature_of(
    function: Callable[Parameters, Result], order: Sequence[str] = (), **more: Any
) -> Callable[[Callable[[Call], Any]], Callable[Parameters, Result]]:
    """Decorate what gets the arguments of a call, by name: users call it as they call `function`.

    Without `out`: no arrays of such a framework can be written to.

    order: of the arguments by position, where a framework's users know another one; the others go by name only.
    more:  arguments that `function` does not have, with their defaults.
    """
    known = {name: each for name, each in inspect.signature(function).parameters.items() if name != "out"}
    known |= {name: inspect.Parameter(name, _BY_POSITION, default=default) for name, default in more.items()}
    by_name = [each.replace(kind=_BY_NAME) for name, each in known.items() if name not in order]
    signature = inspect.Signature([known[name] for name in order] + by_name if order else list(known.values()))

    def decorate(run: Callable[[Call], Any]) -> Callable[Parameters, Result]:
        @functools.wraps(run)
        def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return run(Call(**bound.arguments))

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate
