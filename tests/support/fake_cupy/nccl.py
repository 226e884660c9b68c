"""cupy.cuda.nccl: communicators among threads. An all-reduce begins when the streams of all ranks have come to it."""

import ctypes
import itertools

import numpy as np

import tests.support.fake_cupy as fake

available = True
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
NCCL_UNIQUE_ID_BYTES = 128

_TYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
_UFUNCS = [np.add, np.multiply, np.maximum, np.minimum]
_ids = itertools.count(1)


class NcclError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"NCCL_ERROR_INVALID_USAGE: status {status}")
        self.status = status


def get_version():
    return 22703


def get_unique_id():
    number = next(_ids)
    return (number % 128, number // 128, *[0] * (NCCL_UNIQUE_ID_BYTES - 2))


class _Group:
    """What the communicators of one id share."""

    def __init__(self, size):
        self.size = size
        self.devices = {}
        self.is_aborted = False
        self.collectives = []


class _Collective:
    """One operation: what the ranks gave, and their operations that come to it."""

    def __init__(self):
        self.arguments, self.entries, self.parts = {}, [], {}


class NcclCommunicator:
    def __init__(self, ndev, commId, rank):
        if len(commId) != NCCL_UNIQUE_ID_BYTES or not 0 <= rank < ndev:
            raise NcclError(4)
        self._rank, self._count = rank, 0
        with fake.machine.entered():
            groups = fake.machine.__dict__.setdefault("nccl_groups", {})
            self._group = group = groups.setdefault(tuple(commId), _Group(ndev))
            device = fake.machine.device
            if device in group.devices.values() or rank in group.devices or ndev != group.size:
                raise NcclError(5)  # it refuses two ranks on one GPU
            group.devices[rank] = device
        with fake.machine.changed:  # the real one waits for all ranks, too
            if not fake.machine.changed.wait_for(lambda: len(group.devices) == ndev, timeout=20):
                raise NcclError(2)

    def size(self):
        return self._group.size

    def destroy(self):
        self._group = None

    def abort(self):
        """What waits for ranks that do not come ends, and leaves nothing sensible."""
        if self._group is not None:
            self._group.is_aborted = True
        self._group = None

    def check_async_error(self):
        pass

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        if self._group is None or fake.machine.device != self._group.devices[self._rank]:
            raise NcclError(4)
        with fake.machine.entered():
            group, number = self._group, self._count
            size = group.size
            self._count += 1
            if number == len(group.collectives):
                group.collectives.append(_Collective())
            collective = group.collectives[number]
            collective.arguments[self._rank] = count, datatype, op
            dtype = np.dtype(np.uint16 if datatype == NCCL_BFLOAT16 else _TYPES[datatype])
            nbytes = count * dtype.itemsize
            name = f"ncclAllReduce {number} of rank {self._rank}"
            queue = fake.machine.stream(stream)

            def send():
                collective.parts[self._rank] = np.frombuffer(ctypes.string_at(sendbuf, nbytes), dtype)

            def receive():
                if group.is_aborted:
                    return
                if len(set(collective.arguments.values())) != 1:
                    raise NcclError(5)
                total = _reduced([collective.parts[rank] for rank in range(size)], datatype, op)
                ctypes.memmove(recvbuf, total.ctypes.data, nbytes)

            enter = fake.machine.queue(queue, f"{name}, send", send, lambda: ([(sendbuf, nbytes)], ()))
            collective.entries.append(enter)
            fake.machine.queue(
                queue,
                f"{name}, receive",
                receive,
                lambda: ((), [(recvbuf, nbytes)]),
                after=collective.entries,  # others come to it later
                ready=lambda: group.is_aborted or len(collective.entries) == size,
            )


def _reduced(parts, datatype, op):
    wide = [_widened(part, datatype) for part in parts]
    total = wide[0].copy()
    with np.errstate(all="ignore"):
        for part in wide[1:]:
            _UFUNCS[op](total, part, out=total)
    if datatype == NCCL_BFLOAT16:
        import ml_dtypes

        return total.astype(ml_dtypes.bfloat16).view(np.uint16)
    return total.astype(parts[0].dtype)


def _widened(part, datatype):
    if datatype == NCCL_BFLOAT16:
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.astype(np.float32) if datatype == NCCL_FLOAT16 else part
