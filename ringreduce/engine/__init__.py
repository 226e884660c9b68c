"""What turns tensors that ranks submit, from any thread and in any order, into collectives that all ranks run alike.

    submit  ->  announce to the coordinator  ->  respond: all ranks have it  ->  fuse, run  ->  complete the handle

signature  what a rank wants done with a tensor, and how two ranks' signatures differ
submission      one submission on this rank, and its handle
inbox        where the user's threads and the engine's meet; gathering and rest
control messages      what engines write to each other
cache        tensors seen before, by number: to announce one costs a bit
coordinator  per process set, on its first rank: what is ready on all ranks?  A state machine without messages
process set         a process set on this rank: pending, under way, next
operations   what is run once all ranks agree: fusion and the collectives
engine       the thread, one a process, that does all this
joined       what a rank that has joined gives
refusals     why a submission cannot be taken or completed
stalls       who waits for whom, and what the others do instead
timeline     what happened when, for chrome://tracing and Perfetto; recording: of all ranks
"""
