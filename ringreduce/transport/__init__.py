"""How bytes move between ranks.

base      what a transport is: send, receive, control messages, rest
message   MPI point-to-point messages, and control messages
subset    some ranks of a transport as one of their own
threads   ranks as threads of one process, for tests
"""
