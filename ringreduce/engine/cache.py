"""Tensors seen before, by number: to announce one costs a bit.

The coordinator of a process set alone decides what is remembered; the other ranks follow its responses, so all caches
are equal at equal response numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ringreduce.engine.signature import Signature


def numbers(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, rising.

    >>> list(numbers(0b1101))
    [0, 2, 3]
    """
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Cache:
    """A rank's copy."""

    def __init__(self) -> None:
        self._by_number: dict[int, Signature] = {}
        self._by_key: dict[str, int] = {}

    def number(self, signature: Signature) -> int | None:
        """The number of exactly this signature; None when it is not here, or its tensor has another one now."""
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
        """Remember; a tensor's new signature replaces its old one."""
        self._by_number[number] = signature
        self._by_key[signature.key] = number

    def forget(self, number: int) -> None:
        """Make the number free."""
        del self._by_key[self._by_number.pop(number).key]


class Register:
    """The coordinator's side: which numbers are given, and which may be given again.

    A number that was taken back may still be under way in an announcement of a rank that has not read of it. It is
    given again only when all ranks have; until then `former` tells what it meant.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.former: dict[int, Signature] = {}
        self.former_bits = 0
        self._used: OrderedDict[int, None] = OrderedDict()
        """The given numbers, the one that was not used for longest first."""
        self._free: list[int] = []
        self._next = 0
        self._retired: list[tuple[int, int]] = []
        """(number of the response that took it back, number), rising."""

    def use(self, bits: int) -> None:
        """Note that these numbers were used just now."""
        for number in numbers(bits):
            self._used.move_to_end(number)

    def give(self) -> int:
        """A number for a new tensor."""
        if self._free:
            number = self._free.pop()
        else:
            number = self._next
            self._next += 1
        self._used[number] = None
        return number

    def take_back(self, count: int, busy: int, response: int, cache: Cache) -> list[int]:
        """Take back up to `count` numbers, the longest unused first, none of `busy`, as `response` will tell."""
        taken = [number for number in self._used if not busy >> number & 1][:count]
        for number in taken:
            del self._used[number]
            self.former[number] = cache[number]
            self.former_bits |= 1 << number
            self._retired.append((response, number))
        return taken

    def seen_by_all(self, response: int) -> None:
        """All ranks have read up to this response."""
        while self._retired and self._retired[0][0] <= response:
            number = self._retired.pop(0)[1]
            del self.former[number]
            self.former_bits &= ~(1 << number)
            self._free.append(number)

    def __len__(self) -> int:
        return len(self._used)
