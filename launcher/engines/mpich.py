"""MPICH, whose launcher is hydra."""

import re
from collections.abc import Mapping, Sequence

from ..environment import Place
from .base import Across, Engine, Launcher, Version


class MPICH(Engine):
    """MPICH's mpiexec.hydra. It needs no flag to run as root, to oversubscribe, or not to bind."""

    name = "mpich"
    title = "MPICH"
    launcher_names = ("mpiexec.hydra", "mpirun", "mpiexec", "mpirun.mpich", "mpiexec.mpich")

    def loaded_by(self, library_text: str) -> bool:
        """Return whether the text is MPICH's."""
        return library_text.startswith("MPICH Version")

    def launcher_version(self, version_text: str) -> Version | None:
        """Return the version in hydra's build details."""
        match = re.search(r"HYDRA build details:\s+Version:\s+(\d+)\.(\d+)(?:\.(\d+))?", version_text)
        return tuple(int(number) for number in match.groups() if number) if match else None

    def command(
        self, launcher: Launcher, size: int, program: Sequence[str], *, as_root: bool, across: Across | None = None
    ) -> list[str]:
        """Return mpiexec's argv."""
        return [launcher.path, *(_hosts(across) if across else ()), "-n", str(size), *program]

    def across_environment(self, across: Across) -> dict[str, str]:
        """Return the options for ssh, and the interface for MPICH's own network layers."""
        words = {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(across.ssh[1:])} if across.ssh else {}
        first = dict.fromkeys(("FI_TCP_IFACE", "FI_SOCKETS_IFACE"), across.interfaces[0]) if across.interfaces else {}
        ucx = {"UCX_NET_DEVICES": ",".join(across.interfaces)} if across.interfaces else {}
        return {**words, **first, **ucx}

    def environment(self, launcher_path: str) -> dict[str, str]:
        """Return nothing: MPICH's ranks yield while they wait, and hydra finds its own files."""
        return {}

    def place(self, environ: Mapping[str, str]) -> Place:
        """Read PMI_RANK and hydra's MPI_LOCALRANKID."""
        return Place(
            rank=int(environ["PMI_RANK"]),
            size=int(environ["PMI_SIZE"]),
            local_rank=int(environ["MPI_LOCALRANKID"]),
            local_size=int(environ["MPI_LOCALNRANKS"]),
        )


def _hosts(across: Across) -> list[str]:
    """Return the flags that say which hosts, how they are reached, and which variables go there."""
    launcher = ["-launcher", "ssh", "-launcher-exec", across.ssh[0]] if across.ssh else ["-launcher", "slurm"]
    hosts = ",".join(f"{host.name}:{count}" for host, count in across.ranks)
    interface = ["-iface", across.interfaces[0]] if across.interfaces else []
    return [*launcher, *interface, "-genvlist", ",".join(across.variables), "-hosts", hosts]
