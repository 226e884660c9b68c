"""ringrun: starts a command as N ranks of one MPI job, shows their output, and ends them together.

The manual is `ringrun -h` (the docstring of cli.py). From the user's shell down to a rank:

    ringrun        cli · config/ · job/ · connection/ · output/ · report/     one process: decides, prints, ends the job
      └ mpirun     engines/                               Open MPI's or MPICH's own launcher
          └ agent  agent/ · connection/ · environment · hook/     one a rank: starts the command, reports how it ended
              └ the user's command, in its own session

Agents talk to ringrun over a socket (connection/), not through mpirun's standard streams, which mix lines
and do not say which rank failed.
"""
