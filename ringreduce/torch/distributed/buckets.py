"""DDP's buckets: flat tensors that are reduced in every step, and so are moved into memory that all ranks have mapped.

A tensor is one of them when it is all of its storage, and backward has reduced it a few times. Its storage moves under
it: its views, such as the parameters' gradients, move with it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.torch_tensor import torch_buffer
from ringreduce.execution.shared_arrays import WISHED
from ringreduce.transport.blocks import SHARED_MEMORY

LEAST_BYTES = 1 << 20  # below this the window is as fast
SEEN = 1  # times before: DDP makes its buckets anew after the first step, and hooks that compress do in every step
ROOM = 2  # times as much memory must be free as all ranks here need


class Bucket:
    """See `execution.shared_arrays.Memory`."""

    def __init__(self, storage: torch.UntypedStorage, local_size: int) -> None:
        self.number = 0
        self._storage: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._address, self._seen, self._local_size = storage.data_ptr(), 0, local_size
        self._tensor: Any = None

    @property
    def is_gone(self) -> bool:
        """True when nobody has the storage any more."""
        return bool(self._storage.expired())

    def is_at(self, address: int) -> bool:
        """True when its memory is there, and has not moved."""
        return not self.is_gone and self._address == address

    def see(self, tensor: torch.Tensor) -> None:
        """It is reduced once more. NumPy arrays of it would not move: they forbid to resize the storage."""
        self._seen += 1
        self._tensor = weakref.ref(tensor)  # its work keeps it
        if self.number == 0 and self._seen > SEEN and tensor.untyped_storage().resizable():
            self.number = WISHED

    def move(self) -> tuple[int, Buffer]:
        """See `Memory.move`."""
        tensor: torch.Tensor = self._tensor()
        storage = tensor.untyped_storage()
        room = os.statvfs(SHARED_MEMORY)
        if room.f_bavail * room.f_frsize < ROOM * self._local_size * storage.nbytes():
            raise OSError(f"{SHARED_MEMORY} has no room for {self._local_size} × {storage.nbytes() >> 20} MiB")
        try:
            descriptor, _ = storage._share_fd_cpu_()
        except RuntimeError as exc:  # torch's, of the system's
            raise OSError(str(exc)) from exc
        self._address = storage.data_ptr()
        return descriptor, torch_buffer(tensor, writable=True, resizable=True)


class Buckets:
    """Those of one group."""

    def __init__(self, local_size: int) -> None:
        self._local_size = local_size
        self._found: dict[
            int, Bucket
        ] = {}  # by the storage, which keeps its number as long as it is referred to weakly

    def of(self, tensor: torch.Tensor) -> Bucket | None:
        """The bucket that a tensor is, if it may be one."""
        if tensor.nbytes < LEAST_BYTES or tensor.is_cuda or not tensor.is_contiguous():
            return None
        storage: Any = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes:
            return None
        bucket = self._found.get(storage._cdata)
        if bucket is None or not bucket.is_at(storage.data_ptr()):
            self._found = {key: each for key, each in self._found.items() if not each.is_gone}
            bucket = self._found[storage._cdata] = Bucket(storage, self._local_size)
        bucket.see(tensor)
        return bucket
