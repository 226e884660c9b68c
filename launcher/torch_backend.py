"""What `import torch` calls, by the entry point in setup.cfg: a job of ringrun needs no import for the backend "ring".

It stands here, and imports nothing else before the backend is used, since every program that imports torch pays for it.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make the name known; see ringreduce.torch.distributed, which does so, too. Does not raise."""
    import torch.distributed as dist

    if dist.is_available() and "ring" not in dist.Backend.backend_list:
        dist.Backend.register_backend("ring", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from ringreduce.torch.distributed.group import create

    return create(options, backend_options)
