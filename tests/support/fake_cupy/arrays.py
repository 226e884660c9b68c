"""cupy.ndarray and what makes one. Arithmetic is queued on the thread's current stream; NumPy does it when it runs."""

import contextlib
import ctypes
import math

import numpy as np
from numpy.lib.array_utils import byte_bounds

import tests.support.fake_cupy as fake
from tests.support.fake_cupy import cuda, runtime

__all__ = [
    "arange",
    "array",
    "asarray",
    "asnumpy",
    "concatenate",
    "empty",
    "from_dlpack",
    "full",
    "ndarray",
    "ones",
    "zeros",
]


class ndarray:
    """Enough of cupy.ndarray for the core. The host cannot read it but by `get`."""

    __array_priority__ = 100
    __eq__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        self.data = memptr or (cuda.alloc(nbytes) if nbytes else cuda.MemoryPointer(cuda.UnownedMemory(0, 0, None), 0))
        self._memory = _at(self.data.ptr, shape, dtype, strides)

    @classmethod
    def _view(cls, memory, of):
        self = cls.__new__(cls)
        address = memory.__array_interface__["data"][0] if memory.nbytes else of.data.ptr
        self.data = cuda.MemoryPointer(of.data.mem, address - of.data.mem.ptr)
        self._memory = memory
        return self

    def _of_memory(name):
        return property(lambda self: getattr(self._memory, name))

    dtype, shape, strides, ndim = map(_of_memory, ("dtype", "shape", "strides", "ndim"))
    size, nbytes, itemsize, flags = map(_of_memory, ("size", "nbytes", "itemsize", "flags"))
    device = property(lambda self: self.data.device)

    def __len__(self):
        return len(self._memory)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
            "version": 3,
            "stream": cuda.get_current_stream(self.device.id).ptr or 1,
        }

    def __dlpack_device__(self):
        return 2, self.device.id

    def __dlpack__(self, *, stream=None, **_):
        mine = cuda.get_current_stream(self.device.id)
        if stream not in (None, -1, mine.ptr):
            cuda.ExternalStream(stream).wait_event(mine.record())
        return _Capsule(self)

    # never by the host

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion of device memory to a NumPy array")

    def __bool__(self):
        raise TypeError("device memory as a condition: the host would wait")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        for each in (*inputs, *(out or ())):
            if isinstance(each, np.ndarray) and each.ndim:
                raise TypeError("host and device memory in one operation")
        if method != "__call__" or kwargs:
            raise TypeError(f"{ufunc.__name__}.{method} with {list(kwargs)} is not in this fake")
        return _elementwise(ufunc, inputs, out[0] if out else None)

    def __imul__(self, other):
        return _elementwise(np.multiply, (self, other), self)

    def __itruediv__(self, other):
        return _elementwise(np.true_divide, (self, other), self)

    def __invert__(self):
        return _elementwise(np.invert, (self,))

    def _binary(ufunc):
        return lambda self, other: self.__array_ufunc__(ufunc, "__call__", self, other)

    __add__, __sub__, __mul__, __truediv__ = map(_binary, (np.add, np.subtract, np.multiply, np.true_divide))
    __mod__, __radd__ = _binary(np.remainder), __add__
    __floordiv__, __lshift__, __rshift__ = map(_binary, (np.floor_divide, np.left_shift, np.right_shift))
    __and__, __or__ = map(_binary, (np.bitwise_and, np.bitwise_or))
    __lt__, __ne__ = map(_binary, (np.less, np.not_equal))

    # views

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        if not all(each is Ellipsis or each is None or isinstance(each, int | np.integer | slice) for each in keys):
            raise TypeError("indexing by arrays is not in this fake")
        return self._view(self._memory[keys if Ellipsis in keys else (*keys, ...)], self)

    def reshape(self, *shape):
        shaped = self._memory.reshape(*shape)
        return self._view(shaped if self.size == 0 or np.shares_memory(shaped, self._memory) else 1 / 0, self)

    def ravel(self):
        return self.reshape(-1)

    def view(self, dtype=None):
        return self._view(self._memory.view(dtype or self.dtype), self)

    @property
    def T(self):
        return self._view(self._memory.T, self)

    # queued

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("host memory assigned to device memory")
        target = self[key]
        memory, source = target._memory, value._memory if isinstance(value, ndarray) else value
        np.broadcast_shapes(memory.shape, np.shape(source))
        reads = [value] if isinstance(value, ndarray) else []
        _queue("assignment", reads, [target], lambda: np.copyto(memory, source, casting="unsafe"))

    def fill(self, value):
        self[...] = value

    def astype(self, dtype, copy=True):
        result = empty(self.shape, dtype)
        result[...] = self
        return result

    def conj(self):
        return np.conjugate(self) if self.dtype.kind == "c" else self

    @property
    def real(self):
        if self.dtype.kind == "c":
            raise TypeError("the real parts of complex elements are not in this fake")
        return self

    def sum(self, dtype=None):
        return self._reduced(np.add, dtype or np.ones(1, self.dtype).sum().dtype)

    def max(self):
        return self._reduced(np.maximum, self.dtype)

    def _reduced(self, ufunc, dtype):
        result, memory = empty((), dtype), self._memory
        target = result._memory
        _queue(ufunc.__name__, [self], [result], lambda: ufunc.reduce(memory, axis=None, dtype=dtype, out=target))
        return result

    def tolist(self):
        return self.get().tolist()

    def __float__(self):
        return float(self.get())

    def __int__(self):
        return int(self.get())

    def copy(self, order="C"):
        return self.astype(self.dtype)

    def get(self, stream=None, order="C", out=None, blocking=True):
        host = np.empty(self.shape, self.dtype) if out is None else out
        with cuda.Device(self.device.id), stream or contextlib.nullcontext():
            pointer = cuda.get_current_stream().ptr
            if _is_pinned(host):
                runtime.memcpyAsync(_address(host), self.data.ptr, self.nbytes, runtime.memcpyDeviceToHost, pointer)
            else:
                _queue("get()", [self], [], lambda: np.copyto(host, self._memory))
            if blocking or not _is_pinned(host):
                runtime.streamSynchronize(pointer)
        return host

    def set(self, arr, stream=None):
        """Pageable memory is read before it returns; pinned memory is read when the copy runs."""
        if not isinstance(arr, np.ndarray) or arr.shape != self.shape or arr.dtype != self.dtype:
            raise ValueError("set() takes a NumPy array of the same shape and type")
        with cuda.Device(self.device.id), stream or contextlib.nullcontext():
            if _is_pinned(arr):
                pointer = cuda.get_current_stream().ptr
                runtime.memcpyAsync(self.data.ptr, _address(arr), self.nbytes, runtime.memcpyHostToDevice, pointer)
            else:
                values = arr.copy()
                _queue("set()", [], [self], lambda: np.copyto(self._memory, values))


