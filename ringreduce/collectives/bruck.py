"""Small blocks from every rank to every rank in log2 P rounds, rounded up (Bruck's algorithm).

In round k a rank sends all blocks that it has to the rank 2^k before it, and receives as many new ones from the rank
2^k after it: 1, 2, 4, … consecutive blocks, its own first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.transport.base import Steps, Transport

TAG = 3


def allgather(block: np.ndarray[Any, Any], transport: Transport) -> Steps[np.ndarray[Any, Any]]:
    """Gather every rank's block, in the order of the ranks.

    Shape:  block (n,), host memory, equal on all ranks; result (size, n).
    Cost:   log2(size) messages a rank, rounded up; (size - 1) n elements sent by each.
    Source: Bruck et al., "Efficient algorithms for all-to-all communications in multiport systems", 1997.
    """
    rank, size = transport.rank, transport.size
    blocks = np.empty((size, block.size), block.dtype)
    blocks[0] = block
    have = 1
    while have < size:
        count = min(have, size - have)
        receive = transport.receive(blocks[have : have + count].reshape(-1), (rank + have) % size, TAG)
        send = transport.send(blocks[:count].reshape(-1), (rank - have) % size, TAG)
        yield receive
        yield send
        have += count
    return np.concatenate((blocks[size - rank :], blocks[: size - rank]))  # from "mine first" to "rank 0 first"
