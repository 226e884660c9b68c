"""Slurm's srun, which starts the ranks of an MPI itself, through the PMI that both know."""

from collections.abc import Mapping, Sequence

from ..environment import RankInfo
from ..errors import UsageError
from .base import Across, Engine, Launcher

STEP = ("--overlap", "--kill-on-bad-exit=0", "--wait=0")
"""Of each step that ringrun starts: it takes none of the job's slots, and no task ends another."""


def on_nodes(names: Sequence[str], count: int) -> list[str]:
    """Return the flags of a step that has `count` tasks on each of the nodes `names`."""
    return [f"--nodelist={','.join(names)}", f"--nodes={len(names)}", f"--ntasks-per-node={count}"]


class Srun(Engine):
    """srun with one of its PMI plugins. It is not an MPI, and loads no library."""

    name = "srun"
    title = "Slurm's srun"
    launcher_names = ("srun",)
    version_pattern = r"^slurm(?:-wlm)? (\d+)\.(\d+)(?:\.(\d+))?"  # distributions write slurm-wlm
    rank_variables = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")

    def __init__(self, pmi: str = "pmi2") -> None:
        """pmi: the value of --mpi, pmi2 or pmix."""
        self._pmi = pmi

    def command(
        self, launcher: Launcher, size: int, program: Sequence[str], *, as_root: bool, across: Across | None = None
    ) -> list[str]:
        """Return srun's argv: ringrun itself binds the ranks, and ends the others when one fails.

        Raises UsageError for unequal numbers of ranks: then srun does not let the MPI know which ranks share a host.
        """
        flags = [f"--mpi={self._pmi}", "--cpu-bind=quiet,none", "--overcommit", *STEP]
        if across:
            names, counts = zip(*((host.name, count) for host, count in across.ranks), strict=True)
            if len(set(counts)) > 1:
                counts_text = ", ".join(f"{name}:{count}" for name, count in zip(names, counts, strict=True))
                raise UsageError(
                    f"--launcher srun: srun starts the same number of ranks on every host, not {counts_text}; "
                    "leave --launcher out, or give all hosts the same number of slots"
                )
            flags += [*on_nodes(names, counts[0]), "--export=ALL"]
        return [launcher.path, *flags, f"--ntasks={size}", *program]

    def environment(self, launcher_path: str) -> dict[str, str]:
        """Return MPICH's network module.

        Its other one, UCX, exchanges addresses in blocks that hold whatever was in that memory. Where much is loaded
        before MPI starts that is longer than Slurm's PMI takes in a line, and MPI_Init hangs.
        """
        return {"MPIR_CVAR_CH4_NETMOD": "ofi"}

    def rank_info(self, environ: Mapping[str, str]) -> RankInfo:
        """Return which rank it is; Slurm tells how many are on each node."""
        *_, tasks = self.rank_variables
        here = _tasks_of_node(environ[tasks], int(environ["SLURM_NODEID"]))
        return super().rank_info({**environ, tasks: str(here)})


def _tasks_of_node(text: str, node: int) -> int:
    """Return how many tasks the node has in `4(x2),1`: 4, 4 and 1."""
    for item in text.split(","):
        count, _, times = item.partition("(x")
        node -= int(times.rstrip(")")) if times else 1
        if node < 0:
            return int(count)
    raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: it has fewer nodes")
