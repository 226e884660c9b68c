"""Batch normalization over the batches of all ranks, as if they were one.

With n_r rows on rank r, N their sum, x̂ = (x - μ) / σ, and g the gradient of the result y = w x̂ + b:

    μ  = Σ_r n_r μ_r / N                            one allgather of (n_r, μ_r, M_r) a forward pass,
    σ² = Σ_r (M_r + n_r (μ_r - μ)²) / N + ε         M_r = Σ (x - μ_r)² on rank r (Chan et al., 1979)

    dL/dx = w/σ (g - Σ g / N - x̂ Σ g x̂ / N)         sums over all ranks: one allreduce a backward pass
    dL/dw = Σ g x̂,  dL/db = Σ g                     sums over this rank: DistributedOptimizer reduces them
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from ringreduce.api.gather import allgather
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.reduce import allreduce
from ringreduce.collectives.ops import Sum
from ringreduce.errors import InputError


class SyncBatchNorm(_BatchNorm):
    """Batch normalization of (N, C, ...) inputs, whose mean and variance are those of all ranks' batches together.

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
        """Have all batch normalization in `module` be synchronized; returns it, or a copy if it is such a layer itself.

        The layers keep all that they have: parameters, buffers, hooks, names; an optimizer made before goes on with
        them. They become of this class; one of a class of its own, such as a layer with an activation, of a subclass of
        both, which keeps its forward() and synchronizes the batch_norm() in it. A layer that normalizes otherwise in
        training is warned of then.
        Source: torch.nn.SyncBatchNorm.convert_sync_batchnorm.
        """
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = object.__new__(type(module))
            converted.__dict__ = dict(vars(module))
        for name, layer in converted.named_modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, cls):
                layer.__dict__ |= {"process_set": process_set, "name_in_model": name}
                try:
                    layer.__class__ = _synchronised(layer, cls)
                except TypeError as exc:  # a class that lets nobody derive from it
                    _warn_of(layer, f"stays as it is: {exc}; its statistics are")
        return converted

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; every rank of the set must call it while it trains."""
        self._check_input_dim(input)
        evaluates = not self.training and self.running_mean is not None
        if evaluates or self.process_set.size() == 1:
            return super().forward(input)
        tracks, batches = self.training and self.track_running_stats, self.num_batches_tracked
        running = (self.running_mean, self.running_var) if tracks else (None, None)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / (float(batches) + 1) if tracks and batches is not None else 0.0
        result = batch_norm(
            input, *running, self.weight, self.bias, True, momentum, self.eps, process_set=self.process_set
        )
        if tracks and batches is not None:
            batches.add_(1)
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise InputError(f"SyncBatchNorm: expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features > 0:  # 0: of a lazy layer whose state was loaded
            raise InputError(f"SyncBatchNorm: {input.shape[1]} channels; expected num_features={self.num_features}")


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As torch.nn.functional.batch_norm, which in training normalizes the batches of all ranks together."""
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    for each in (running_mean, weight):
        if each is not None and len(each) != input.shape[1]:
            raise InputError(f"SyncBatchNorm: {input.shape[1]} channels; expected num_features={len(each)}")
    with torch.no_grad():
        mean, variance, count = gathered_statistics(input, process_set)
        for running, new in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.lerp_(new.to(running.dtype), momentum)
    result: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, mean, variance, count, eps, process_set
    )
    return result


class _Synchronising(TorchFunctionMode):
    """Inside, torch.nn.functional.batch_norm is `batch_norm`."""

    def __init__(self, process_set: ProcessSet) -> None:
        super().__init__()
        self._process_set = process_set
        self.has_normalised = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.has_normalised = True
        return batch_norm(*args, **(kwargs or {}), process_set=self._process_set)


PLAIN = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm


def _synchronised(layer: torch.nn.Module, base: type) -> type:
    """The class of a layer that does what this one does, and has the statistics of `base`."""
    kind: Any = type(layer)
    if not is_parametrized(layer):
        return base if kind in PLAIN else _subclass(kind, base)
    own = {name: each for name, each in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    (plain,) = kind.__bases__  # torch takes a parametrized layer's class apart again in this way
    return type(kind.__name__, (base if plain in PLAIN else _subclass(plain, base),), own)


@functools.cache
def _subclass(kind: Any, base: Any) -> type:
    """A subclass of both, in which super().forward() of a class `kind` is that of `base`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.process_set.size() == 1:
            return kind.forward(self, *args, **kwargs)
        with _Synchronising(self.process_set) as mode:
            result = kind.forward(self, *args, **kwargs)
        if self.training and not mode.has_normalised:
            _warn_of(self, "normalizes without torch.nn.functional.batch_norm: its statistics stay")
        return result

    def reduce(self: Any, protocol: Any) -> Any:
        """Pickled by name of the user's class."""
        made = super(made_kind, self).__reduce_ex__(protocol)
        return (_blank, (kind, base), *made[2:]) if made[1] == (made_kind,) else made

    own: dict[str, Any] = {"__module__": kind.__module__, "__reduce_ex__": reduce}
    if kind.forward is not _BatchNorm.forward:
        own["forward"] = forward
    if (becomes := getattr(kind, "cls_to_become", None)) is not None:  # a lazy layer, after its first forward
        own["cls_to_become"] = base if becomes in PLAIN else _subclass(becomes, base)
    made_kind: Any = type(f"Sync{kind.__name__}", (kind, base), own)
    result: type = made_kind
    return result


def _blank(kind: type, base: type) -> Any:
    return object.__new__(_subclass(kind, base))


def _warn_of(layer: Any, what: str) -> None:
    name = layer.name_in_model or "itself"
    warnings.warn(f"SyncBatchNorm: layer {name!r}, a {type(layer).__name__}, {what} each rank's own", stacklevel=3)


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
    """Normalize with given statistics, which come from the input itself, of which the gradient takes account."""

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
        ctx.types = [None if each is None else each.dtype for each in (weight, bias)]
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
            sums.to(dtype) if needed else None
            for sums, dtype, needed in zip((own[1], own[0]), ctx.types, ctx.needs_input_grad[1:3], strict=True)
        )
        return of_input, of_weight, of_bias, None, None, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as float32: sums of them need it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]
