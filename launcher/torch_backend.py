"""What `import torch` calls, by the entry point in setup.cfg: a job of ringrun needs no import for the backend "ring".

With the setting torch_backend, `ringrun --torch-backend ring`, programs that name "gloo", "mpi" or none use it, too. It
stands here, and imports nothing else before a group is made, since every program that imports torch pays for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

HELPER = "_new_process_group_helper"
"""torch's own function, private, through which every process group is made."""


def register() -> None:
    """Make the name known; see ringreduce.torch.distributed, which does so, too. Raises as `rename` does."""
    import torch.distributed as dist

    if dist.is_available() and "ring" not in dist.Backend.backend_list:
        dist.Backend.register_backend("ring", _create, extended_api=True, devices=["cpu", "cuda"])
        if name := os.environ.get("RINGREDUCE_TORCH_BACKEND"):
            rename(name)


def _create(options: Any, backend_options: Any) -> Any:
    from ringreduce.torch.distributed.group import create

    return create(options, backend_options)


def rename(name: str) -> None:
    """Let torch make groups of the backend "ring" where a program names "gloo", "mpi" or none for the CPU.

    name: the setting's value. Raises ValueError for another one than ring, RuntimeError where torch has no HELPER.
    """
    import torch
    from torch.distributed import distributed_c10d

    if name != "ring":
        raise ValueError(f"RINGREDUCE_TORCH_BACKEND={name!r}: expected ring, or no such variable")
    helper: Callable[..., Any] | None = getattr(distributed_c10d, HELPER, None)
    code = getattr(helper, "__code__", None)
    if helper is None or code is None or code.co_varnames[3:5] != ("backend", "store"):
        raise RuntimeError(
            f"--torch-backend ring: torch {torch.__version__} does not make its process groups by "
            f"torch.distributed.distributed_c10d.{HELPER}(size, rank, ranks, backend, store, …), which was expected; "
            'start without --torch-backend, and write init_process_group("ring") in the program'
        )

    @functools.wraps(helper)
    def make(*arguments: Any, **options: Any) -> Any:
        from ringreduce.torch.distributed.renamed import new_group

        return new_group(helper, *arguments, **options)

    setattr(distributed_c10d, HELPER, make)
