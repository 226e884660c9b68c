"""Preflight: before any rank starts, every host is asked what it has, and what would go wrong is said.

check       asks the hosts of a job, or of a Remote; Preflight: their answers and what is wrong
probe       runs on each host and prints what it has; sent there as text
ask         runs it on the hosts (remote/) and reads the answers
findings    answers → what is wrong, an error or a warning, each with its cure; and one table, with marks; pure
"""

from .ask import Facts
from .check import Preflight, check, check_job
from .findings import Finding

__all__ = ["Facts", "Finding", "Preflight", "check", "check_job"]
