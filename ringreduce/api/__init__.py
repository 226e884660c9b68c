"""The functions on arrays, one file a family. Each submits an operation, and returns its handle or waits for it.

process_sets  ProcessSet, and adding and removing them
world         ranks and hosts; what is built in
reduce        allreduce, reducescatter
gather        allgather, alltoall
broadcast     broadcast, broadcast_parameters
objects       broadcast_object, allgather_object
ordered       the same in program order, without negotiation; reduce, gather, scatter, send, recv
control       init, shutdown, poll, synchronize, join, barrier, the timeline
info          this installation and this job
steps         stats of the last step, mark_step
sampler       DistributedSampler
launch        run: a function on ranks of a job of its own

Arrays may be NumPy, CuPy or torch arrays, or support DLPack or the CUDA array interface. Results are of the same kind,
on the same device, and C-contiguous.
"""
