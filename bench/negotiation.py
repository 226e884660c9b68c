"""How negotiation grows: what a step costs the busiest rank, by the classes that engines call, without a network.

    python bench/negotiation.py                        # 8 ranks a host; 8 to 4096 ranks
    python bench/negotiation.py --ranks 512 --local 8 --batches 13

161 tensors in 13 batches, as ResNet-50's on several hosts: new ones in the first step, cached ones after it. Every
message is encoded, delivered at once, and decoded. Columns: ms of work a step of the busiest rank and of all ranks, and
the most messages that one rank sends.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ringreduce.execution.plan import Plan
from ringreduce.execution.signature import Signature, TensorSignature
from ringreduce.negotiation.negotiator import Group, Negotiator
from ringreduce.negotiation.protocol import decode, encode
from ringreduce.transport.counters import group_bytes

CAPACITY = 256


class Job:
    """Ranks on hosts of `local` ranks; `seconds` and `sent` by rank."""

    def __init__(self, size: int, local: int) -> None:
        self.seconds, self.sent = [0.0] * size, [0] * size
        self._messages: deque[tuple[int, int, bytes]] = deque()
        self._plans: list[dict[int, Plan]] = [{} for _ in range(size)]  # by rank, then by the tensors' order
        blocks = [np.zeros(group_bytes(CAPACITY), np.uint8) for _ in range(size)]
        hosts = [rank // local for rank in range(size)]
        self.negotiators = []
        for rank in range(size):
            group = Group(range(size), hosts, rank)
            own = [blocks[each] for each in group.ranks]
            options = {"fence": lambda: None, "send": self._sender(rank), "resubmit": lambda _: None}
            self.negotiators.append(
                Negotiator(0, range(size), rank, size, group, own, CAPACITY, **options)  # type: ignore[arg-type]
            )

    def _sender(self, source: int) -> Any:
        def send(message: Any, ranks: Sequence[int]) -> None:
            content = encode(message)
            for rank in ranks:
                if rank != source:
                    self.sent[source] += 1
                    self._messages.append((source, rank, content))

        return send

    def work(self, rank: int, action: Any, *args: Any) -> Any:
        """Do a rank's work, and count its time."""
        started = time.thread_time()
        result = action(self.negotiators[rank], *args)
        self.seconds[rank] += time.thread_time() - started
        return result

    def step(self, tensors: list[Signature], batches: int) -> None:
        """All ranks submit all tensors, batch by batch, and read that they are ready."""
        everyone = range(len(self.negotiators))
        now = time.monotonic()
        for batch in np.array_split(np.arange(len(tensors)), batches):
            for rank, plans in enumerate(self._plans):
                own = [
                    SimpleNamespace(
                        plan=plans.setdefault(k, Plan(tensors[k])),
                        signature=tensors[k],
                        key=tensors[k].key,
                        line="train.py:41",
                        waits=False,
                        submitted_s=now,
                        step=-1,
                    )
                    for k in batch
                ]
                self.work(rank, lambda each, own=own: each.announce(own))
            self.settle()
            for rank in everyone:
                while self.work(rank, lambda each: each.next()) is not None:
                    pass

    def settle(self) -> None:
        """Let leaders look, and deliver messages, until there are no more."""
        for rank in reversed(range(len(self.negotiators))):
            self.work(rank, lambda each: each.poll())
        while self._messages:
            source, rank, content = self._messages.popleft()
            self.work(rank, lambda each, *message: each.receive(message[0], decode(message[1])), source, content)
            self.work(rank, lambda each: each.poll())


def measure(size: int, local: int, batches: int) -> None:
    """Print a first step and the median of some later ones."""
    job = Job(size, local)
    tensors = [
        Signature("allreduce", f"layer{k}.weight", (TensorSignature(f"layer{k}.weight", "float32", (64, k), "cpu"),))
        for k in range(161)
    ]
    rows = []
    for _ in range(6):
        job.seconds, job.sent = [0.0] * size, [0] * size
        job.step(tensors, batches)
        rows.append((max(job.seconds) * 1e3, sum(job.seconds) * 1e3, max(job.sent)))
    known = np.median(rows[1:], axis=0)
    print(
        f"{size:>6}{-(-size // local):>7}   {rows[0][0]:>12.1f}{rows[0][2]:>10.0f}   {known[0]:>12.2f}{known[2]:>10.0f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How negotiation grows with the number of ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--local", type=int, default=8, help="ranks of a host (default 8)")
    parser.add_argument("--batches", type=int, default=13, help="of the 161 tensors (default 13)")
    options = parser.parse_args()
    print(
        f"{'ranks':>6}{'hosts':>7}   {'new: ms':>12}{'messages':>10}   {'known: ms':>12}{'messages':>10}   the busiest"
    )
    for size in options.ranks:
        measure(size, options.local, options.batches)


if __name__ == "__main__":
    main()
