"""rr.elastic for JAX: a commit refers to arrays, which cannot change, instead of copying them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ringreduce.elastic import common
from ringreduce.elastic.common import *  # noqa: F403
from ringreduce.elastic.state import ObjectState
from ringreduce.errors import InputError
from ringreduce.jax.primitive import forget_failures

__all__ = ["JaxState"]
__all__ += common.__all__


class JaxState(ObjectState):
    """A state of JAX's arrays, trees of them such as parameters and optax's states, and any other attributes.

        state = JaxState(params=params, opt_state=opt_state, step=0)
        ...
        state.params, state.opt_state = train_step(state.params, state.opt_state, batch)

    A commit costs no copy, unless jitted functions take the arrays for their results (donate_argnums): that is noticed
    at a commit when the arrays of the one before are gone, and from then on they are copied. `sync` copies always.

    See `ringreduce.elastic.ObjectState`.
    """

    def __init__(self, *, local: Iterable[str] = (), **attributes: Any) -> None:
        self._watched: list[Any] = []
        self._donates = False
        super().__init__(None, None, local=local, **attributes)

    def save(self) -> None:
        """Keep all attributes.  Cost: pickles what is no array of JAX; copies these only where they are donated."""
        self._donates = self._donates or any(map(_is_gone, self._watched))
        self._commit(refers=not self._donates)
        self._watch()

    def restore(self) -> None:
        """Give all attributes their committed values; raises InputError when a jitted function has taken some."""
        if any(map(_is_gone, (*self._committed.references, *self._own.references))):
            raise InputError(
                "JaxState: arrays of the last commit were donated to a jitted function, for the first time since then; "
                "commit after its first call, or leave donate_argnums out"
            )
        forget_failures()
        super().restore()
        self._watch()

    def sync(self) -> None:
        """See `ObjectState.sync`."""
        super().sync()
        self._watch()

    def _watch(self) -> None:
        leaves = jax.tree.leaves((self._tree(), self._tree(own=True)))
        self._watched = [each for each in leaves if isinstance(each, jax.Array)]


def _is_gone(array: Any) -> bool:
    return bool(array.is_deleted())
