"""This installation and this job: for bug reports, and to see which algorithm was chosen."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import numpy as np

from ringreduce import __version__, runtime
from ringreduce.collectives.cost_model import Constants
from ringreduce.kernels import native
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.transport import mpi
from ringrun.doctor import wire_cost


@dataclasses.dataclass(frozen=True)
class Info:
    """See `info`; str() gives a table."""

    version: str
    python: str
    numpy: str
    mpi: str
    mpi_threads: str
    rank: int
    size: int
    hosts: tuple[int, ...]
    """The number of the host of each rank."""
    generation: int
    gpu: str
    """The GPU that init() made current, by CUDA's index, and why. Arrays may lie on another."""
    algorithm: str
    """How an allreduce of all ranks moves data, by its size in bytes."""
    gpu_algorithm: str
    """How an allreduce of all ranks moves GPU arrays, and why; chosen when the first one is submitted."""
    overlap: bool
    """Gradients on the host are reduced while backward still runs, from the ninth step of a torch optimizer on: a core
    or a wire is free, and no script has switched it off; else after it."""
    no_overlap: str
    """Why a torch optimizer does not: by which tensor and line the script has switched it off; empty: it has not."""
    usable_algorithms: tuple[str, ...]
    """The values that RINGREDUCE_ALGORITHM can take here."""
    constants: Constants
    """The cost model's constants: measured at the start, or set by RINGREDUCE_COSTS."""
    links: str
    """Which hosts have a slow link, and in which order a ring passes the hosts, where that is not their ranks'."""
    wire: str
    """How long gradients travel between the hosts, by each way to send them in fewer bits; empty on one host."""
    kernels: str
    """What sums, copies and waits in a host's memory: "compiled"; "numpy" where no compiler was there for it."""
    stores: str
    """How large all-reduces write into a host's memory, by what was faster lately: plain stores where its ranks' cores
    share a cache, streaming ones, past the caches, where they do not; empty without shared memory."""
    shared_memory_bytes: int
    """Shared memory that this rank contributes on its host; 0: there is none."""
    process_sets: dict[int, tuple[int, ...]]
    fusion_buffer_bytes: int
    """Size of the fusion buffer."""
    submissions: int
    """Operations that this rank submitted."""
    known_submissions: int
    """Submitted operations that the ranks remembered, so that a counter in shared memory sufficed to agree."""
    control_messages: int
    """Messages that this rank sent to agree on its operations."""
    control_bytes: int
    """The total size of those messages."""
    settings: dict[str, Any]

    def __str__(self) -> str:
        rows = dict(vars(self))
        rows |= {f"settings.{name}": value for name, value in rows.pop("settings").items()}
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def info() -> Info:
    """What this rank knows about the job; raises NotInitializedError before init().

    >>> print(info())                                                                                  # doctest: +SKIP
    version                  0.1.0
    mpi                      Open MPI v5.0.11
    ...
    """
    current = runtime.current("info")
    engine = current.engine
    window, context = engine.host.window, engine.states[GLOBAL].executor.context
    algorithms = context.algorithms
    library, threads = ("threads of one process", "") if current.world.comm is None else mpi.mpi_library()
    return Info(
        version=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        mpi=library,
        mpi_threads=threads,
        rank=current.world.rank,
        size=current.world.size,
        hosts=current.world.hosts,
        generation=current.world.generation,
        gpu=str(current.gpu),
        algorithm=algorithms.text() + algorithms.across,
        gpu_algorithm=context.gpu.text(),
        overlap=engine.host.overlaps and not engine.host.no_overlap,
        no_overlap=engine.host.no_overlap,
        usable_algorithms=tuple(algorithms.usable),
        constants=engine.host.constants,
        links=str(engine.host.links),
        wire=wire_cost.summary(len(set(current.world.hosts)), 8 * engine.host.constants.wire_gbs),
        kernels="numpy" if native.module is None else "compiled",
        stores=algorithms.stores,
        shared_memory_bytes=0 if window is None else len(window.blocks[0]),
        process_sets=dict(engine.process_sets.sets),
        fusion_buffer_bytes=engine.fusion_buffer.total_bytes,
        submissions=engine.submitting.count,
        known_submissions=engine.negotiation.known_submissions,
        control_messages=engine.mailbox.messages,
        control_bytes=engine.mailbox.nbytes,
        settings=dataclasses.asdict(current.settings),
    )
