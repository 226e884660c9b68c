"""`ringrun doctor`: what is wrong with the hosts and the links between them, and what to do about it.

command     the command line, and what is printed; its docstring is the manual
start       starts the job that measures, one rank on each host
worker      what these ranks run
links       the worker's lines → what is slow, and what to do; pure
matrix      the figures as text; pure
"""

from .command import run

__all__ = ["run"]
