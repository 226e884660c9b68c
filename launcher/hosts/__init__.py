"""Which hosts run ranks: their names and slots, from the command line, a file or a batch system.

    host         a host, the list of -H (h1:4,h2:4), and whether a host is this one
    hostfile     a file, as Open MPI, MPICH, Horovod and PBS write it
    allocation   what a batch system has given to this job: Slurm (slurm, nodelist), LSF, PBS, Kubernetes' MPI Operator
    assign       the hosts of a job, and how many ranks each gets
    machines     the machines behind their names

Nothing here starts anything or asks another host. What cannot be understood is a UsageError that says where it stands
and what was expected there.
"""

from .allocation import HOSTFILE_VARIABLES
from .assign import Found, assign, may_get_ranks, named_hosts, place_ranks, without
from .host import MAX_SLOTS, Host, is_here, is_loopback, parse_host_list
from .hostfile import stop_discovery
from .machines import Interface, Machine, Machines
from .nodelist import fold_names

__all__ = [
    "HOSTFILE_VARIABLES",
    "MAX_SLOTS",
    "Found",
    "Host",
    "Interface",
    "Machine",
    "Machines",
    "assign",
    "fold_names",
    "is_here",
    "is_loopback",
    "may_get_ranks",
    "named_hosts",
    "parse_host_list",
    "place_ranks",
    "stop_discovery",
    "without",
]
