"""Where the ranks go: hosts and their slots, from the command line, a file or a batch system, and ranks over them.

    host_list    -H h1:4,h2:4
    hostfile     a file, as Open MPI, MPICH, Horovod and PBS write it
    allocation   what a batch system has given to this job: Slurm (slurm.py), LSF, PBS, Kubernetes' MPI Operator
    assign       how many ranks each host gets
    here         whether one of them is this host

Nothing here starts anything or asks a host: all but `read_text` are pure functions of text. What cannot be
understood is a UsageError that says where it stands and what was expected there.
"""

from .allocation import find_allocation
from .assign import assign
from .here import is_here
from .host import Allocation, Host
from .host_list import parse_host_list
from .hostfile import parse_hostfile, read_hostfile, read_text
from .slurm import expand_nodelist

__all__ = [
    "Allocation",
    "Host",
    "assign",
    "expand_nodelist",
    "find_allocation",
    "is_here",
    "parse_host_list",
    "parse_hostfile",
    "read_hostfile",
    "read_text",
]
