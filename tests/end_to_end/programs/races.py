"""An array on the GPU is reduced, and `racing`, changed meanwhile."""

import sys

import cupy

import ringreduce as rr

rr.init()
values = cupy.full(1000, rr.rank() + 1.0)
handle = rr.allreduce_async_(values, op=rr.Sum)
if len(sys.argv) > 1:
    values *= 2  # nobody has waited for the result
print("sum", rr.synchronize(handle).get()[0])
