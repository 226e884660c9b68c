"""PyTorch's own tests of a backend, as PyTorch runs them: each starts four processes by multiprocessing.

Writes what became of each test to FOLDER/spawned.json. See torch_suite.py for what is left out.

    python -m tests.support.spawned_torch_suite FOLDER ring REGEX spawn     # each process imports torch: half a minute
    python -m tests.support.spawned_torch_suite FOLDER ring REGEX fork      # all tests: some minutes
"""

import json
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing

from tests.support.torch_suite import LEFT_OUT, suite

RANKS = 4
_OF_SUITE = "SUITE_FOLDER", "SUITE_BACKEND"
START = "SUITE_START_METHOD"
if __name__ == "__main__":
    os.environ.update(zip(_OF_SUITE, sys.argv[1:3], strict=True), WORLD_SIZE=str(RANKS))
    os.environ[START] = sys.argv[4]
_, _tests = suite(*(make(os.environ[name]) for make, name in zip((Path, str), _OF_SUITE, strict=True)))


class Spawned(_tests):
    """Its name is what a spawned process imports."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context(os.environ[START]).Process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        init = dist.init_process_group  # gets the backend's name, which is not a plain text here

        def init_process_group(*args: Any, backend: str, **kwargs: Any) -> None:
            init(*args, backend=os.environ["SUITE_BACKEND"], **kwargs)

        with mock.patch.object(dist, "init_process_group", init_process_group):
            super()._run(*args, **kwargs)


def main(folder: Path, pattern: str) -> None:
    """Run the tests, one after the other."""
    from tests.support import spawned_torch_suite  # not __main__, which is another module in spawned processes

    cls, found = spawned_torch_suite.Spawned, {}
    for name in dir(cls):
        if not name.startswith("test_") or LEFT_OUT.search(name) or not re.search(pattern, name):
            continue
        result = unittest.TestResult()
        unittest.TestSuite([cls(name)]).run(result)
        failures = [text for _, text in result.errors + result.failures]
        found[name] = failures[0] if failures else "skipped" if result.skipped else "passed"
        print(name, found[name], flush=True)
        (folder / "spawned.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3])
