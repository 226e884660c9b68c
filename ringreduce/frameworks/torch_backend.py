"""What `import torch` calls, by the entry point in setup.cfg: a job of ringrun needs no import for the backend "ring".

With the setting torch_backend, `ringrun --torch-backend ring`, programs that name "gloo", "mpi" or none use it, too. It
stands here, outside of ringreduce.torch, and imports nothing before a group is made: every program that imports torch
pays for it.
ringrun hears of a rank's first group.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ringreduce.frameworks.registry import adapter

HELPER = "_new_process_group_helper"
"""torch's own function, private, through which every process group is made."""
MEANT = ("gloo", "mpi")
_ALONE_AFTER_S = 60.0


def register() -> None:
    """Make the name known; see ringreduce.torch.distributed, which does so, too. Raises as `rename` does."""
    import torch.distributed as dist

    if dist.is_available() and "ring" not in dist.Backend.backend_list:
        dist.Backend.register_backend("ring", _create, extended_api=True, devices=["cpu", "cuda"])
        if name := os.environ.get("RINGREDUCE_TORCH_BACKEND"):
            rename(name)
        if (error_file := os.environ.get("RINGREDUCE_ERROR_FILE")) and os.environ.get("WORLD_SIZE") != "1":
            _watch_groups(error_file)
        elif "_ringrun_hook" in sys.modules and os.environ.get("RINGREDUCE_REPORT") == "1":
            _record_steps()


def _create(options: Any, backend_options: Any) -> Any:
    return adapter("torch.distributed.group").create(options, backend_options)


def rename(name: str) -> None:
    """Let torch make groups of the backend "ring" where a program names "gloo", "mpi" or none for the CPU.

    name: the setting's value. Raises ValueError for another one than ring, RuntimeError where torch has no HELPER.
    """
    import torch
    from torch.distributed import distributed_c10d

    if name != "ring":
        raise ValueError(f"RINGREDUCE_TORCH_BACKEND={name!r}: expected ring; otherwise unset the variable")
    helper: Callable[..., Any] | None = getattr(distributed_c10d, HELPER, None)
    code = getattr(helper, "__code__", None)
    if helper is None or code is None or code.co_varnames[3:5] != ("backend", "store"):
        raise RuntimeError(
            f"--torch-backend ring: torch {torch.__version__} does not create its process groups with "
            f"torch.distributed.distributed_c10d.{HELPER}(size, rank, ranks, backend, store, …), which was expected; "
            'start without --torch-backend, and write init_process_group("ring") in the program'
        )
    setattr(distributed_c10d, HELPER, functools.wraps(helper)(functools.partial(_new_group, helper)))


def _new_group(make: Any, size: int, rank: int, ranks: Any, backend: str, store: Any, *rest: Any, **more: Any) -> Any:
    """A group of the backend that is meant, and its store. make: torch's HELPER.

    get_backend() still returns what the program named, since programs decide by it what they do next.
    """
    from torch.distributed import GroupMember, distributed_c10d
    from torch.distributed.rendezvous import rendezvous

    from ringreduce.transport.mpi import rank_that_started

    meant = renamed(backend)
    if meant == backend or rank_that_started(os.environ) is not None:  # a process that a rank starts may use gloo
        return make(size, rank, ranks, backend, store, *rest, **more)
    if rank == -1:  # of "mpi": torch would ask MPI
        store, rank, size = next(rendezvous("env://"))
    group, store = make(size, rank, ranks, meant, store, *rest, **more)
    if group is not GroupMember.NON_GROUP_MEMBER:
        distributed_c10d._world.pg_map[group] = (backend, store)
        _say_once()
    return group, store


def renamed(backend: str) -> str:
    """The backend that is meant by this name of one, or by a map: by `cpu:gloo,cuda:nccl` `cpu:ring,cuda:nccl`."""
    from torch.distributed import Backend, distributed_c10d

    if backend in MEANT:
        return "ring"
    if backend != Backend.UNDEFINED and ":" not in backend:
        return backend
    devices = distributed_c10d.BackendConfig(Backend(backend)).get_device_backend_map()
    if devices.get("cpu") not in MEANT:
        return backend
    return ",".join(f"{device}:{'ring' if device == 'cpu' else each}" for device, each in devices.items())


@functools.cache
def _say_once() -> None:
    import ringreduce
    from ringreduce.settings.log import JOB

    if ringreduce.rank() == 0:
        JOB.info('torch.distributed: "gloo", "mpi" or no backend means "ring" in this job, because of torch_backend')


