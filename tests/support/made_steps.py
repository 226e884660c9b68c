"""Made messages of ranks, as ringreduce/monitor sends them: jobs in virtual time, of which the truth is known."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ringrun.run_report.collect import Collector

BUCKETS, STEPS = 4, 21
BACKWARD_S = 0.1
OPTIMIZER_S = 2e-3


def never(*_):
    """No seconds."""
    return 0.0


@dataclass
class MadeJob:
    """A job of `size` ranks on so many hosts."""

    size: int
    late: Callable[[int, int, int], float] = never
    """Seconds that a rank takes longer, in a step, to compute a bucket's gradients; or after the last, to step."""
    hosts: int = 1
    sync: bool = False
    """Each bucket is waited for before the next one is computed; else all of them after the last."""
    moves_s: float = 0.012
    """What all buckets take to be reduced."""
    ahead: Callable[[int], float] = never
    """Of a host's clock, as it was measured."""
    drift: Callable[[int], float] = never
    """By how much it is ahead by now, too."""
    totals: Callable[[int], dict] = lambda _: {}
    """Further totals of a rank."""
    steps: list[list[dict]] = field(default_factory=list)

    def host(self, rank):
        """Its number."""
        return rank * self.hosts // self.size

    def collected(self):
        """What ringrun has collected at its end."""
        collector = Collector(["python", "train.py"])
        collector.begin(self.size)
        for rank, messages in enumerate(self.messages()):
            for message in messages:
                collector.measured(rank, json.dumps(message))
        return collector

    def messages(self):
        """What each rank says."""
        self.steps.clear()
        self._run()
        return [list(self._messages(rank)) for rank in range(self.size)]

    def _run(self):
        chance = random.Random(self.size)
        now_s = [0.0] * self.size
        for number in range(STEPS):
            made = [{"number": number, "from_s": each, "operations": [], "waits": [], "more": 0} for each in now_s]
            moved_s, pending = 0.0, []
            for bucket in range(BUCKETS):
                for rank in range(self.size):
                    jitter_s = chance.uniform(0, 2e-4)
                    now_s[rank] += BACKWARD_S / BUCKETS + self.late(rank, number, bucket) + jitter_s
                begun_s = max(max(now_s) + 1e-4, moved_s)
                moved_s = begun_s + self.moves_s / BUCKETS
                pending.append((f"b{bucket}", moved_s))
                for rank, step in enumerate(made):
                    times = now_s[rank], max(now_s), begun_s, moved_s + 1e-5 * rank
                    step["operations"].append([f"b{bucket}", "allreduce", 1000 * (bucket + 1), *times, "ring"])
                if self.sync or bucket == BUCKETS - 1:
                    now_s = [_waited(step, pending, rank, now_s[rank]) for rank, step in enumerate(made)]
                    pending = []
            now_s = [each + OPTIMIZER_S + self.late(rank, number, BUCKETS) for rank, each in enumerate(now_s)]
            self.steps.append([step | {"to_s": now_s[rank]} for rank, step in enumerate(made)])

    def _messages(self, rank):
        host, own = self.host(rank), [each[rank] for each in self.steps]
        place = {"rank": rank, "host": f"h{host}", "host_number": host, "clock_ahead_s": self.ahead(host)}
        yield {"about": place | {"size": self.size, "pid": 100 + rank}}
        yield {"totals": self._totals(rank, own[:0], 0)}
        yield {"totals": self._totals(rank, own[1:], 30)}
        for step in own:
            yield {"step": _by_clock(step, self.ahead(host) + self.drift(host))}

    def _totals(self, rank, steps, second):
        """What it says after so many seconds, with these steps."""
        step_s = sum(step["to_s"] - step["from_s"] for step in steps)
        blocked_s = sum(to_s - from_s for step in steps for _, from_s, to_s in step["waits"])
        sums = {"lines": {"train.py:7": 900}, "core_wait_s": 0.0, "sent": {}, "send_s": {}} | self.totals(rank)
        sums |= {"samples": sum(sums["lines"].values()), "by_name": {"b0": [20, 20000, 0.06]}}
        sums |= {"by_algorithm": {"ring 4096": [80, 200000, 0.24]}, "examples": 20 * (rank + 1)}
        times = {math.floor(math.log(step_s / len(steps)) / math.log(1.05)): len(steps)} if steps else {}
        now = {"at_s": 1e6 + second, "step": len(steps), "step_s": step_s, "blocked_s": blocked_s, "histogram": times}
        memory = {"rss": (rank + 1) << 30, "shm": 1 << 20, "fusion": 1 << 24}
        return now | memory | {"moving_s": 0.2 * blocked_s, "hidden_s": 0.0, "no_overlap": ""} | (sums if steps else {})


def _waited(step, pending, rank, now_s):
    """Let a rank wait for what is pending, one after the other; return when it goes on."""
    for name, moved_s in pending:
        until_s = moved_s + 1e-5 * rank
        step["waits"] += [[name, now_s, until_s]] if until_s > now_s else []
        now_s = max(now_s, until_s)
    return now_s


def _by_clock(step, ahead_s):
    """The step by a clock that is ahead."""
    operations = [[*each[:3], *(time_s + ahead_s for time_s in each[3:7]), each[7]] for each in step["operations"]]
    waits = [[name, from_s + ahead_s, to_s + ahead_s] for name, from_s, to_s in step["waits"]]
    ends = {name: step[name] + ahead_s for name in ("from_s", "to_s")}
    return step | ends | {"operations": operations, "waits": waits}
