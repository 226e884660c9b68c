"""What a path of GPU arrays frees; which one is chosen, and sums: tests/ranks/gpu, tests/gpu."""

from types import SimpleNamespace

import pytest

from ringreduce.gpu.paths import GpuPaths


@pytest.mark.parametrize(
    ("path", "of_lost_world", "kept"),
    [("cuda_aware", True, ["block"]), ("cuda_aware", False, []), ("host_staged", True, []), ("", True, [])],
)
def test_memory_that_mpi_may_still_write_for_ranks_that_are_dead_is_not_freed(path, of_lost_world, kept):
    freed = []
    stages = {name: SimpleNamespace(free=lambda name=name: freed.append(name)) for name in ("stage", "block", "nccl")}
    paths = GpuPaths(None, None)
    paths.path, paths.stages, paths.blocks, paths.nccl_stage = (
        path,
        [stages["stage"]],
        [stages["block"]],
        stages["nccl"],
    )
    paths.free(of_lost_world)
    assert freed == [each for each in stages if each not in kept]
