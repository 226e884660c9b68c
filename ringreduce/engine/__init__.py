"""The engine: turns submissions, from any thread and in any order, into collectives in the same order on all ranks.

    submit  ->  count, or announce to the coordinator  ->  the schedule: ready on all ranks  ->  fuse, run  ->  complete

engine            the thread, one per process: polls its services
polling           who polls: the engine's thread, or for a moment a caller's that waits
submitting        how the user's threads submit operations
inbox             hands submissions to the engine's thread; batching and sleep
process_sets      adds and removes process sets, and runs their operations
leaving           how an engine ends
activity          what this rank does and waits for, in words
timeline_control  starting and stopping the timeline

Which operations are ready is decided in negotiation/; they are run in execution/.
"""
