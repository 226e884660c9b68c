"""How bytes move between ranks.

base      what a transport is: send, receive, wait
message   MPI point-to-point messages
threads   ranks as threads of one process, for tests
"""
