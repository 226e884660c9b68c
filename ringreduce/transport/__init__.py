"""How bytes move between ranks.

base      what a transport is: send, receive, letters, rest
message   MPI point-to-point messages, and letters
subset    some ranks of a transport as one of their own
threads   ranks as threads of one process, for tests
"""
