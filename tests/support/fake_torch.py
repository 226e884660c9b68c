"""A stand-in for torch with GPU tensors, over the fake CuPy: what ringreduce asks of them, and streams of its own.

Its current stream is not CuPy's: who orders work on the wrong one is found.
"""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np

from tests.support import fake_cupy

strided = "strided"
autograd = SimpleNamespace(graph=SimpleNamespace(increment_version=lambda tensor: None))


class dtype:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"torch.{self.name}"


bfloat16 = dtype("bfloat16")


class device:
    type = "cuda"

    def __init__(self, index):
        self.index = index

    def __str__(self):
        return f"cuda:{self.index}"


class Tensor:
    """A GPU array."""

    is_cuda, is_nested, requires_grad, layout = True, False, False, strided
    is_conj = is_neg = is_inference = lambda self: False

    def __init__(self, array, of=None):
        """of: the elements' type, where the array holds only their bits."""
        self.array = array
        self.dtype, self.shape = of or dtype(str(array.dtype)), array.shape
        self.device = device(array.device.id)

    def data_ptr(self):
        return self.array.data.ptr

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def new_tensor(self, values, dtype):
        return tensor(np.array(values, dtype.name))

    def tolist(self):
        return self.cpu().tolist()

    def cpu(self):
        """The elements, when torch's current stream has done its work."""
        with cuda.current_stream().stream:
            return self.array.get()


def tensor(values):
    """A GPU tensor, filled on torch's current stream."""
    with cuda.current_stream().stream:
        return Tensor(fake_cupy.array(values))


def empty(shape, *, dtype, device):
    assert device == f"cuda:{fake_cupy.machine.device}"
    with cuda.current_stream().stream:
        return Tensor(fake_cupy.empty(shape, "uint16" if dtype.name == "bfloat16" else dtype.name), dtype)


class cuda:
    """torch.cuda: each thread has a current stream."""

    _current = threading.local()

    class Stream:
        def __init__(self):
            self.stream = fake_cupy.cuda.Stream(non_blocking=True)
            self.cuda_stream = self.stream.ptr

    @classmethod
    def current_stream(cls, index=0):
        if not hasattr(cls._current, "stream"):
            cls._current.stream = cls.Stream()
        return cls._current.stream

    @classmethod
    @contextlib.contextmanager
    def stream(cls, chosen):
        before = cls.current_stream()
        cls._current.stream = chosen
        yield
        cls._current.stream = before
