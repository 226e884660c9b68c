"""One call of a group: its tensors as buffers, its operation, waiting for it, and its future.

A future's callbacks run where it is completed, and may wait for the next operation, as PowerSGD's do. So that is never
the engine's thread.
"""
# ruff: noqa: D102 - torch's methods, with torch's names

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.arrays.buffer import Buffer, NotContiguousError
from ringreduce.arrays.torch_tensor import torch_buffer, torch_packed
from ringreduce.errors import UnsupportedArrayError
from ringreduce.execution.submission import Handle
from ringreduce.runtime.own_channel import OwnChannel
from ringreduce.torch.distributed.tensors import plain, seconds
from ringreduce.torch.distributed.uncompiled import uncompiled

PLAIN_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


class Work(dist.Work):
    """See torch.distributed's Work.

    Tensors that are not contiguous are copied, and those that are written to copied back; on a GPU refused.
    opts: torch's, with a timeout, or None;  outputs: the value of its future;  is_message: of one rank to another.
    """

    def __init__(self, channel: OwnChannel, opts: Any, outputs: Any, is_message: bool = False) -> None:
        super().__init__()
        self.is_message = is_message
        self.handle: Handle
        self._channel, self._outputs = channel, outputs
        self._waits = getattr(opts, "asyncOp", True) is False  # torch waits for it at once
        self._timeout_s = seconds(getattr(opts, "timeout", None), channel.timeout_s)
        self._backs: list[Callable[[], object]] = []  # write results where their tensors are
        self._devices: list[torch.device | str | int] = []  # the GPU, if it has tensors there
        self._is_over = self._has_completed = self._is_waited_for = False
        self._is_coming = False  # another thread completes the future
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1

    def read(self, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
        """Buffers of tensors that are only read."""
        return self._buffers(tensors, writable=False)

    def write(self, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
        """Buffers of tensors that are written to, and perhaps read. As with other backends, autograd sees no change."""
        return self._buffers(tensors, writable=True)

    def _buffers(self, tensors: Sequence[torch.Tensor], writable: bool) -> list[Buffer]:
        buffers: list[Buffer] = []
        try:
            for each in tensors:
                buffers.append(self._buffer(each if writable else plain(each), writable))
        except UnsupportedArrayError as exc:
            which = f"tensor {len(buffers) + 1} of {len(tensors)} to be {'written' if writable else 'read'}: "
            raise UnsupportedArrayError(f"{which * (len(tensors) > 1)}{exc}") from exc.__cause__
        return buffers

    def _buffer(self, tensor: torch.Tensor, writable: bool) -> Buffer:
        if tensor.is_cuda:
            self._devices = [tensor.device]
        try:
            return torch_buffer(tensor, writable, resizable=True)
        except NotContiguousError:
            if tensor.is_cuda:
                raise
        buffer, back = torch_packed(tensor)
        self._backs.append(back)
        return buffer

    def begin(self, operation: Callable[..., Handle], *arguments: Any, **options: Any) -> Work:
        """Begin an operation of the channel."""
        waits = self._waits or (BACKWARD.runs() and not self._channel.engine.host.overlaps)
        self.handle = operation(*arguments, then=self._end, timeout_s=self._timeout_s, waits=waits, **options)
        return self

    def _end(self, error: BaseException | None) -> None:
        """The operation has ended; called by the thread that polls (engine/polling.py)."""
        try:
            for back in self._backs if error is None else ():
                back()
        except BaseException as exc:
            error = exc
            raise
        finally:
            with self._lock:
                self._error, self._is_over = error, True
                self._is_coming = self._future is not None and not self._is_waited_for
            if self._is_coming:
                try:
                    threading.Thread(target=self._complete, name="ringreduce future", daemon=True).start()
                except RuntimeError:  # the interpreter ends
                    self._is_coming = False

    def _complete(self) -> None:
        """Complete the future, once."""
        with self._lock:
            if self._has_completed or not self._is_over or self._future is None:
                return
            self._has_completed = True
        if self._error is not None:
            self._future.set_exception(self._error)
            return
        if self._devices:  # the future is done when this thread's current stream is
            self.handle.wait()
        self._future.set_result(self._outputs)

    @uncompiled
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done; raises its error, or StalledError after the timeout."""
        self._source = self.handle.wait(seconds(timeout, -1))
        if self._is_coming and self._future is not None:
            self._future.wait()
        return True

    def wait_and_complete(self) -> None:
        """As `wait`, and complete the future in this thread."""
        self._is_waited_for = True
        try:
            self.wait()
        finally:
            self._complete()

    @uncompiled
    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._future = _Future(weakref.ref(self), self._devices)  # which this has
            future = self._future
        if not self._is_over and BACKWARD.runs():
            BACKWARD.add(self)
        self._complete()
        return future

    @uncompiled
    def synchronize(self) -> None:
        self.wait()

    @uncompiled
    def is_completed(self) -> bool:
        return self._is_over and (not self._is_coming or self._future is None or self._future.done())

    def is_success(self) -> bool:
        return self._is_over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    @uncompiled
    def result(self) -> Any:
        self.wait()
        return self._outputs

    @uncompiled
    def source_rank(self) -> int:
        """From where a message has come, a rank of the group."""
        self.wait()
        return self._source

    _source_rank = source_rank


class _Future(torch.futures.Future[Any]):
    """A Work's future.

    A callback of a hook may begin operations, as PowerSGD's do, and these must come in the same order on all ranks:
    so in backward it runs at once, after waiting. Not those of torch's plain hooks, which begin nothing, nor of
    messages, which may wait for one that this rank is about to send.
    """

    def __init__(self, work: weakref.ReferenceType[Work], devices: list[torch.device | str | int]) -> None:
        super().__init__(devices=devices)
        self._work, self._devices = work, devices

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        self._settle(callback)
        if self.done() or not BACKWARD.runs():
            return super().then(callback)
        following = _Future(self._work, self._devices)  # torch's own would run at any time what a hook gives to it
        super().add_done_callback(functools.partial(following._follow, callback))
        return following

    def _follow(self, callback: Callable[..., Any], before: torch.futures.Future[Any]) -> None:
        try:
            self.set_result(callback(before))
        except Exception as exc:
            self.set_exception(exc)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        self._settle(callback)
        super().add_done_callback(callback)

    def _settle(self, callback: Callable[..., Any]) -> None:
        work, is_plain = self._work(), getattr(callback, "__module__", None) == PLAIN_HOOKS
        if work is not None and BACKWARD.runs() and not work.is_message and not is_plain:
            work.wait_and_complete()
            self.wait()  # another thread may be completing it


class _Backward:
    """Works whose futures were asked for in a backward pass, as DDP's hooks do.

    When backward is over, DDP waits for futures, which polls nothing: just before, wait for the operations themselves.
    """

    def __init__(self) -> None:
        self._asked: dict[int, list[Work]] = {}  # by pass
        self._ending = -1

    def runs(self) -> bool:
        """True in a thread that runs backward, which is not over."""
        return torch._C._current_graph_task_id() not in (-1, self._ending)

    def add(self, work: Work) -> None:
        number = torch._C._current_graph_task_id()
        if number not in self._asked:
            self._asked[number] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(number))
        self._asked[number].append(work)

    def _end(self, number: int) -> None:
        self._ending = number
        for work in self._asked.pop(number):
            work.wait_and_complete()


BACKWARD = _Backward()


@functools.cache
def keep_works_of_reducers() -> None:
    """Let a DDP's reducer keep the Work that `join` begins in forward, which is torch's to do.

    It keeps only the part in C++, which is no use without the one in Python: backward would find no future.
    """
    reducers: Any = torch._C._distributed_c10d.Reducer
    take, kept = reducers._set_forward_pass_work_handle, weakref.WeakKeyDictionary[Any, Any]()

    def keep(reducer: Any, work: Any, *options: Any) -> None:
        kept[reducer] = work
        take(reducer, work, *options)

    reducers._set_forward_pass_work_handle = keep
