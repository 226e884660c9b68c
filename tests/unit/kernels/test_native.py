"""The compiled module is there where tests count on it; sanitizers find nothing in it."""

import os
import subprocess
import sys
import sysconfig

import pytest

from ringreduce.kernels import native
from tests.support.jobs import ROOT
from tests.support.tiers import extended

SOURCE = ROOT / "ringreduce/kernels/native.c"
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-DBASELINE",
    "-DLATE_STORES",
    "-DPy_LIMITED_API=0x030B0000",
]
"""BASELINE: a sanitizer is not there yet when a library chooses clones for its processor. LATE_STORES: no sanitizer
sees streaming stores; these are plain ones, which are made only when something waits for them."""


@pytest.mark.skipif(bool(native.MISSING) and "CI" not in os.environ, reason=f"the compiled module: {native.MISSING}")
def test_ci_has_the_compiled_module():
    assert native.module is not None, native.MISSING


LITMUS = "no_flag_is_seen"
TESTS = [  # which sanitizers watch
    "ranks/collectives/test_compiled",
    "ranks/engine/test_express",
    "ranks/execution/test_lane",
    "unit/collectives/test_ops",
    "unit/kernels/test_half",
    "unit/kernels/test_quantized",
]


@extended
@pytest.mark.skipif(native.module is None, reason=f"the compiled module: {native.MISSING}")
@pytest.mark.parametrize(
    ("sanitizer", "library"), [("thread", "libtsan.so"), ("undefined", "libubsan.so"), ("address", "libasan.so")]
)
def test_sanitizers_find_nothing(sanitizer, library, tmp_path):
    """Ranks are threads, so that a read which no flag orders after its write is seen; memory begins at any byte.

    ThreadSanitizer does not see NumPy's copies and the interpreter's flags: for it all ranks have the compiled module.
    """
    path = tmp_path / "_native.abi3.so"
    build(path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    found = subprocess.run(["gcc", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    report = f"log_path={tmp_path}/report"
    variables = {
        "LD_PRELOAD": found.stdout.strip(),
        "TSAN_OPTIONS": f"{report}:exitcode=66",
        "ASAN_OPTIONS": f"{report}:detect_leaks=0",
        "UBSAN_OPTIONS": report,
    }
    chosen = LITMUS if sanitizer == "thread" else "not -mpi-"  # compiled has "mpi" in it
    done = run_with(path, chosen, TESTS, variables)
    reports = "".join(each.read_text() for each in tmp_path.glob("report*"))
    assert done.returncode == 0, done.stdout + reports
    assert not reports, reports
    assert " passed" in done.stdout


@pytest.mark.adapters
@pytest.mark.skipif(native.module is None, reason="there is no compiler")
def test_flags_wait_for_streaming_stores(tmp_path):
    """Here these are as late as any processor could make them, which x86-64 never does while tests look."""
    path = tmp_path / "_native.abi3.so"
    build(path)
    done = run_with(path, LITMUS, TESTS[:1], {})
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def build(path, *options):
    """Compile the module for tests."""
    include = f"-I{sysconfig.get_paths()['include']}"
    subprocess.run(["gcc", *FLAGS, *options, include, SOURCE, "-o", path], check=True)


def run_with(path, chosen, tests, variables):
    """Run these tests with the module at `path` in place of the installed one."""
    files = [f"tests/{each}.py" for each in tests]
    instead = [sys.executable, "-m", "tests.support.instead", path]
    command = [*instead, "-q", "-n0", "-p", "no:cacheprovider", "-k", chosen, *files]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
