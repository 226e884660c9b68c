"""CuPy as a child process of `cuda_aware.Trial` needs it: arrays in host memory that say that they are on a GPU.

mpi4py takes the address that `__cuda_array_interface__` names as it is, so the arrays really travel. How it goes wrong
is said by $CUPY_ON_HOST; who asks is written to the file $CUPY_ON_HOST_LOG.
"""

import ctypes
import os
import subprocess
import sys

import numpy as np

FAULT = os.environ.get("CUPY_ON_HOST", "")


class ndarray:
    def __init__(self, memory):
        self.memory = memory

    def __getitem__(self, key):
        return ndarray(self.memory[key])

    def __setitem__(self, key, value):
        self.memory[key] = value.memory

    def get(self):
        if FAULT == "other data" and len(self.memory) > 1024:
            return self.memory + 1
        return self.memory.copy()

    @property
    def __cuda_array_interface__(self):
        interface = dict(self.memory.__array_interface__)
        if FAULT == "an address that is none":
            interface["data"] = (8, False)
        return interface


def zeros(count, dtype):
    return ndarray(np.zeros(count, dtype))


def asarray(values):
    return ndarray(values.copy())


class cuda:
    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            if FAULT == "no end":
                with subprocess.Popen(["sleep", "1000"]) as grandchild:
                    log(f"pids {os.getpid()} {grandchild.pid}")
            if FAULT == "a segmentation fault":
                ctypes.string_at(0)
            if FAULT == "an error":
                sys.exit("no such GPU\n\n")
            if FAULT == "success without a word":
                sys.exit()
            return self

        def __exit__(self, *exception):
            pass

        def synchronize(self):
            from mpi4py import MPI

            log(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: GPU {self.number}")


def log(text):
    if path := os.environ.get("CUPY_ON_HOST_LOG"):
        with open(path, "a") as file:
            file.write(f"{text}\n")
