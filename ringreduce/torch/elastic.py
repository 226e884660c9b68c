"""hvd.elastic for PyTorch: models, optimizers and samplers that survive the death of ranks; as in horovod.torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from ringreduce.elastic import common
from ringreduce.elastic.commit import PutBack, has_state_dict
from ringreduce.elastic.common import *  # noqa: F403
from ringreduce.elastic.sampler import ElasticSampler as NeutralSampler
from ringreduce.elastic.state import ObjectState
from ringreduce.errors import InputError
from ringreduce.torch.outline import adopt, follow, outline_of
from ringreduce.torch.wrapped import WrappedMixin

__all__ = ["TorchState"]
__all__ += common.__all__


class ElasticSampler(NeutralSampler, torch.utils.data.Sampler[int]):  # type: ignore[no-redef]
    """This rank's part of what is left of an epoch; see `ringreduce.elastic.ElasticSampler`."""


class TorchState(ObjectState):
    """A state of a model, its optimizer, and any other attributes; see `ringreduce.elastic.ObjectState`.

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    Any attribute may be a module, an optimizer (a DistributedOptimizer or ShardedOptimizer too), or an object with
    state_dict() and load_state_dict(), such as a learning rate scheduler, a GradScaler or an `ElasticSampler`; another
    one that is assigned in its place, as in state.model = larger, is committed at once.
    `restore` also clears the gradients of optimizers, and gives up what was being reduced. A commit gathers the whole
    state of a ShardedOptimizer on every rank: commit less often.

    For the same dropout again after a loss, TorchState(…, rng=torch.get_rng_state(), local=("rng",)): the training
    function begins with torch.set_rng_state(state.rng), and sets state.rng before each commit.

    Source: Horovod's TorchState.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, local: Iterable[str] = (), **attributes: Any
    ) -> None:
        super().__init__(None, None, local=local, model=model, optimizer=optimizer, **attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; another object with a state_dict() is committed, and with a module the optimizers.

        These call their parameters by their names in the modules.
        """
        is_another = name in vars(self).get("_names", ()) and getattr(self, name, value) is not value
        super().__setattr__(name, value)
        if is_another and has_state_dict(value):
            others = self._names if isinstance(value, torch.nn.Module) else ()
            optimizers = [each for each in others if isinstance(getattr(self, each), torch.optim.Optimizer)]
            self._commit_only({name, *optimizers})

    def restore(self) -> None:
        """Give all attributes their committed values; gradients, of which some may be reduced, are cleared."""
        self._give_up()
        for _, value in self._objects():
            if isinstance(value, torch.optim.Optimizer):
                value.zero_grad()
        super().restore()

    def sync(self) -> None:
        """See `ObjectState.sync`; what the groups of the root have got by themselves, all have now."""
        super().sync()
        for _, value in self._objects():
            if isinstance(value, torch.optim.Optimizer):
                follow(value)

    def reset(self) -> None:
        """See `ObjectState.reset`; all ranks, also that whose state all have, begin with a new step."""
        super().reset()
        self._give_up()

    def _give_up(self) -> None:
        for _, value in self._objects():
            if isinstance(value, WrappedMixin):
                value._reducer.abandon()
            elif isinstance(value, torch.amp.GradScaler):
                with contextlib.suppress(AssertionError):  # it has scaled nothing yet
                    value.update(value.get_scale())  # a step may be broken off, which no state_dict says

    def _taken(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return outline_of(value, self._modules)._replace(parameters={})
        return super()._taken(value)

    @property
    def _modules(self) -> dict[str, torch.nn.Module]:
        values = {f"{name}.": getattr(self, name, None) for name in self._names}
        return {prefix: each for prefix, each in values.items() if isinstance(each, torch.nn.Module)}

    def _put_back(self, value: Any, saved: Any, put_back: PutBack) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            adopt(value, saved, put_back, "the last commit", self._modules)
            return value
        if isinstance(value, torch.nn.Module):
            _load(value, saved)
            return value
        return super()._put_back(value, saved, put_back)


def _load(module: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Give a module its committed values, and shapes where those have changed since; raises InputError for its names.

    load_state_dict copies, but for what stands for no tensor.
    """
    for name, live in module.state_dict(keep_vars=True).items():
        shape = getattr(saved.get(name), "shape", None)
        is_known = isinstance(live, torch.Tensor) and not torch.nn.parameter.is_lazy(live)
        if is_known and shape is not None and live.shape != shape:
            live.data = torch.empty(shape, dtype=live.dtype, device=live.device)
            live.grad = None
    try:
        module.load_state_dict(saved)
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"TorchState: the {type(module).__name__} in the last commit differs from the current one: {why} "
            "Shapes may change between two commits, but not names: build the module as at the commit before "
            "elastic.run begins, and commit at once when you have changed it"
        ) from error
