"""A stand-in for CuPy on machines without a GPU: arrays of "device memory" that refuse to be read as host memory.

It is NumPy underneath. Conversions that code for GPU memory must not make (numpy.asarray, the buffer protocol,
.tobytes) raise.
"""

import threading

import numpy as np


class ndarray:
    """Enough of cupy.ndarray for the core."""

    class device:
        id = 0

    def __init__(self, memory):
        self._memory = memory

    __array_priority__ = 100
    dtype = property(lambda self: self._memory.dtype)
    shape = property(lambda self: self._memory.shape)
    size = property(lambda self: self._memory.size)
    nbytes = property(lambda self: self._memory.nbytes)
    itemsize = property(lambda self: self._memory.itemsize)
    flags = property(lambda self: self._memory.flags)

    @property
    def __cuda_array_interface__(self):
        return self._memory.__array_interface__

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion of device memory to a NumPy array")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        for each in (*inputs, *(out or ())):
            if isinstance(each, np.ndarray) and each.ndim:
                raise TypeError("host and device memory in one operation")
        inputs = [each._memory if isinstance(each, ndarray) else each for each in inputs]
        outs = tuple(each._memory for each in out) if out else None
        result = getattr(ufunc, method)(*inputs, **({"out": outs} if outs else {}), **kwargs)
        return out[0] if out else ndarray(result)

    def _binary(name):
        def operate(self, other):
            return ndarray(getattr(self._memory, name)(other._memory if isinstance(other, ndarray) else other))

        return operate

    for _name in ("add", "mul", "sub", "floordiv", "and", "or", "lshift", "rshift", "lt", "ne"):
        vars()[f"__{_name}__"] = _binary(f"__{_name}__")
    __eq__ = None

    def __invert__(self):
        return ndarray(~self._memory)

    def __imul__(self, other):
        self._memory *= other
        return self

    def __itruediv__(self, other):
        self._memory /= other
        return self

    def __getitem__(self, key):
        return ndarray(self._memory[key])

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray):
            raise TypeError("host memory assigned to device memory")
        self._memory[key] = value._memory if isinstance(value, ndarray) else value

    def reshape(self, *shape):
        return ndarray(self._memory.reshape(*shape))

    def view(self, dtype):
        return ndarray(self._memory.view(dtype))

    def astype(self, dtype):
        return ndarray(self._memory.astype(dtype))

    def copy(self):
        return ndarray(self._memory.copy())

    def get(self):
        return self._memory.copy()

    def set(self, host):
        self._memory[...] = host


def asarray(array):
    if isinstance(array, ndarray):
        return array
    raise TypeError("only device memory")


def empty(shape, dtype):
    return ndarray(np.empty(shape, dtype))


synchronized = []
"""The threads that waited for their current stream."""


class cuda:
    class get_current_stream:
        def synchronize(self):
            synchronized.append(threading.current_thread().name)
