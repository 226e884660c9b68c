"""What a rank knows: who it is, where it runs, and what all ranks have together.

ringrun -np 4 python examples/hello.py
ringrun -np 8 -H one:4,two:4 python examples/hello.py
"""

import socket

import numpy as np

import ringreduce as rr

rr.init()
place = f"local rank {rr.local_rank()} of {rr.local_size()} on {socket.gethostname()}"
print(f"rank {rr.rank()} of {rr.size()}, {place}, GPU: {rr.info().gpu}")

mine = np.full(3, rr.rank(), np.float32)
print(f"{mine} here, {rr.allreduce(mine, op=rr.Sum)} summed over all ranks")
if rr.rank() == 0:
    info = rr.info()  # print(info) shows the rest, with all settings
    print(f"{info.mpi}; algorithm: {info.algorithm}; hosts, by rank: {info.hosts}")