def _address(host):
    return host.__array_interface__["data"][0]


def _is_pinned(host):
    allocation = fake.machine.memory.of(_address(host))
    return allocation is not None and allocation.kind == "pinned"


class _Capsule:
    def __init__(self, array):
        self.array = array


def _at(address, shape, dtype, strides=None):
    """A NumPy array of memory at an address."""
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    low = high = 0
    for length, stride in zip(shape, strides or (), strict=bool(strides)):
        low, high = low + min(0, (length - 1) * stride), high + max(0, (length - 1) * stride)
    if low:
        raise ValueError("negative strides are not in this fake")
    nbytes = high + dtype.itemsize if strides else math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, (ctypes.c_uint8 * nbytes).from_address(address), 0, strides)


def _range(array):
    if array.nbytes == 0:
        return array.data.ptr, 0
    low, high = byte_bounds(array._memory)
    return low, high - low


def _queue(name, reads, writes, work):
    """Queue work of CuPy's own on the thread's current stream."""
    device = runtime.getDevice()
    for each in (*reads, *writes):
        if each.device.id != device and each.nbytes:
            raise ValueError(f"Array device must be same as the current device: array device = {each.device.id}")
    ranges = [_range(each) for each in reads], [_range(each) for each in writes]

    def run():
        with np.errstate(all="ignore"):
            work()

    with fake.machine.entered():
        fake.machine.queue(fake.machine.stream(cuda.get_current_stream().ptr), name, run, lambda: ranges)


def _elementwise(ufunc, inputs, out=None):
    """Queue a ufunc; its result's type is that which NumPy gives to ones."""
    arrays = [each for each in inputs if isinstance(each, ndarray)]
    sample = [np.ones((1,) * each.ndim, each.dtype) if isinstance(each, ndarray) else each for each in inputs]
    with np.errstate(all="ignore"):
        if out is None:
            shape = np.broadcast_shapes(*(each.shape for each in arrays))
            out = empty(shape, np.asarray(ufunc(*sample)).dtype)
        else:
            ufunc(*sample, out=np.empty((1,) * out.ndim, out.dtype))
    values = [each._memory if isinstance(each, ndarray) else each for each in inputs]
    target = out._memory
    _queue(ufunc.__name__, arrays, [out], lambda: ufunc(*values, out=target))
    return out


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype)


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype)


def ones(shape, dtype=float):
    return full(shape, 1, dtype)


def full(shape, fill_value, dtype=None):
    array = empty(shape, dtype or np.asarray(fill_value).dtype)
    array.fill(fill_value)
    return array


def arange(*bounds, dtype=None):
    return asarray(np.arange(*bounds, dtype=dtype))


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    """Device memory as it is; host memory is copied up."""
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    if hasattr(a, "__cuda_array_interface__"):
        return _foreign(a)
    host = np.ascontiguousarray(a, dtype).reshape(np.shape(a))
    array = empty(host.shape, host.dtype)
    array.set(host)
    return array


array = asarray


def concatenate(tup):
    lengths = [len(each) for each in tup]
    joined = empty((sum(lengths), *tup[0].shape[1:]), np.result_type(*(each.dtype for each in tup)))
    for each, end in zip(tup, np.cumsum(lengths).tolist(), strict=True):
        joined[end - len(each) : end] = each
    return joined


def _foreign(a):
    told = a.__cuda_array_interface__
    address, shape, dtype = told["data"][0], tuple(told["shape"]), np.dtype(told["typestr"])
    allocation = fake.machine.memory.of(address)
    device = allocation.device if allocation else 0
    memory = cuda.UnownedMemory(address, math.prod(shape) * dtype.itemsize, a, device)
    mine, theirs = cuda.get_current_stream(device), told.get("stream")
    if theirs is not None and (theirs if theirs != 1 else 0) != mine.ptr:
        with cuda.Device(device):
            mine.wait_event(cuda.ExternalStream(theirs).record())
    return ndarray(shape, dtype, cuda.MemoryPointer(memory, 0), told.get("strides"))


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    return a.get(stream=stream) if isinstance(a, ndarray) else np.asarray(a)


def from_dlpack(array, *, device=None, copy=None):
    _, index = array.__dlpack_device__()
    return array.__dlpack__(stream=cuda.get_current_stream(index).ptr).array
