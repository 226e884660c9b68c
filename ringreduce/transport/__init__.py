"""How bytes move between ranks.

mpi        starts MPI, and finds out which launcher has started this process
world      World: the ranks and hosts, and MPI's communicators of them
links      what the links between hosts give; the order of hosts
base       what a transport is: send, receive, control messages, sleep
message    MPI point-to-point messages, and control messages
in_flight  the owner of the memory that MPI may still read or write
counters   what a host's ranks have submitted, and what runs next, in memory that they share
subset     some ranks of a transport as a transport of their own
waiting    how a thread waits for other ranks
futex      how it sleeps meanwhile
window     memory and flags that the ranks of one host share
stores     plain or streaming stores there, whichever are faster now
peer_memory  what is in another process's memory, copied from there
blocks     makes that memory: a block of each rank
threads    ranks as threads of one process, for tests
pickling   any Python object as bytes
"""
