"""Everything about GPUs. The core knows `GpuBackend` (execution/gpu_backend.py), the engine gives it one of these.

stream             the rank's GPU: a stream that waits for the callers' streams, and they for it
backend            one process set's operations on GPU arrays; all but all-reduces go through host memory
paths              which way its all-reduces go: nccl; ipc, ipc_allreduce; cuda_aware; or through the host
allreduce          the all-reduce of a batch, on each of these paths; kernels has what the GPU runs
stage              what one slot in flight needs; waiting for a GPU as for a message
"""
