"""What ranks on Dask, Ray and Spark run in tests; imported by name on the workers, which have this project's folder."""

import os
import time
from pathlib import Path

import numpy as np

import ringreduce as rr


def train(scale, fails=False):
    """Where a rank is, what it has, and a sum that differs by rank and index."""
    rr.init()
    total = rr.allreduce(np.arange(4.0) * (rr.rank() + 1) * scale, op=rr.Sum)
    print(f"rank {rr.rank()} says hello", flush=True)
    if fails and rr.rank() == 1:
        raise ValueError("bad luck")
    rr.allreduce(total, name="again")
    return rr.rank(), rr.size(), total.tolist(), os.environ.get("ASKED")


def trained(size, scale, asked=None):
    """What `train` returns on so many ranks."""
    total = [float(index * scale * size * (size + 1) // 2) for index in range(4)]
    return [(rank, size, total, asked) for rank in range(size)]


def sleep(folder):
    """Say that it runs, in a file by rank, and wait to be ended."""
    rr.init()
    rr.barrier()
    Path(folder, f"{rr.rank()} {os.getpid()}").touch()
    time.sleep(600)


def pids(folder):
    """Those of the ranks that run `sleep`."""
    return [int(each.name.split()[1]) for each in Path(folder).iterdir()]


def gone(pid):
    """Whether a process has ended, though its parent may not have looked at it yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def go_on(folder, most):
    """Step until the world has had so many sizes; return them."""
    rr.init()

    @rr.elastic.run
    def loop(state):
        while len(state.sizes) < most:
            total = rr.allreduce(np.ones(2), op=rr.Sum)
            if not state.sizes or state.sizes[-1] != rr.size():
                state.sizes.append(rr.size())
                assert total[0] == rr.size()
                Path(folder, f"{len(state.sizes)} {rr.rank()} {os.getpid()} {os.getppid()}").touch()
            time.sleep(0.05)
            state.step += 1
            state.commit()
        return state.sizes

    return loop(rr.elastic.ObjectState(step=0, sizes=[]))


def grow(folder, size):
    """Step until there are `size` ranks."""
    rr.init()

    @rr.elastic.run
    def loop(state):
        while rr.size() < size:
            rr.allreduce(np.ones(2), op=rr.Sum)
            Path(folder, f"{rr.size()} {rr.rank()}").touch()
            time.sleep(0.05)
            state.step += 1
            state.commit()

    loop(rr.elastic.ObjectState(step=0))
    return rr.rank(), rr.size()
