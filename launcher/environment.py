"""The environment of a rank's command, as a pure function of where the rank is and what the user has set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .connection.wire import ADDRESS_VARIABLE, AUTHKEY_VARIABLE, Setup
from .machine.topology import BY_ADDRESS, ORDER_VARIABLE, VISIBLE_VARIABLE

PRIVATE_PREFIX = "RINGRUN_"
"""Variables of this prefix are between ringrun and its agents; a rank does not see them."""

ENGINE_VARIABLE = "RINGRUN_ENGINE"
"""Which MPI launches the job: the name of one of engines.ENGINES."""

DIRECTORY_VARIABLE = "RINGRUN_DIRECTORY"
"""ringrun's private directory, on its own host."""

BIND_VARIABLE = "RINGRUN_BIND"
"""`1` if each rank is bound to its share of the cores."""

MASK_VARIABLE = "RINGRUN_MASK_GPUS"
"""`1` if each rank sees its own GPU only."""

VERBOSE_VARIABLE = "RINGRUN_VERBOSE"
"""`1` if ringrun shows more than a user needs."""

MASTER_PORT_VARIABLE = "RINGRUN_MASTER_PORT"
"""The MASTER_PORT that the user has set, or nothing."""

AGENT_VARIABLES = (
    ADDRESS_VARIABLE,
    AUTHKEY_VARIABLE,
    ENGINE_VARIABLE,
    DIRECTORY_VARIABLE,
    BIND_VARIABLE,
    MASK_VARIABLE,
    VERBOSE_VARIABLE,
    MASTER_PORT_VARIABLE,
)
"""What an agent must have before it reaches ringrun."""

HOOK_DIRECTORY = str(Path(__file__).parent / "hook")


@dataclass(frozen=True)
class Place:
    """Which rank this is, of how many, in the job and on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Settings:
    """What ringrun sends to an agent at its start, in addition to the address."""

    engine: str
    directory: str
    """Where the ranks of ringrun's own host leave their error files; agents elsewhere make one of their own."""
    bind: bool = True
    mask_gpus: bool = False
    verbose: bool = False
    master_port: str = ""
    """The MASTER_PORT that the user has set; empty: rank 0's agent finds a free one."""

    def to_environment(self) -> dict[str, str]:
        """Return the variables that carry these settings."""
        return {
            ENGINE_VARIABLE: self.engine,
            DIRECTORY_VARIABLE: self.directory,
            BIND_VARIABLE: str(int(self.bind)),
            MASK_VARIABLE: str(int(self.mask_gpus)),
            VERBOSE_VARIABLE: str(int(self.verbose)),
            MASTER_PORT_VARIABLE: self.master_port,
        }

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings":
        """Read back what `to_environment` wrote; KeyError where there is nothing."""
        return cls(
            environ[ENGINE_VARIABLE],
            environ[DIRECTORY_VARIABLE],
            bind=environ[BIND_VARIABLE] == "1",
            mask_gpus=environ[MASK_VARIABLE] == "1",
            verbose=environ[VERBOSE_VARIABLE] == "1",
            master_port=environ[MASTER_PORT_VARIABLE],
        )


def error_file(directory: str, rank: int) -> Path:
    """Return where rank `rank` leaves its uncaught exception."""
    return Path(directory) / f"rank{rank}.json"


def rank_environment(
    place: Place,
    setup: Setup,
    directory: str,
    inherited: Mapping[str, str],
    threads: int,
    only_gpu: str | None = None,
    placed_gpu: str = "",
) -> dict[str, str]:
    """Return the environment of the command of the rank at `place`, which has cores for `threads` threads.

    directory:  where the rank may leave its error file
    only_gpu:   what CUDA_VISIBLE_DEVICES calls the one GPU that the rank is to see; None leaves the choice to it.
    placed_gpu: the PCI bus id of its GPU, for ringreduce; empty if there is none, or it is not known.
    """
    everything = {**inherited, **setup.variables}
    environment = {name: value for name, value in everything.items() if not name.startswith(PRIVATE_PREFIX)}
    defaults = {
        "MASTER_ADDR": setup.master_address,
        "MASTER_PORT": str(setup.master_port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    if only_gpu is not None:
        environment |= {VISIBLE_VARIABLE: only_gpu, ORDER_VARIABLE: BY_ADDRESS}  # the order of our numbers
    environment |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "RINGREDUCE_ERROR_FILE": str(error_file(directory, place.rank)),
        "RINGREDUCE_PLACED_GPU": placed_gpu,
        "PYTHONPATH": os.pathsep.join(filter(None, [HOOK_DIRECTORY, everything.get("PYTHONPATH")])),
    }
    return environment
