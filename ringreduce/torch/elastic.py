"""hvd.elastic for PyTorch: models, optimizers and samplers that survive the death of ranks; as in horovod.torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ringreduce.elastic import common
from ringreduce.elastic.commit import put_back
from ringreduce.elastic.common import *  # noqa: F403
from ringreduce.elastic.sampler import ElasticSampler as NeutralSampler
from ringreduce.elastic.state import ObjectState
from ringreduce.torch.outline import adopt, outline_of
from ringreduce.torch.wrapped import WrappedMixin

__all__ = ["TorchState"]
__all__ += common.__all__


class ElasticSampler(NeutralSampler, torch.utils.data.Sampler[int]):  # type: ignore[no-redef]
    """This rank's part of what is left of an epoch; see `ringreduce.elastic.ElasticSampler`."""


class TorchState(ObjectState):
    """A state of a model, its optimizer, and any other attributes; see `ringreduce.elastic.ObjectState`.

        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)

    Any attribute may be a module, an optimizer (a DistributedOptimizer or ShardedOptimizer too), or an object with
    state_dict() and load_state_dict(), such as a learning rate scheduler, a GradScaler or an `ElasticSampler`.
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

    def restore(self) -> None:
        """Give all attributes their committed values; gradients, of which some may be reduced, are cleared."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.optim.Optimizer):
                if isinstance(value, WrappedMixin):
                    value._reducer.abandon()
                value.zero_grad()
        super().restore()

    def _taken(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return outline_of(value, self._modules)._replace(parameters={})
        return super()._taken(value)

    @property
    def _modules(self) -> dict[str, torch.nn.Module]:
        values = {f"{name}.": getattr(self, name, None) for name in self._names}
        return {prefix: each for prefix, each in values.items() if isinstance(each, torch.nn.Module)}

    def _put_back(self, value: Any, saved: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            adopt(value, saved, put_back, "the last commit", self._modules)
            return value
        if isinstance(value, torch.nn.Module):
            value.load_state_dict(saved)  # which copies
            return value
        return super()._put_back(value, saved)
