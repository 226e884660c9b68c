"""Small blocks from every rank to every rank in log2 P rounds, rounded up (Bruck's algorithm), and the barrier.

In round k a rank sends all blocks that it has to the rank 2^k before it, and gets as many new ones from the rank 2^k
after it: 1, 2, 4, … blocks in a row, from its own on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.transport.base import Transport

TAG = 3


def allgather(block: np.ndarray[Any, Any], transport: Transport) -> np.ndarray[Any, Any]:
    """Every rank's block, in the order of the ranks.

    Shape:  block (n,), host memory, equal on all ranks; result (size, n).
    Cost:   log2(size) messages a rank, rounded up; (size - 1) n elements sent by each.
    Raises: PeerLostError when a rank to talk to has left.
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
        receive.wait()
        send.wait()
        have += count
    return np.concatenate((blocks[size - rank :], blocks[: size - rank]))  # from "mine first" to "rank 0 first"


def barrier(transport: Transport) -> None:
    """Return when every rank has called it.

    Cost:   log2(size) messages a rank, rounded up, at most `size` bytes each.
    Raises: PeerLostError when a rank to talk to has left.
    """
    allgather(np.zeros(1, np.uint8), transport)
