"""One program, once on each of several hosts, all at the same time: what each wrote, and why a host did not answer.

    hosts       Remote: runs a program on all hosts of a job, this one included
    over_ssh    runs it on other hosts over ssh; over_slurm: on the nodes of a Slurm job, through srun
    reach       which of these it is for a job, also for the MPI's launcher
    base        what a runner, an answer and a problem are
    refusals    what ssh and srun write when they fail → one problem with its cure; pure
    parallel    runs many child processes at once and keeps what they write

The program is an argv. No shell ever sees it as text: over ssh it travels on standard input (over_ssh.py says how).
Its own standard input is empty.
"""

from .base import Answer, Problem, Runner
from .hosts import Remote
from .over_slurm import Slurm
from .over_ssh import Ssh
from .reach import OverSlurm, OverSsh, Reach, reach_of

__all__ = ["Answer", "OverSlurm", "OverSsh", "Problem", "Reach", "Remote", "Runner", "Slurm", "Ssh", "reach_of"]
