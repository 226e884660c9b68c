"""What ringreduce in a rank records of its steps, and the run report reads: one definition for both."""

from typing import NamedTuple


class Operation(NamedTuple):
    """One that has ended. It was ready when its rank knew that all had submitted it, and begun when its turn came."""

    name: str
    kind: str
    nbytes: int
    submitted_s: float
    ready_s: float
    begun_s: float
    ended_s: float
    algorithm: str
