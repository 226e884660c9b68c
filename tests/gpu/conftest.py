"""GPU tests: what only a real GPU shows. One GPU is enough, for any number of ranks.

    python -m pytest -rs tests/gpu                                    # all of it: starts the jobs below by itself
    ringrun -np 1 python -m pytest --with-mpi tests/gpu
    ringrun -np 2 python -m pytest --with-mpi tests/gpu
    ringrun -np 4 python -m pytest --with-mpi tests/gpu

Under NVIDIA's compute-sanitizer, rank by rank; slow, so with one file at a time:

    ringrun -np 2 compute-sanitizer --tool memcheck  python -m pytest --with-mpi --timeout=3000 tests/gpu/test_arrays.py
    ringrun -np 2 compute-sanitizer --tool racecheck python -m pytest --with-mpi --timeout=3000 tests/gpu/test_arrays.py
    ringrun -np 2 compute-sanitizer --tool initcheck python -m pytest --with-mpi --timeout=3000 tests/gpu/test_arrays.py

(racecheck looks at shared memory inside a kernel. Which stream waits for which is tested by test_streams.py.)

Results are compared with what the host's path makes of the same data, to the bit: with RINGREDUCE_DETERMINISTIC=1 both
sum in one order, of the ranks or the ring. Without a GPU on every rank all tests are skipped, and say what is missing.
"""

import os
from collections import Counter

import pytest

import ringreduce as rr
from tests.gpu.libraries import gpus, libraries
from tests.support import on_ranks
from tests.support.on_ranks import pytest_runtest_logreport  # noqa: F401 - a hook

HERE = os.path.dirname(__file__)
STAGED = {"cuda_ipc": 0, "cuda_aware_mpi": False}
PATHS = {
    "ipc": {},
    "ipc, short slots": {"cuda_slot_bytes": 4096},
    "host_staged": STAGED,
    "host_staged, short slots": {**STAGED, "fusion_slot_bytes": 4096},
}
"""How GPU arrays are reduced on one host to the host's bits, by info()'s first word, and the settings that ask for it;
the others, which sum in orders of their own, are in test_worlds.py."""
SETS = {1: [], 2: [[1]], 3: [[2, 0], [1, 2]], 4: [[0, 3], [1, 2, 3], [2]]}
"""By the size of the world: the members of its process sets."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not config.getoption("--with-mpi"):
        return
    os.environ["RINGREDUCE_DETERMINISTIC"] = "1"
    if not gpus.why_not():
        libraries()  # init() chooses the GPU in the libraries that are there
    on_ranks.start(config)


def why_not(config):
    """Why no test can run, the same on all ranks; empty when they can."""
    if not config.getoption("--with-mpi"):
        return gpus.why_not()
    reasons = rr.allgather_object(gpus.why_not())
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if str(item.path).startswith(HERE)]
    if not ours:
        return
    if reason := why_not(config):
        skip_all(items, ours, reason)
        return
    for item in ours:
        on_each_rank = item.get_closest_marker("mpi") is not None
        if on_each_rank and not config.getoption("--with-mpi"):
            skip(item, "runs on ranks, which tests/gpu/test_jobs.py starts")
        elif not on_each_rank and config.getoption("--with-mpi"):
            skip(item, "starts jobs, so it is no test for ranks: python -m pytest tests/gpu")
        if config.getoption("timeout") is None:  # else a marker would win over the command line
            item.add_marker(pytest.mark.timeout(300 if on_each_rank else 900))
        item.add_marker(pytest.mark.filterwarnings("default"))  # those of libraries on a machine unseen are no errors


def skip_all(items, ours, reason):
    """The first test of each file says so for all of them."""
    counts = Counter(item.path for item in ours)
    for item in ours:
        if count := counts.pop(item.path, 0):
            skip(item, f"no GPU test, none of {count}: {reason}")
        else:
            items.remove(item)


def skip(item, reason):
    """Before pytest-mpi says what it would say of tests for ranks."""
    item.add_marker(pytest.mark.skip(reason=reason), append=False)


def pytest_report_header(config):
    reason = gpus.why_not()
    if reason:
        return f"tests/gpu: all skipped: {reason}"
    told = ", ".join(f"{key} {value}" for key, value in gpus.about_gpu().items())
    names = [library.name for library in libraries()]
    return f"tests/gpu: {told}; with {' and '.join(names)}" + ("" if "torch" in names else " (so no bfloat16)")


@pytest.fixture
def world():
    with on_ranks.worlds() as form:
        yield form


@pytest.fixture(scope="module", params=PATHS)
def path(request):
    """A world whose GPU arrays go one of the paths, with process sets; its name."""
    with on_ranks.worlds() as form:
        form([rr.ProcessSet(ranks) for ranks in SETS[rr.size()]], **PATHS[request.param])
        yield request.param


@pytest.fixture
def sets(path):
    """The members of process sets 1, 2, …"""
    return [sorted(ranks) for ranks in SETS[rr.size()]]


@pytest.fixture(params=["cupy", "torch"])
def library(request):
    """Each library in turn."""
    found = {each.name: each for each in libraries()}
    if request.param not in found:
        pytest.skip(f"{request.param} is not here, or finds no GPU")
    return found[request.param]
