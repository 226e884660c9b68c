"""What a user asks of local steps, checked; when which fragment is averaged; Nesterov."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.compression import AnyCompressor, Compression
from ringreduce.errors import InputError
from ringreduce.runtime.submit import whole_number

Outer = Callable[[Any, Any, Any], tuple[Any, Any]]
"""An outer optimizer, for each parameter: (anchor, pseudo-gradient, state) to (new anchor, new state)."""


@dataclasses.dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of the DiLoCo paper: SGD with Nesterov momentum on pseudo-gradients.

    lr:       how far the parameters go towards the mean; 1.0 with momentum=0.0 is the mean itself.
    momentum: 0.9 pays in long jobs; in one of some hundred or thousand steps it makes the loss worse.

    Any function of this signature will do; it must give the same bits on all ranks, and return new arrays.
    Source: Douillard et al., 2023; torch.optim.SGD(nesterov=True).
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __call__(self, anchor: Any, gradient: Any, velocity: Any) -> tuple[Any, Any]:
        """The new anchor and velocity; velocity is None at first."""
        velocity = gradient if velocity is None else velocity * self.momentum + gradient
        return anchor - (velocity * self.momentum + gradient) * self.lr, velocity


def mean(anchor: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
    """The outer optimizer None: the plain mean of the parameters."""
    return anchor - gradient, state


@dataclasses.dataclass(frozen=True)
class Options:
    """How parameters are averaged; `function` is what the user called.  Raises: InputError for what cannot be done."""

    function: str
    sync_every: int
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0
    outer: Outer | None = None
    compression: AnyCompressor = Compression.none

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("warmup_steps", 0), ("fragments", 1), ("delay", 0)):
            number = whole_number(f"{self.function}: {name}", getattr(self, name), least)
            object.__setattr__(self, name, number)  # frozen
        of_both = f"{self.function}: sync_every={self.sync_every} with fragments={self.fragments}"
        if self.sync_every % self.fragments:
            raise InputError(f"{of_both}: one is averaged every sync_every / fragments steps; expected a divisor")
        if self.delay > self.interval:
            raise InputError(
                f"{of_both} and delay={self.delay}: a fragment must arrive before the next one is sent; expected a "
                f"delay of {self.interval} or less"
            )
        if self.outer is not None and not callable(self.outer):
            raise InputError(
                f"{self.function}: outer={self.outer!r}; expected None, ringreduce.Nesterov(lr, momentum), or a "
                "function of (anchor, pseudo-gradient, state) that returns the new anchor and state"
            )

    @property
    def interval(self) -> int:
        """Steps from one fragment to the next."""
        return self.sync_every // self.fragments

    def fragment(self, step: int) -> int | None:
        """The fragment that is sent after this step, counted from 1; None: none is, as in the warm-up."""
        turn, rest = divmod(step - self.warmup_steps, self.interval)
        return None if rest or turn < 1 else (turn - 1) % self.fragments

    def details(self) -> tuple[tuple[str, Any], ...]:
        """What must be equal on all ranks, for a message that names it."""
        names = ("sync_every", "warmup_steps", "fragments", "delay")
        whole = tuple((name, getattr(self, name)) for name in names)
        return (
            ("function", self.function),
            *whole,
            ("outer", _text(self.outer)),
            ("compression", _text(self.compression)),
        )


def _text(value: Any) -> str:
    """A function, class or object by what is the same on all ranks."""
    if dataclasses.is_dataclass(value):
        return repr(value)
    return str(getattr(value, "__qualname__", None) or (value and type(value).__qualname__))


def fragments_of(sizes: Sequence[int], count: int, function: str) -> list[list[int]]:
    """The numbers of the arrays in each fragment: the largest first, each into the smallest fragment so far.

    Raises: InputError for more fragments than arrays.

    >>> fragments_of([10, 40, 30, 20], 2, "DiLoCo")
    [[0, 1], [2, 3]]
    """
    if count > len(sizes):
        raise InputError(
            f"{function}: fragments={count}, but there are {len(sizes)} parameters; expected no more than that"
        )
    totals, members = [0] * count, [list[int]() for _ in range(count)]
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        smallest = min(range(count), key=totals.__getitem__)
        totals[smallest] += sizes[number]
        members[smallest].append(number)
    return sorted((sorted(each) for each in members), key=operator.itemgetter(0))
