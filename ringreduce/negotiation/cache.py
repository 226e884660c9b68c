"""Signatures by id, so that submitting a cached tensor costs a counter.

Only the coordinator of a process set decides what is cached; the other ranks follow its responses, so all caches are
equal at equal response numbers. Unnamed submissions that differ only by their number share an id.
"""

from __future__ import annotations

from ringreduce.execution.plan import Plan
from ringreduce.execution.signature import Signature


class Cache(dict[int, Signature]):
    """One rank's copy of the cache of a process set; only `learn` and `forget` change it."""

    def __init__(self) -> None:
        super().__init__()
        self._by_key: dict[str | Signature, tuple[int, Signature]] = {}
        self._plans: dict[int, Plan] = {}  # which have these ids

    def id(self, plan: Plan, signature: Signature) -> int | None:
        """The id of exactly this submission's signature, also `plan.id` until it is forgotten; None: not cached."""
        signature = signature.unnumbered
        number, known = self._by_key.get(_key(signature), (None, None))
        if number is None or known != signature:
            return None
        if number in self._plans:  # another one of an equal signature, such as on another GPU
            self._plans[number].id = None
        self._plans[number], plan.id = plan, number
        return number

    def id_of_key(self, signature: Signature) -> int | None:
        """The id of the tensor with this signature's key, whatever else its signature says."""
        found = self._by_key.get(_key(signature))
        return None if found is None else found[0]

    def learn(self, number: int, signature: Signature) -> None:
        """Cache a signature."""
        self[number] = signature
        self._by_key[_key(signature)] = number, signature

    def forget(self, number: int) -> None:
        """Forget an id."""
        del self._by_key[_key(self.pop(number))]
        if (plan := self._plans.pop(number, None)) is not None:
            plan.id = None


def _key(signature: Signature) -> str | Signature:
    """What a tensor is found by: the key, or the signature if it is unnamed."""
    return signature if signature.numbered else signature.key


class Ids:
    """Which ids the coordinator may give to new signatures; a forgotten one when all ranks have read that."""

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity - 1, -1, -1))
        self._retired: list[tuple[int, int]] = []  # (number of the response that forgot it, id), ascending
        self._used = [0] * capacity  # when each was used last
        self._clock = 0

    def use(self, ids: list[int]) -> None:
        """Make these the most recently used ones."""
        self._clock += 1
        for each in ids:
            self._used[each] = self._clock

    def allocate(self) -> int | None:
        """An id for a new signature; None when none is free."""
        if not self._free:
            return None
        number = self._free.pop()
        self.use([number])
        return number

    def least_used(self, cache: Cache, count: int) -> list[int]:
        """The ids to forget so that `count` become free, the least recently used first."""
        missing = count - len(self._free) - len(self._retired)
        return sorted(cache, key=self._used.__getitem__)[:missing] if missing > 0 else []

    def retire(self, ids: list[int], response: int) -> None:
        """Note that a response forgets these."""
        self._retired += [(response, number) for number in ids]

    def read(self, response: int) -> None:
        """Free what this response and earlier ones forget: all ranks have read it."""
        while self._retired and self._retired[0][0] <= response:
            self._free.append(self._retired.pop(0)[1])
