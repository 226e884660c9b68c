"""The functions on arrays, one file a family. Each hands an operation to the engine, and gives or awaits a handle.

process_sets  ProcessSet, and adding and removing them
world         who is where; what is built in
reduce        allreduce, reducescatter
gather        allgather, alltoall
broadcast     broadcast, broadcast_parameters
objects       broadcast_object, allgather_object
control       init, shutdown, poll, synchronize, join, barrier, the timeline
info          what this installation and this job look like

Arrays may be NumPy, CuPy or torch, or anything that speaks DLPack or the CUDA array interface; results are of the same
kind and on the same device, C-contiguous.
"""
