"""Which named operations are ready on all ranks of a process set, in one order for all.

protocol     control messages between engines
cache        signatures by number, so that announcing one costs a bit
coordinator  per process set, on its first rank: what is ready on all ranks?  A state machine without messages
tally        counts over many ranks, kept incrementally
neutral      the neutral elements of joined ranks
"""
