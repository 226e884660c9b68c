"""The engine: turns submissions, from any thread and in any order, into collectives in the same order on all ranks.

    submit  ->  count, or announce to the coordinator  ->  the schedule: ready on all ranks  ->  fuse, run  ->  complete

engine            the thread, one per process: polls its services
polling           who polls: the engine's thread, or for a moment a caller's that waits
submitting        how the user's threads submit operations
express           short known operations in the caller's thread, where nothing else is under way
inbox             hands submissions to the engine's thread; batching and sleep
process_sets      adds and removes process sets, and runs their operations and the channels'
negotiation       announces this rank's submissions, does a leader's and a coordinator's work, runs what is ready
channels          opens, closes and watches channels, in which nothing is negotiated
stalls            which ranks are missing, and what they do instead; what this rank waits for, in words

Which operations are ready is decided in negotiation/; they are run in execution/.

Threads and locks. Each takes those of its row from left to right, and waits for none while it holds one further right:

    thread                   Inbox.driving   Polling.lock   Inbox.lock   and does
    ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    a user's that submits                                     briefly    Inbox.put, Channel.enqueue
    a user's that waits          held           held          briefly    polls for a moment; the engine's thread sleeps
    a user's in a lane                          held                     one short operation of an idle channel
    a user's, by express                        held          briefly    one short known operation, while no other runs
    the engine's                                held          briefly    polls: callbacks, negotiation, operations
    any, for a report                                         briefly    looks: stalls, sets, the launcher's questions

Who may touch what is one rule: see `Polling`.
"""
