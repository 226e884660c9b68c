"""DDP's buckets: flat tensors that are reduced in every step, and so are moved into memory that all ranks have mapped.

A tensor is one of them when it is all of its storage, and backward has reduced it a few times. Its storage moves under
it: its views, such as the parameters' gradients, move with it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.torch_tensor import torch_buffer
from ringreduce.execution.shared_arrays import WISHED

LEAST_BYTES = 1 << 20  # below this the window is as fast
SEEN = 1  # times before: DDP makes its buckets anew after the first step, and hooks that compress do in every step


class BucketMemory:
    """See `execution.shared_arrays.ArrayMemory`; an attribute of the storage, whose Python object lasts as long."""

    def __init__(self, owner: object, address: int) -> None:
        self.number, self.owner, self.address = 0, owner, address
        self._seen = 0
        self._tensor: Any = None

    def see(self, tensor: torch.Tensor) -> None:
        """It is reduced once more. NumPy arrays of it would not move: they forbid to resize the storage."""
        self._seen += 1
        self._tensor = weakref.ref(tensor)  # its work keeps it
        if self.number == 0 and self._seen > SEEN and tensor.untyped_storage().resizable():
            self.number = WISHED

    @property
    def nbytes(self) -> int:
        """Of its memory."""
        return int(self._tensor().nbytes)

    def move(self) -> tuple[int, Buffer]:
        """See `ArrayMemory.move`."""
        tensor: torch.Tensor = self._tensor()
        storage = tensor.untyped_storage()
        try:
            descriptor, _ = storage._share_fd_cpu_()
        except RuntimeError as exc:  # torch's, of the system's
            raise OSError(str(exc)) from exc
        self.address = storage.data_ptr()
        return descriptor, torch_buffer(tensor, writable=True, resizable=True)


def bucket_of(tensor: torch.Tensor, owner: object) -> BucketMemory | None:
    """The bucket that a tensor is, if it may be one.  owner: the channel whose members map it."""
    if tensor.nbytes < LEAST_BYTES or tensor.is_cuda or not tensor.is_contiguous():
        return None
    storage: Any = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes:
        return None
    bucket: BucketMemory | None = getattr(storage, "_ringreduce", None)
    if bucket is None or (bucket.owner, bucket.address) != (owner, storage.data_ptr()):
        bucket = storage._ringreduce = BucketMemory(owner, storage.data_ptr())
    bucket.see(tensor)
    return bucket
