"""Which named operations are ready on all ranks of a process set, in one order for all.

negotiator   one rank's part in one process set: it counts or announces, and follows the schedule
leader       on the first rank of a host: finds what all its ranks have counted, and writes the schedule
coordinator  per process set, on its first rank: what is ready on all ranks?  A state machine without messages
ending       an engine runs, leaves, or has failed; when it may end
process_set  a process set on this rank: what is pending, and what runs
cache        signatures by number, so that submitting one costs a counter
short        the elements of short all-reduces, which travel with the news that they are ready
protocol     control messages between engines; mailbox sends them, and calls the handlers of those that arrive
neutral      the neutral elements of joined ranks
"""
