"""Preflight: before any rank starts, every host is asked what it has, and what would go wrong is said.

job         asks the hosts of a job, over ssh or through Slurm, and whether they can connect to this one
check       asks hosts that a Reach leads to; Preflight: their answers and what is wrong
probe       runs on each host and tells what it has; sent there as text
ask         sends it over reach/ and reads the answers
findings    answers → what is wrong, an error or a warning, each with its cure; pure
table       answers → one table, what is wrong marked; pure
names       many hosts' names in few words; pure
"""

from .ask import Facts
from .check import Preflight, check
from .findings import Finding
from .job import check_job
from .names import fold_names

__all__ = ["Facts", "Finding", "Preflight", "check", "check_job", "fold_names"]
