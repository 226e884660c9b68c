"""The agent: what an MPI's launcher starts as each rank, and what it knows of its rank's host.

    agent         starts the user's command, sends its output, obeys ringrun, reports the end
    rank_socket   datagrams to and from ringreduce in the rank
    stack_dumper  what the rank does just now: its Python stack, what ringreduce waits for
    death_notice  the rank's death, when it begins
    oom           whether the kernel's OOM killer ended it
    master_port   where rank 0's script may listen
    kept_commits  the folder of an elastic job's commits, for its next attempt
    shm_cleanup   shared memory that a killed rank leaves behind

Run as `python -m ringrun.agent`. Of ringrun's own side only report/traces.py is imported here.
"""