def _watch_groups(error_file: str) -> None:
    """Tell ringrun (job/joining.py) when this process joins others in a group, or has joined none for a minute."""
    from torch.distributed import distributed_c10d

    helper: Callable[..., Any] | None = getattr(distributed_c10d, HELPER, None)
    if helper is None:  # then nobody counts groups, which the hook knows
        return
    hook: Any = sys.modules.get("_ringrun_hook")
    told: list[str] = []

    def tell(member: int, size: int) -> None:
        if size > 1 and not told:
            from ringreduce.monitor.launcher_link import report

            told.append("once is enough")
            report(error_file, grouped=(member, size))

    _watch_rendezvous(tell)
    if hook:  # this is the rank's first process
        hook.torch_groups = 0
        _watch_optimizers(hook)
        _thread.start_new_thread(_say_after_a_minute, (hook,))

    @functools.wraps(helper)
    def make(size: int, rank: int, *arguments: Any, **options: Any) -> Any:
        had_mpi = "mpi4py.MPI" in sys.modules
        made = helper(size, rank, *arguments, **options)
        if hook:
            hook.torch_groups += 1
            hook.torch_started_mpi |= not had_mpi and "mpi4py.MPI" in sys.modules
        tell(rank, size)
        return made

    setattr(distributed_c10d, HELPER, make)


def _watch_rendezvous(tell: Callable[[int, int], None]) -> None:
    """Tell also of RPC, which makes no group: it meets the others as a group does."""
    module = importlib.import_module("torch.distributed.rendezvous")  # torch.distributed has a function of this name
    handlers: dict[str, Callable[..., Any]] = getattr(module, "_rendezvous_handlers", {})

    def watched(handler: Callable[..., Any]) -> Callable[..., Any]:
        def meet(*arguments: Any, **options: Any) -> Iterator[Any]:
            for store, rank, size in handler(*arguments, **options):
                tell(rank, size)
                yield store, rank, size

        return meet

    for scheme, handler in handlers.items():
        handlers[scheme] = watched(handler)


def _watch_optimizers(hook: Any) -> None:
    """Let the hook know whether this rank trains a model of its own, though it has joined others."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    training = _Training()
    hook.torch_trained_alone = training.is_alone
    register_optimizer_step_post_hook(training.stepped)


def _record_steps() -> None:
    """Have the steps of a rank that is alone recorded, though its program may never call ringreduce.

    A front end makes no group for one rank, and a program of one process has none.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    pid = os.getpid()

    def before_step(*_: Any) -> None:
        hook.remove()
        if os.getpid() != pid:  # a forked child is no rank
            return
        import ringreduce

        with contextlib.suppress(Exception):  # a report must not harm the program
            if not ringreduce.is_initialized():
                ringreduce.init()
                adapter("torch.distributed.group").watch_optimizers()

    hook = register_optimizer_step_pre_hook(before_step)


class _Training:
    """How often torch's optimizers have stepped in this process, and whether ringreduce has moved more than metrics.

    Who trains with others moves a model's parameters at least once after the first step, or some elements at each.
    """

    def __init__(self) -> None:
        self._steps = self._parameters = 0
        self._submitting: Any = None  # of ringreduce's engine, at the first step
        self._shares = False

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped; the first one's parameters are what is to be shared."""
        if self._shares:
            return
        self._steps += 1
        process = getattr(sys.modules.get("ringreduce.runtime"), "process", None)
        if process is None or process.runtime is None:
            return
        submitting = process.runtime.engine.submitting
        if submitting is not self._submitting:
            self._submitting, self._steps = submitting, 1
            self._parameters = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
            submitting.owed = self._parameters
        else:
            self._shares = submitting.owed <= 0

    def is_alone(self) -> bool:
        """Whether nothing says that what was trained is shared; trials of a sweep and what RPC reaches need not be."""
        if self._submitting is None or self._shares or self._steps == 1 or "ringreduce.sweeps" in sys.modules:
            return False
        alone: bool = self._submitting.has_shared_little(self._parameters, self._steps)
        return alone and not _uses_rpc()


def _uses_rpc() -> bool:
    return bool(getattr(sys.modules.get("torch.distributed.rpc.api"), "_ALL_WORKER_NAMES", None))


def _say_after_a_minute(hook: Any) -> None:
    time.sleep(_ALONE_AFTER_S)
    hook.say_if_alone(ends=False)
