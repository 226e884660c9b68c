"""The MPI's daemon that has started this rank."""

import os


def parent(pid):
    """The number of its parent."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def own():
    """It has started the shim, which is the parent of this rank's agent."""
    return parent(parent(os.getppid()))
