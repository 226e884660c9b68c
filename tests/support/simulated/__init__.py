"""An elastic job in virtual time: ringrun's decisions and its ranks' as they are, over a network and faults of ours.

    with simulation():
        job = SimulatedJob(Plan(np=3, faults=[Fault(rank=1, when=4, how="kill")]))
        job.run()      # ringrun's exit code; AssertionError where a property does not hold
        job.said       # what ringrun has printed

Real: ringrun's Supervisor with all that it decides by, what goes over the wire, what a rank hears and says, re-forming
(recovery/), elastic.run, and the end of a rank. Simulated: processes, agents, MPI's messages
and the clock; and an engine whose one operation exchanges a value with all ranks of the world.

network.py has the plan, the clock and the messages; job.py ringrun's side; rank.py a rank with its agent; fakes.py
its MPI, its engine and its script; properties.py what must hold.
"""
