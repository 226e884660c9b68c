"""What the pictures share: one colour per contender in all of them, and a title that says what was measured where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OURS = {
    "allreduce_": "#d62728",
    "ringreduce": "#d62728",
    "ringreduce, NumPy": "#d62728",
    "ringreduce, torch": "#ff7f0e",
    "ringreduce, grouped": "#e377c2",
    "ring": "#ff7f0e",
    "halving": "#b8860b",
    "direct": "#e377c2",
    "doubling": "#8c564b",
    "shared": "#bcbd22",
    "hierarchical": "#800020",
}
"""Warm colours are ours, cold ones the peers'; red is the public function."""
PEERS = {
    "MPI_Allreduce": "#1f77b4",
    "torch gloo": "#17becf",
    "DDP gloo": "#17becf",
    "Horovod": "#9467bd",
    "compute alone": "#7f7f7f",
    "floor": "#7f7f7f",
    "raw": "#7f7f7f",
}


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each contender, the same in all pictures."""
    chosen = {}
    for name in names:
        peer = next((colour for start, colour in PEERS.items() if name.startswith(start)), "black")
        chosen[name] = OURS.get(name, peer)
    return chosen


def canvas(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure and its axes (always a 2-D array of them), without a window system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)


def finish(figure: Any, title: str, header: dict[str, Any], path: str) -> None:
    """The title, and below it the machine, the versions and the date."""
    peers = [f"{name} {header[name]}" for name in ("torch", "horovod") if header.get(name, "absent") != "absent"]
    versions = [str(header["mpi"])] if "mpi" in header else []
    machine = f"{header['cores']} cores ({header['processor']})"
    settings = [] if header["settings"] == "default" else [header["settings"]]
    small = ", ".join([machine, f"ringreduce {header['ringreduce']}", *settings, *versions, *peers, header["date"]])
    figure.suptitle(f"{title}\n", fontsize=11, fontweight="bold")
    figure.text(0.5, 0.995, f"\n\n{small}", ha="center", va="top", fontsize=7.5, color="0.35")
    figure.savefig(path, dpi=120)


def bytes_axis(axis: Any) -> None:
    """Powers of two in bytes, as people say them."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(base=2, numticks=40))
    axis.set_major_locator(LogLocator(base=16))
    axis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))


def bytes_text(count: float) -> str:
    """`4 MiB`, `512 B`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
