"""At the start, before there is an engine: do all ranks have the same settings?"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from ringreduce.collectives import bruck
from ringreduce.engine.description import Call, Description, explain
from ringreduce.errors import MismatchError
from ringreduce.transport.base import Steps, Transport

DIGEST_BYTES = 16


def agree(transport: Transport, call: Call) -> Steps[None]:
    """Make sure that all ranks describe the same.

    Cost:   log2(size) messages a rank, rounded up, of 16 bytes times the ranks heard of so far; when descriptions
            differ, these travel as well.
    Raises: MismatchError on every rank when descriptions differ.
    """
    mine = json.dumps(call).encode()
    digest = hashlib.blake2b(json.dumps(call.description).encode(), digest_size=DIGEST_BYTES).digest()
    digests = yield from bruck.allgather(np.frombuffer(digest, np.uint8), transport)
    if (digests == digests[0]).all():
        return
    lengths = yield from bruck.allgather(np.array([len(mine)], np.int64), transport)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    rows = yield from bruck.allgather(padded, transport)
    texts = [row[: int(length)].tobytes() for row, length in zip(rows, lengths[:, 0], strict=True)]
    raise MismatchError(explain(dict(enumerate(map(_call, texts))), transport.size))


def _call(text: bytes) -> Call:
    (kind, name, _, details, _), line, _ = json.loads(text)
    return Call(Description(kind, name, details=tuple((key, value) for key, value in details)), line)
