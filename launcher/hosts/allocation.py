"""The hosts that a batch system has given to this job, from the variables and files it has left for it."""

from collections.abc import Callable, Mapping

from ..errors import UsageError
from ..text import quoted
from .host import Allocation, Host, merge, parse_host, parse_slots
from .hostfile import parse_hostfile
from .slurm import slurm_allocation

_KUBERNETES_FOLDER = "/etc/mpi/"  # where the MPI Operator mounts its hostfile
HOSTFILE_VARIABLES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "HYDRA_HOST_FILE")
"""The default hostfiles of Open MPI 4, of 5, and of MPICH."""

Reader = Callable[[str], str]
"""Returns the text of a file; UsageError if there is none."""


def find_allocation(environ: Mapping[str, str], read: Reader) -> Allocation | None:
    """Return what a batch system says in `environ`, whose files `read` reads; None if none says anything.

    UsageError if it says what cannot be understood: to go on with this host alone would waste the others.
    """
    try:
        return (
            slurm_allocation(environ)
            or _lsf_allocation(environ, read)
            or _pbs_allocation(environ, read)
            or _hostfile_allocation(environ, read)
        )
    except UsageError as error:
        raise UsageError(f"{error}; to name the hosts yourself: -H or --hostfile") from None


def _lsf_allocation(environ: Mapping[str, str], read: Reader) -> Allocation | None:
    """LSB_MCPU_HOSTS is `h1 4 h2 4`; the file LSB_DJOB_HOSTFILE has a line for each slot."""
    if value := environ.get("LSB_MCPU_HOSTS", "").strip():
        hosts = _parse_lsf_hosts(value)
        why = f"LSB_MCPU_HOSTS={quoted(value)}"
    elif path := environ.get("LSB_DJOB_HOSTFILE"):
        hosts = _read_nodefile("LSB_DJOB_HOSTFILE", path, read)
        why = f"LSB_DJOB_HOSTFILE={path}"
    else:
        return None
    return Allocation("lsf", tuple(hosts), why)


def _parse_lsf_hosts(text: str) -> list[Host]:
    where = f"LSB_MCPU_HOSTS={quoted(text)}"
    words = text.split()
    if len(words) % 2:
        raise UsageError(f"{where}: expected pairs of a host and its slots, as in 'h1 4 h2 4'")
    pairs = zip(words[::2], words[1::2], strict=True)
    return merge([Host(parse_host(name, where).name, parse_slots(slots, where)) for name, slots in pairs])


def _pbs_allocation(environ: Mapping[str, str], read: Reader) -> Allocation | None:
    """The file PBS_NODEFILE (PBS, OpenPBS, Torque) has a line for each MPI process."""
    path = environ.get("PBS_NODEFILE")
    if not path:
        return None
    return Allocation("pbs", tuple(_read_nodefile("PBS_NODEFILE", path, read)), f"PBS_NODEFILE={path}")


def _hostfile_allocation(environ: Mapping[str, str], read: Reader) -> Allocation | None:
    """The default hostfile of an MPI; Kubernetes' MPI Operator lists the workers there."""
    for variable in HOSTFILE_VARIABLES:
        path = environ.get(variable)
        if path and path != "none":  # Open MPI's word for: there is none
            kind = "kubernetes" if path.startswith(_KUBERNETES_FOLDER) else "hostfile"
            return Allocation(kind, tuple(_read_hosts(variable, path, read)), f"{variable}={path}")
    return None


def _read_nodefile(variable: str, path: str, read: Reader) -> list[Host]:
    """Return the hosts of a file in which every line is one slot."""
    return [Host(host.name, host.slots or 1) for host in _read_hosts(variable, path, read)]


def _read_hosts(variable: str, path: str, read: Reader) -> list[Host]:
    try:
        return parse_hostfile(read(path), path)
    except UsageError as error:
        raise UsageError(f"{variable}: {error}") from None
