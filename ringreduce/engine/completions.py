"""Requests whose results are in place, completed some at a time."""

from __future__ import annotations

import time

from ringreduce.engine.request import Request

INTERVAL_S = 2e-3
"""Whoever waits is woken so often at most: woken after every slot, it would take the core from what it waits for."""


class Completions:
    """One lane's. `flush` must be called before the lane waits for another rank, or has nothing to do."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._flushed_s = 0.0

    def settle(self, request: Request) -> None:
        """One piece of a request is finished, or its planning is; it is completed after the last, perhaps later."""
        request.missing_pieces -= 1
        if request.missing_pieces:
            return
        self._requests.append(request)
        if time.monotonic() - self._flushed_s > INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Complete them now."""
        requests, self._requests = self._requests, []
        for request in requests:
            request.complete()
        self._flushed_s = time.monotonic()
