"""The environment of a rank's command, as a pure function of where the rank is and what the user has set."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .connection.wire import AUTHKEY_VARIABLE, Address, Setup
from .machine.topology import BY_ADDRESS, ORDER_VARIABLE, VISIBLE_VARIABLE

PRIVATE_PREFIX = "RINGRUN_"
"""Variables of this prefix are between ringrun and its agents; a rank does not see them."""

SETTINGS_VARIABLE = "RINGRUN_SETTINGS"
"""The Settings of this job, as JSON."""

AGENT_VARIABLES = (AUTHKEY_VARIABLE, SETTINGS_VARIABLE)
"""What an agent must have before it reaches ringrun."""

COMMITS_VARIABLE = "RINGREDUCE_STATE_DIR"
"""Setup's `commits`, for the ranks."""

COUNT_VARIABLE = "RINGREDUCE_RESTART_COUNT"
"""How many attempts there were before this one, for every rank: 0 at first, and without --restarts."""

EXIT_S = 3.0
"""How long a rank's process may still run once its script has failed, if --grace says nothing else."""

HOOK_DIRECTORY = str(Path(__file__).parent / "hook")

HOROVOD_DIRECTORY = str(Path(__file__).parent / "horovod")
"""Where `import horovod` finds ringreduce."""

_TRUE = ("1", "true", "yes", "on")


class RankInfo(NamedTuple):
    """Which rank this is, of how many, in the job and on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def horovods_variables(rank_info: RankInfo) -> dict[str, str]:
    """Return what Horovod's ranks have in the environment; libraries take it for the sign of horovodrun."""
    return {f"HOROVOD_{name.upper()}": str(value) for name, value in rank_info._asdict().items()}


class Settings(NamedTuple):
    """What an agent gets before it reaches ringrun, in one variable; all else is in Setup."""

    address: Address
    """Where ringrun listens."""
    engine: str
    """Which MPI launches the job: the name of one of engines.ENGINES."""
    directory: str
    """Where the ranks of ringrun's own host leave their error files; agents elsewhere make one of their own."""
    bind: bool = True
    """Each rank is bound to its share of the cores."""
    mask_gpus: bool = False
    """Each rank sees its own GPU only."""
    verbose: bool = False
    """ringrun shows more than a user needs."""
    master_port: int = 0
    """The MASTER_PORT that the user has set; 0: rank 0's agent finds a free one."""
    exit_s: float = EXIT_S
    """How long a rank's process may still run once its script has failed."""

    def to_environment(self) -> dict[str, str]:
        """Return the variable that carries these settings."""
        return {SETTINGS_VARIABLE: json.dumps({**self._asdict(), "address": str(self.address)})}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings":
        """Read back what `to_environment` wrote; KeyError where there is nothing, ValueError for anything else."""
        fields = json.loads(environ[SETTINGS_VARIABLE])
        return cls(**{**fields, "address": Address.parse(fields["address"])})


def error_file(directory: str, rank: int) -> Path:
    """Return where rank `rank` leaves its uncaught exception."""
    return Path(directory) / f"rank{rank}.json"


def rank_environment(
    rank_info: RankInfo,
    setup: Setup,
    directory: str,
    inherited: Mapping[str, str],
    threads: int,
    only_gpu: str | None = None,
    placed_gpu: str = "",
) -> dict[str, str]:
    """Return the environment of the command of the rank `rank_info`, which has cores for `threads` threads.

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
    }
    environment |= {name: value for name, value in defaults.items() if not environment.get(name)}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # an empty one says no; an empty one of the others says nothing
    if only_gpu is not None:
        environment |= {VISIBLE_VARIABLE: only_gpu, ORDER_VARIABLE: BY_ADDRESS}  # the order of our numbers
    path = [HOOK_DIRECTORY, everything.get("PYTHONPATH")]
    if everything.get("RINGREDUCE_HOROVOD", "").lower() in _TRUE:
        path.insert(1, HOROVOD_DIRECTORY)
    python_path = os.pathsep.join(filter(None, path))
    if HOROVOD_DIRECTORY in python_path.split(os.pathsep):  # by the flag, or in a job whose driver has it there
        environment |= horovods_variables(rank_info)
    environment |= {
        "RANK": str(rank_info.rank),
        "LOCAL_RANK": str(rank_info.local_rank),
        "WORLD_SIZE": str(rank_info.size),
        "LOCAL_WORLD_SIZE": str(rank_info.local_size),
        "ROLE_RANK": str(rank_info.rank),
        "ROLE_WORLD_SIZE": str(rank_info.size),
        "TORCHELASTIC_RESTART_COUNT": everything.get(COUNT_VARIABLE, "0"),
        "RINGREDUCE_ERROR_FILE": str(error_file(directory, rank_info.rank)),
        "RINGREDUCE_PLACED_GPU": placed_gpu,
        COMMITS_VARIABLE: setup.commits,
        "PYTHONPATH": python_path,
    }
    return environment
