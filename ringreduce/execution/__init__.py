"""Runs operations of one process set in an order that is the same on all its ranks; knows nothing of how it came about.

signature       the signatures that ranks compare, and their differences
plan            what is remembered of an operation, for when it comes again
submission      one operation on this rank, and its handle
executor        the queue of a process set's operations
program         short operations that are known, as one call of the compiled module; lane runs those of channels
channel         operations in program order; send_receive has messages between two ranks
across          what channels on several hosts begin with: do all ranks mean the same, and the sums of short arrays
shared_arrays   arrays in memory that the ranks of a channel share, which it sums in place
opening         channels that their members make alone
operations      all operations, as generators; into_outputs has those whose results go into given arrays
halves          allgather and reduce-scatter of host memory, for both
batch           tensors that can be fused, and the submissions that own them; packing packs and sends one bucket
allreduce       the all-reduce of many tensors; point_to_point has the algorithms that send messages
algorithms      which all-reduce algorithms are usable, and which the cost model prefers
context         what operations need; their completions, in groups
gpu_backend     what operations ask of GPUs, which gpu/ answers
host            what process sets share on a host: tags, regions of the window
living          objects that others own, such as the rank's optimizers
errors_for      the errors of what cannot be accepted, or cannot complete
timeline        the events of this rank, and the file of all ranks' events; steps has what it waits for in a step
"""
