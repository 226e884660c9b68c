"""The engine: turns submissions, from any thread and in any order, into collectives in the same order on all ranks.

    submit  ->  announce to the coordinator  ->  response: ready on all ranks  ->  fuse, run  ->  complete the handle

inbox        hands submissions to the engine's thread; batching and sleep
process_set  a process set on this rank: what is pending and what runs
engine       the thread, one per process, that does all this
errors_for   errors for submissions that cannot be accepted or completed

Which operations are ready is decided in negotiation/; they are run in execution/.
"""
