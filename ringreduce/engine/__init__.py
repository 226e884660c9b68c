"""The engine: turns submissions, from any thread and in any order, into collectives in the same order on all ranks.

    submit  ->  announce to the coordinator  ->  response: ready on all ranks  ->  fuse, run  ->  complete the handle

signature    the signatures that ranks compare, and their differences
submission   one submission on this rank, and its handle
inbox        hands submissions to the engine's thread; batching and sleep
protocol     control messages between engines
cache        signatures by number, so that announcing one costs a bit
coordinator  per process set, on its first rank: what is ready on all ranks?  A state machine without messages
process_set  a process set on this rank: what is pending and what runs
operations   fusion and collectives of what is ready
engine       the thread, one per process, that does all this
neutral      the neutral elements of joined ranks
errors_for   errors for submissions that cannot be accepted or completed
"""
