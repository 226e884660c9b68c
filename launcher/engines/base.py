"""What an engine is: one MPI implementation, seen from its launcher's side."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..environment import RankInfo
from ..network import LOST_AFTER_S

if TYPE_CHECKING:  # an agent does not need what it imports
    from ..hosts import Host

Version = tuple[int, ...]


class Library(NamedTuple):
    """The MPI library that mpi4py loads in the interpreter `python`."""

    text: str  # the first line of MPI_Get_library_version
    python: str
    prefix: str


class Launcher(NamedTuple):
    """A program that starts ranks: `mpirun` or one of its other names."""

    path: str
    version: Version


class Across(NamedTuple):
    """What a launcher needs to know to start ranks on several hosts."""

    ranks: Sequence[tuple["Host", int]]
    """The hosts, by names without a colon, in the order of their ranks, and how many ranks each gets."""

    rsh: Sequence[str]
    """The argv before a host's name and a command, of ssh or the like; empty where Slurm starts the MPI's daemons."""

    variables: Sequence[str]
    """The names of the variables that agents need before they reach ringrun; their values stand on no command line."""

    address: str = ""
    """This host's, for hosts that may not know its name; empty: they know it."""

    interfaces: Sequence[str] = ()
    """The network interfaces to use; none: the launcher and the MPI choose."""

    lost_after_s: float = LOST_AFTER_S
    """A host that is silent for longer is lost."""


class Engine(ABC):
    """One MPI implementation: its names, its command line, its variables. Has no state."""

    name: str
    """Its wheel's, and of ringreduce's extra."""

    title: str
    """As people write it."""

    launcher_names: tuple[str, ...]
    """The names its launcher goes by, the likeliest first."""

    library_begins: str
    """How a library of it begins to describe itself."""

    version_pattern: str
    """Of what `launcher --version` prints, with the version's numbers as groups, of which the last may be missing."""

    rank_variables: tuple[str, str, str, str]
    """By which a process knows its rank, the size, its rank on its host, and how many are there."""

    lost_peer_code: int | None = None
    """The exit code with which it ends a rank by itself when that has lost the connection to another, if it does."""

    needs_own_names: bool = False
    """It tells hosts apart by what they call themselves."""

    def library_version(self, library_text: str) -> Version:
        """Return the version in the text of a library of this implementation; () if there is none."""
        match = re.search(r"(\d+)\.(\d+)", library_text)
        return tuple(int(number) for number in match.groups()) if match else ()

    def launcher_version(self, version_text: str) -> Version | None:
        """Return the version in what `launcher --version` printed; None if another implementation printed it."""
        match = re.search(self.version_pattern, version_text)
        return tuple(int(number) for number in match.groups() if number) if match else None

    @abstractmethod
    def command(
        self, launcher: Launcher, size: int, program: Sequence[str], *, as_root: bool, across: Across | None = None
    ) -> list[str]:
        """Return the argv that starts `size` ranks of `program`, on this host or `across` several."""

    def environment(self, launcher_path: str) -> dict[str, str]:
        """Return variables for the launcher and the ranks, none by default; those the user has set are left alone."""
        return {}

    def across_environment(self, across: Across) -> dict[str, str]:
        """Return more variables for the launcher, and through it for the ranks, of a job on several hosts."""
        return self.network_environment(across.interfaces)

    def network_environment(self, interfaces: Sequence[str], rdma: Sequence[str] = ()) -> dict[str, str]:
        """Return variables by which a rank's MPI uses these network interfaces, and RDMA devices; none: it chooses."""
        return {}

    def has_chosen_network(self, launcher: Launcher, environ: Mapping[str, str], mpi_args: Sequence[str]) -> bool:
        """Return whether the user says to the MPI itself which interfaces it is to use."""
        return any(name in environ for name in self.network_environment(["any"]))

    def elastic_environment(self, launcher: Launcher, environ: Mapping[str, str], *, is_across: bool) -> dict[str, str]:
        """Return variables for the ranks of an elastic job, which outlive others; none by default.

        environ: what the ranks get.
        Raises:  MachineError where they cannot.
        """
        return {}

    def scratch(self, launcher: Launcher, directory: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return variables that put the launcher's own files on this host into `directory`; none by default.

        environ: what the user has set.
        """
        return {}

    def without_allocation(self) -> dict[str, str]:
        """Return variables by which the launcher asks no batch system for hosts, as ringrun did; none by default."""
        return {}

    def shared_memory(self, directory: str) -> dict[str, str]:
        """Return variables that put a rank's files in shared memory into `directory`, its own; none by default."""
        return {}

    def rank_info(self, environ: Mapping[str, str]) -> RankInfo:
        """Return which rank the process with these variables is; KeyError if this engine has not started it."""
        return RankInfo(*(int(environ[name]) for name in self.rank_variables))


def slots(across: Across) -> str:
    """Return the hosts and how many ranks each gets, as every launcher but srun takes them."""
    return ",".join(f"{host.name}:{count}" for host, count in across.ranks)
