"""A parameter server's rule that is an optimizer of torch; see `ringreduce.ps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ps_rule:  # noqa: N801 - called as a function
    """The rule of a `ringreduce.ps.Server` that steps by a torch optimizer.

    make: makes it: make(parameters), of a list of tensors that hold the server's part; for example
          lambda parameters: torch.optim.Adam(parameters, lr=1e-3). One that treats a tensor as a whole, as LBFGS or
          Adafactor, sees rows of large arrays.

    >>> ps.Server(ps_rule(lambda parameters: torch.optim.SGD(parameters, lr=0.1)))                     # doctest: +SKIP
    """

    def __init__(self, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
        self._make = make
        self._optimizer: torch.optim.Optimizer | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def __call__(self, parameters: dict[str, Any], gradients: dict[str, Any]) -> None:
        """Step; the tensors share the arrays' memory."""
        if self._optimizer is None:
            self._tensors = {name: torch.from_numpy(array) for name, array in parameters.items()}
            self._optimizer = self._make(list(self._tensors.values()))
        for name, tensor in self._tensors.items():
            tensor.grad = torch.from_numpy(gradients[name])
        self._optimizer.step()
