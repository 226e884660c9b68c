"""PyTorch's own tests of a torch.distributed backend, by every rank of one job.

They come with PyTorch (`_DistTestBase`); those whose names tell of GPUs are left out, and those of monitored_barrier(),
which torch itself refuses to other backends than gloo. Each rank writes what became of each test to FOLDER/RANK.json.

    ringrun -np 4 python -m tests.support.torch_suite FOLDER ring REGEX
"""

import datetime
import json
import os
import re
import sys
import time
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import ringreduce.torch.distributed  # noqa: F401

LEFT_OUT = re.compile("cuda|gpu|nccl|monitored_barrier", re.IGNORECASE)
LONGEST_S = 60


class Name(str):
    """The backend's, equal to "gloo" and "mpi", too, while PyTorch's decorators look whether to skip a test.

    They know no other backend: by its own name 67 of the tests would run. What a test does then is its own affair.
    """

    def __eq__(self, other: object) -> bool:
        return other in (str(self), "gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def suite(folder: Path, backend: str) -> Any:
    """PyTorch's module of tests, and the class of those that are run."""
    os.environ.update({"BACKEND": backend, "INIT_METHOD": f"file://{folder}/again"})
    os.environ.setdefault("TEMP_DIR", str(folder / "shared"))  # where a test has started this process, it has its own
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / "shared" / name).mkdir(parents=True, exist_ok=True)
    from torch.testing._internal.common_distributed import DistTestCases

    DistTestCases.backend_feature["plugin"].add(backend)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": Name(backend)}):
        from torch.testing._internal.distributed import distributed_test
    os.environ["BACKEND"] = "mpi"  # which alone has tests of subgroups run with less than 8 ranks
    base: Any = distributed_test.DistributedTest._DistTestBase
    base._test_all_reduce_helper = compare_all_reduce
    return distributed_test, type("Suite", (distributed_test.TestDistBackend, base), {})


def compare_all_reduce(
    self: Any,
    group: Any,
    group_id: Any,
    rank: int,
    op: Any,
    master_value: Any,
    worker_value: Any,
    expected_value: Any,
    cuda: bool = False,
    rank_to_GPU: Any = None,
    dtype: Any = torch.float,
    async_op: bool = False,
) -> None:
    """In place of PyTorch's, which compares nothing."""
    for source in group:
        tensor = torch.full([source + 1] * 3, master_value if rank == source else worker_value, dtype=dtype)
        work = dist.all_reduce(tensor, op, group_id, async_op=async_op)
        if async_op:
            work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, expected_value)), f"{tensor}, expected {expected_value}"
    self._barrier()


def outcome(test: Any, name: str) -> str:
    """Of one test: passed, skipped, or the traceback."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    method = getattr(test, name)
    if getattr(getattr(type(test), name), "__unittest_skip__", False):
        return "skipped"
    try:
        method()
    except unittest.SkipTest:
        return "skipped"
    except SystemExit as exc:
        return "skipped" if exc.code in {each.exit_code for each in TEST_SKIPS.values()} else f"exit {exc.code}"
    except Exception:
        return traceback.format_exc()
    return "passed"


def main(folder: Path, backend: str, pattern: str) -> None:
    """Run all tests; one that fails ends the job, since other ranks may wait."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module, tests = suite(folder, backend)
    from torch.testing._internal.common_utils import set_rng_seed

    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for name in dir(tests):
        if not name.startswith("test_") or LEFT_OUT.search(name) or not re.search(pattern, name):
            continue
        test = tests(name)
        test.rank, test.file_name = rank, str(folder / name)
        module.Barrier.barrier_id = 0
        timeout = datetime.timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, LONGEST_S))
        dist.init_process_group(backend, f"file://{folder / name}", timeout, size, rank)
        dist.barrier()
        set_rng_seed(1234)
        found[name] = outcome(test, name)
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if found[name] not in ("passed", "skipped"):
            sys.exit(f"{name}: {found[name]}")
        dist.destroy_process_group()
        together(folder / "shared", name, size)


def together(folder: Path, name: str, size: int) -> None:
    """Wait for the other ranks, whatever state their groups are in."""
    files = folder / "barrier"
    (folder / f"{name}.{os.getpid()}").touch()
    while len(list(folder.glob(f"{name}.*"))) < size:
        time.sleep(0.01)
    (files / str(os.getpid())).unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
