"""ringrun: starts a command as N ranks of one MPI job, shows their output, and ends them together.

The manual is `ringrun -h` (the docstring of cli.py). From the user's shell down to a rank:

    ringrun           cli · request                      one process: reads the command line, starts the job, ends it
      reads           arguments · config/ (flags, file, variables) · hosts/ (which hosts, how many ranks on each)
      looks           machine/ (cores, GPUs) · remote/ (programs on other hosts) · preflight/ (what those hosts have)
                      ssh · network (own addresses) · forward (which variables leave this host)
      runs            job/ (start, supervise, restart) · elastic · output/ (of ranks) · report/ (what failed, stacks)
                      run_report/ (--report, --metrics-port: what each step waits for)
      └ mpirun        engines/                           Open MPI's or MPICH's own launcher, or srun
          └ agent     agent/ · environment · processes   one a rank: starts the command, reports how it ended
              └ rank  hook/ · horovod/                   the user's command; the hook reports a Python exception
    ringrun ↔ agent   connection/                        a socket: mpirun's own streams mix lines and name no rank
    nodes without ssh join/                              each runs ringrun join: a head, and others that it uses
    without ringrun   pmi/                               ranks that torchrun, Ray, … have started: answers their MPI
    on Ray, Spark …   lending                            their tasks lend slots to a run() in their driver
    other commands    doctor/ · scaling/ · stacks · top · twice (--twice) · build (--check-build)
    in a script       run_function                       ringreduce.run(): starts ringrun, and gets the ranks' results
    everywhere        text · errors · folders · records (of steps)
"""
