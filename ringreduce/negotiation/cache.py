"""Signatures by number, so that announcing a cached tensor costs a bit.

Only the coordinator of a process set decides what is cached; the other ranks follow its responses, so all caches are
equal at equal response numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ringreduce.execution.signature import Signature


def numbers(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, in ascending order.

    >>> list(numbers(0b1101))
    [0, 2, 3]
    """
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Cache:
    """One rank's copy of the cache of a process set."""

    def __init__(self) -> None:
        self._by_number: dict[int, Signature] = {}
        self._by_key: dict[str, int] = {}

    def number(self, signature: Signature) -> int | None:
        """The number of exactly this signature; None if it is not cached, or another one of its tensor is."""
        number = self._by_key.get(signature.key)
        if number is None:
            return None
        known = self._by_number[number]
        if known is not signature:
            if known != signature:
                return None
            self._by_number[number] = signature  # the next comparison is one of identity
        return number

    def number_of_key(self, key: str) -> int | None:
        """The number of the tensor with this key, whatever its signature."""
        return self._by_key.get(key)

    def __getitem__(self, number: int) -> Signature:
        return self._by_number[number]

    def __len__(self) -> int:
        return len(self._by_number)

    def learn(self, number: int, signature: Signature) -> None:
        """Cache a signature; it replaces its tensor's old one."""
        self._by_number[number] = signature
        self._by_key[signature.key] = number

    def forget(self, number: int) -> None:
        """Remove a number."""
        del self._by_key[self._by_number.pop(number).key]


class NumberAllocator:
    """The coordinator's allocation of numbers, with eviction of the least recently used.

    A rank may still announce an evicted number until it has read of the eviction. The number is free when all ranks
    have; until then `former` holds its signature.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.former: dict[int, Signature] = {}
        self.former_bits = 0
        self._used: OrderedDict[int, None] = OrderedDict()  # the allocated numbers, the least recently used first
        self._free: list[int] = []
        self._next = 0
        self._evicted: list[tuple[int, int]] = []  # (number of the response, evicted number), in ascending order

    def use(self, bits: int) -> None:
        """Make these numbers the most recently used."""
        for number in numbers(bits):
            self._used.move_to_end(number)

    def allocate(self) -> int:
        """A number for a new tensor."""
        if self._free:
            number = self._free.pop()
        else:
            number = self._next
            self._next += 1
        self._used[number] = None
        return number

    def evict(self, count: int, busy: int, response: int, cache: Cache) -> list[int]:
        """Evict up to `count` numbers, the least recently used first, none of the bits `busy`, in `response`."""
        evicted = [number for number in self._used if not busy >> number & 1][:count]
        for number in evicted:
            del self._used[number]
            self.former[number] = cache[number]
            self.former_bits |= 1 << number
            self._evicted.append((response, number))
        return evicted

    def seen_by_all(self, response: int) -> None:
        """Free the numbers evicted by responses up to this one, which all ranks have read."""
        while self._evicted and self._evicted[0][0] <= response:
            number = self._evicted.pop(0)[1]
            del self.former[number]
            self.former_bits &= ~(1 << number)
            self._free.append(number)

    def __len__(self) -> int:
        return len(self._used)
