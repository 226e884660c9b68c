"""The launcher's own errors: each ends ringrun with one line on stderr and its exit code.

LauncherError
 ├ UsageError     2   the command line: a missing or wrong argument, a command that cannot be run
 └ MachineError   3   this machine: no mpi4py, no MPI library, no mpirun
    └ NotStartedError 3   mpirun ended before any rank had started

A rank that fails is no error of ringrun's: see outcome.py.
"""


class LauncherError(Exception):
    """Ends ringrun with `exit_code`, saying why."""

    exit_code = 1


class UsageError(LauncherError):
    """The command line cannot be obeyed."""

    exit_code = 2


class MachineError(LauncherError):
    """This machine lacks what the job needs."""

    exit_code = 3


class NotStartedError(MachineError):
    """mpirun ended before any rank had started; nothing of the user's has run."""
