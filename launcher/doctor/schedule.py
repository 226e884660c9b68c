"""Which hosts measure with which, and when: a tournament in which nobody plays two games at once. Pure."""

from __future__ import annotations

Pair = tuple[int, int]


def rounds(count: int) -> list[list[Pair]]:
    """Return all pairs of `count` hosts, as rounds in which no host is in two pairs: the circle method.

    One host stays, the others go around it, and who stands opposite is the pair. With an odd number one pauses.

        0 1 2      0 5 1      0 4 5
        5 4 3      4 3 2      3 2 1      …    6 hosts: 5 rounds of 3 pairs

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    circle = list(range(count + count % 2))  # the last is nobody where the number is odd
    found = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        pairs = sorted((min(pair), max(pair)) for pair in opposite)
        found.append([pair for pair in pairs if pair[1] < count])
        circle.insert(1, circle.pop())
    return found
