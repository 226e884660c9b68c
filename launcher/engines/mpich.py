"""MPICH, whose launcher is hydra."""

import re
from collections.abc import Mapping, Sequence

from ..environment import Place
from .base import Engine, Launcher, Version


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

    def command(self, launcher: Launcher, size: int, program: Sequence[str], *, as_root: bool) -> list[str]:
        """Return mpiexec's argv."""
        return [launcher.path, "-n", str(size), *program]

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
