"""Recovery: what the ranks of an elastic job (`ringrun --elastic`) do when one of them dies. Who calls what:

    the rank that dies       the kernel releases the mutex that death_notice.py locked: its agent hears of it
      ↓                      ringrun decides who is left, and sends all agents a list of ranks; each tells its rank
    every other rank
      thread that listens    monitor/launcher_link.py StatusServer → membership.py Members.hear
                             → engine.give_up: what is pending, and what is submitted from now on, raises PeerLostError
      training thread        elastic/loop.py run catches it, restores the last commit
                             → elastic_runtime.py reform    waits for the list, ends the engine, waits for the GPU
                               → rendezvous.py meet         all on the list are there; with a newer list: from the start
                               → enter                      a new engine, for the world of the list
                             → state.sync, from the rank with the most commits; the training function begins again

A spare waits in init() for a list that names it, and then meets the others in the same way. A parameter server
(ps/roles.py) calls `reform` as elastic.run does. ../lifecycle.py makes an ElasticRuntime instead of a Runtime; nobody
else imports this package.

membership       the launcher's lists
death_notice     how a rank's agent hears of its death at once
daemon           how a rank outlives Open MPI's daemon on its host
rendezvous       the ranks of a list meet: later worlds, from the first one
elastic_runtime  ElasticRuntime: one world after the other
"""
