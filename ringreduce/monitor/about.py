"""What a rank is, and what its world can do: the first message of `Reporting`."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
from typing import Any

import numpy as np

from ringreduce._version import __version__
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.host import Host
from ringreduce.settings import PER_RANK, Settings
from ringreduce.world import World

FRAMEWORKS = "torch", "jax", "tensorflow", "keras", "cupy", "mpi4py"


def about(
    world: World, settings: Settings, host: Host, algorithms: Algorithms, clock_ahead_us: float
) -> dict[str, Any]:
    """See `Reporting`; what is equal on all ranks, only rank 0 says."""
    own = {
        "rank": world.rank,
        "size": world.size,
        "origin": world.origins[world.rank] if world.origins else world.rank,
        "host": socket.gethostname(),
        "host_number": world.hosts[world.rank],
        "pid": os.getpid(),
        "clock_ahead_s": clock_ahead_us / 1e6,
    }
    if world.rank:
        return own
    defaults = dataclasses.asdict(Settings())
    changed = {
        name: [value, defaults[name]]
        for name, value in dataclasses.asdict(settings).items()
        if value != defaults[name] and name not in PER_RANK
    }
    links = [[*pair, 1e9 * gbs, host.constants.wire_us / 1e6] for pair, gbs in host.links.gbs]
    return {**own, "versions": versions(), "settings": changed, "links": links, "algorithms": algorithms.table()}


def versions() -> dict[str, str]:
    """Of Python and of what is imported."""
    found = {"ringreduce": __version__, "python": platform.python_version(), "numpy": np.__version__}
    imported = {name: getattr(sys.modules.get(name), "__version__", "") for name in FRAMEWORKS}
    return found | {name: version for name, version in imported.items() if version}
