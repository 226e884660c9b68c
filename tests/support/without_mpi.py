"""ringrun whose agents no MPI starts: for tests of lines, terminals and stdin, whose ranks do not use one.

    without_mpi.py -np 2 python script.py       as `ringrun -np 2 python script.py`

It does not ask which MPI there is, and instead of mpirun it starts itself: without_mpi.py --agents 2 AGENT
"""

import os
import sys


def start_agents(size: int) -> int:
    """Fork so many off one interpreter, with the variables that MPICH's launcher sets; the first code that is not 0."""
    from ringrun.agent import agent
    from ringrun.environment import Settings

    os.environ.update(PMI_SIZE=str(size), MPI_LOCALNRANKS=str(size))
    children = []
    for rank in range(size):
        os.environ.update(PMI_RANK=str(rank), MPI_LOCALRANKID=str(rank))
        children.append(os.fork())
        if not children[-1]:
            if rank == 1 and "ATTACK" in os.environ:
                from attacked_link import through_attacker

                settings = Settings.from_environment(os.environ)
                his = through_attacker(settings.address, *os.environ["ATTACK"].split(" to "))
                os.environ.update(settings._replace(address=his).to_environment())
            agent.main()  # never returns
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return next(filter(None, map(os.waitstatus_to_exitcode, statuses)), 0)


def main() -> int:
    from ringrun import cli
    from ringrun.engines import MPICH, Launcher, Library
    from ringrun.engines.detect import Detected

    class WithoutMpi(MPICH):
        def command(self, launcher, size, program, *, as_root, across=None):
            return [sys.executable, __file__, "--agents", str(size), *program]

    library = Library("none: agents are started by a test", sys.executable, sys.prefix)
    cli.detect = lambda python: Detected(WithoutMpi(), library, Launcher(__file__, (0,)))
    return cli.main()


if __name__ == "__main__":
    sys.exit(start_agents(int(sys.argv[2])) if sys.argv[1:2] == ["--agents"] else main())
