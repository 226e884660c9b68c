"""What a training step costs by each way to send less between hosts: an estimate to choose by, from a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.kernels.quantized import BLOCK, block_bytes

INT8, INT4 = (block_bytes(bits) / (4 * BLOCK) for bits in (8, 4))
LOCAL_STEPS, STREAMED_STEPS = 8, 20


class Way(NamedTuple):
    """A way to send gradients, or parameters now and then."""

    name: str
    share: float
    """Bytes of a step, over those of fp32."""
    hidden: bool = False
    """They travel while the next steps compute."""


WAYS = (
    Way("fp32", 1.0),
    Way("fp16", 0.5),
    Way("int8", INT8),
    Way("int4", INT4),
    Way("PowerSGD(rank=4)", 0.02),  # of matrices of 384 x 1536; of larger ones less
    Way(f"LocalSGD(sync_every={LOCAL_STEPS})", 1 / LOCAL_STEPS),
    Way(f"DiLoCo(sync_every={STREAMED_STEPS}, int4)", INT4 / STREAMED_STEPS, hidden=True),
    Way("nothing sent", 0.0),
)


class Cost(NamedTuple):
    """Of one way: bytes that each host sends in a step, and seconds of the step."""

    name: str
    sent_bytes: float
    step_s: float


def sent_bytes(gradient_bytes: float, hosts: int) -> float:
    """What each host sends, and gets, in an all-reduce of so many bytes over so many hosts; of fp32."""
    return 2 * gradient_bytes * (hosts - 1) / hosts


def costs(gradient_bytes: float, computing_s: float, hosts: int, gbit_s: float) -> list[Cost]:
    """Of each way: a step computes for `computing_s`, then sends over a wire of `gbit_s`; only hidden ways overlap.

    The last row sends nothing: the most that any way can gain. With F FLOP/s, T tokens and a wire of W bytes/s a host,
    and 6 FLOP a token and parameter, it is 1 + 4/3 (H - 1) / H F / (T W), whatever the size of the model.
    """
    whole = sent_bytes(gradient_bytes, hosts)

    def step_s(way: Way) -> float:
        wire_s = 8e-9 * way.share * whole / gbit_s
        return max(computing_s, wire_s) if way.hidden else computing_s + wire_s

    return [Cost(way.name, way.share * whole, step_s(way)) for way in WAYS]


def table(rows: Sequence[Cost]) -> str:
    """Aligned lines, a heading first; the last column: how many times sooner than the first way."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':<{width}}  a host sends    a step  sooner"]
    for name, sent, step_s in rows:
        lines.append(f"{name:<{width}}  {sent / 1e6:>9.4g} MB  {step_s:>6.3g} s  {rows[0].step_s / step_s:>6.3g}")
    return "\n".join(lines)


def summary(hosts: int, gbit_s: float) -> str:
    """How long 100 MB of gradients are on the wire by the ways that reduce each; empty for one host."""
    if hosts == 1:
        return ""
    found = [f"{row.step_s:.3g} s as {row.name}" for row in costs(100e6, 0.0, hosts, gbit_s)[:4]]
    return f"100 MB of gradients take {', '.join(found)}, over {gbit_s:.3g} Gbit/s between {hosts} hosts"
