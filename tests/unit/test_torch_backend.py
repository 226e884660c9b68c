"""What `ringrun --torch-backend ring` does when torch is imported, and which backends are then meant."""

import pytest
from torch.distributed import distributed_c10d

from ringrun import torch_backend


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("gloo", "ring"),
        ("mpi", "ring"),
        ("undefined", "cpu:ring"),
        ("nccl", "nccl"),
        ("ring", "ring"),
        ("cpu:gloo,cuda:nccl", "cpu:ring,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:ring"),
        ("cpu:mpi,cuda:gloo", "cpu:ring,cuda:gloo"),
        ("cuda:gloo", "cuda:gloo"),
        ("cpu:ring,cuda:nccl", "cpu:ring,cuda:nccl"),
    ],
)
def test_what_a_program_names_and_what_is_meant(named, meant):
    assert torch_backend.renamed(named) == meant


@pytest.mark.parametrize(
    "helper", [None, 3, lambda size, rank, store, backend: None], ids=["none", "no function", "other"]
)
def test_a_torch_without_the_private_function_is_named(monkeypatch, helper):
    monkeypatch.setattr(distributed_c10d, torch_backend.HELPER, helper)
    with pytest.raises(RuntimeError, match=r"--torch-backend ring: torch 2\S+ does not make its process groups by .*"):
        torch_backend.rename("ring")


def test_another_value_is_refused():
    with pytest.raises(ValueError, match="RINGREDUCE_TORCH_BACKEND='gloo': expected ring, or no such variable"):
        torch_backend.rename("gloo")
