"""What a training step costs by each way to send less between hosts: an estimate to choose by, from a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.kernels.quantized import BLOCK, block_bytes

INT8, INT4 = (block_bytes(bits) / (4 * BLOCK) for bits in (8, 4))
LOCAL_STEPS, STREAMED_STEPS = 8, 20
_HIDDEN = f"DiLoCo(sync_every={STREAMED_STEPS}, int4)"  # travels while the next steps compute

SHARES = {
    "fp32": 1.0,
    "fp16": 0.5,
    "int8": INT8,
    "int4": INT4,
    "PowerSGD(rank=4)": 0.02,  # of matrices of 384 x 1536; of larger ones less
    f"LocalSGD(sync_every={LOCAL_STEPS})": 1 / LOCAL_STEPS,
    _HIDDEN: INT4 / STREAMED_STEPS,
    "nothing sent": 0.0,
}
"""Ways to send gradients, or parameters now and then: the bytes of a step, over those of fp32."""


class Cost(NamedTuple):
    """Of one way: bytes that each host sends in a step, and seconds of the step."""

    name: str
    sent_bytes: float
    step_s: float


def costs(gradient_bytes: float, computing_s: float, hosts: int, gbit_s: float) -> list[Cost]:
    """Of each way: a step computes for `computing_s`, then sends over a wire of `gbit_s`; only hidden ways overlap.

    In an all-reduce of fp32 a host sends, and gets, 2 (H - 1) / H of all bytes. The last row sends nothing: the most
    that any way can gain. With F FLOP/s, T tokens and a wire of W bytes/s a host, and 6 FLOP a token and parameter, it
    is 1 + 4/3 (H - 1) / H F / (T W), whatever the size of the model.
    """
    rows = []
    for name, share in SHARES.items():
        sent_bytes = share * 2 * gradient_bytes * (hosts - 1) / hosts
        wire_s = 8e-9 * sent_bytes / gbit_s
        step_s = max(computing_s, wire_s) if name == _HIDDEN else computing_s + wire_s
        rows.append(Cost(name, sent_bytes, step_s))
    return rows


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
