"""Batch normalisation over the batches of all ranks, as if they were one.

With n_r rows on rank r, N their sum, x̂ = (x - μ) / σ, and g the gradient of the result y = w x̂ + b:

    μ  = Σ_r n_r μ_r / N                            one allgather of (n_r, μ_r, M_r) a forward pass,
    σ² = Σ_r (M_r + n_r (μ_r - μ)²) / N + ε         M_r = Σ (x - μ_r)² on rank r (Chan et al., 1979)

    dL/dx = w/σ (g - Σ g / N - x̂ Σ g x̂ / N)         sums over all ranks: one allreduce a backward pass
    dL/dw = Σ g x̂,  dL/db = Σ g                     sums over this rank: DistributedOptimizer reduces them
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ringreduce.api.gather import allgather
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.reduce import allreduce
from ringreduce.errors import InputError
from ringreduce.ops import Sum


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of (N, C, ...) inputs, whose mean and variance are those of all ranks' batches together.

    Shape:  (N, C) or (N, C, L), up to any number of dimensions; N may differ per rank, and be 0.
    num_features, eps, momentum, affine, track_running_stats: as torch.nn.BatchNorm2d.
    process_set: the ranks whose batches count; this rank must be one of them.
    Cost:   training: an allgather of 2 C + 1 float64 a forward pass, an allreduce of 2 C elements a backward pass.
            Evaluation with running statistics: nothing.
    Raises: InputError (a ValueError) for an input without channels, or with one value a channel on all ranks together;
            MismatchError when C differs; PeerLostError.
    Source: Horovod's SyncBatchNorm; on the CPU too, and with momentum=None.

    Each rank's gradients of weight and bias are those of its own rows: their sum over the ranks is that of one process
    with all rows. It cannot be differentiated twice.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace all batch normalisation in `module` by layers of this class; returns it, or what replaces it itself.

        The layers keep their parameters, buffers and hooks: an optimizer made before goes on with them.
        Source: torch.nn.SyncBatchNorm.convert_sync_batchnorm.
        """
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = cls.__new__(cls)
            converted.__dict__ = {**vars(module), "process_set": process_set}
        for name, child in module.named_children():
            setattr(converted, name, cls.convert_sync_batchnorm(child, process_set))
        return converted

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; every rank of the set must call it while it trains."""
        self._check_input_dim(input)
        evaluates = not self.training and self.running_mean is not None
        if evaluates or self.process_set.size() == 1:
            return super().forward(input)
        with torch.no_grad():
            mean, variance, count = gathered_statistics(input, self.process_set)
            if self.training:
                self._track(mean, variance * (count / (count - 1)))
        result: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, count, self.eps, self.process_set
        )
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise InputError(f"SyncBatchNorm: expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise InputError(f"SyncBatchNorm: {input.shape[1]} channels; expected num_features={self.num_features}")

    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), weight)


def gathered_statistics(input: torch.Tensor, process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean and (biased) variance of every channel, over all ranks' inputs, and the values a channel has together."""
    channels = input.shape[1]
    count = input.numel() // channels
    wide = _wide(input)
    if count:
        variance, mean = torch.var_mean(wide, _all_but_channels(input), correction=0)
    else:
        variance = mean = wide.new_zeros(channels)
    mine = torch.cat([mean.new_tensor([count], dtype=torch.float64), mean.double(), variance.double()])
    gathered = allgather(mine.unsqueeze(0), f"sync_batch_norm.{channels}", process_set)
    counts, means, variances = gathered[:, :1], gathered[:, 1 : 1 + channels], gathered[:, 1 + channels :]
    total = counts.sum()
    if total < 2:
        raise InputError(
            f"SyncBatchNorm: expected more than 1 value per channel when training, got {int(total)} on all ranks "
            f"together; this rank's input is {tuple(input.shape)}"
        )
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean.to(wide.dtype), variance.to(wide.dtype), int(total)


class _Normalise(torch.autograd.Function):
    """Normalise with given statistics, which come from the input itself, of which the gradient takes account."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.count, ctx.process_set = count, process_set
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        scale, shift = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        return functional.batch_norm(input, mean, variance, scale, shift, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, mean, inverse_deviation = ctx.saved_tensors
        axes = _all_but_channels(input)
        like = [1, -1] + [1] * (input.dim() - 2)
        wide = _wide(gradient)
        normalised = (_wide(input) - mean.view(like)) * inverse_deviation.view(like)
        own = torch.stack([wide.sum(axes), (wide * normalised).sum(axes)])
        of_input = None
        if ctx.needs_input_grad[0]:
            name = f"sync_batch_norm.{len(mean)}.gradient"
            means = allreduce(own, name=name, op=Sum, process_set=ctx.process_set) / ctx.count
            centred = wide - means[0].view(like) - normalised * means[1].view(like)
            scale = inverse_deviation if weight is None else inverse_deviation * weight
            of_input = (centred * scale.view(like)).to(input.dtype)
        of_weight, of_bias = (
            sums.to(weight.dtype) if weight is not None and needed else None
            for sums, needed in zip((own[1], own[0]), ctx.needs_input_grad[1:3], strict=True)
        )
        return of_input, of_weight, of_bias, None, None, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as float32: sums of them need it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]
