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
    "-DPy_LIMITED_API=0x030B0000",
]
"""BASELINE: a sanitizer is not there yet when a library chooses clones for its processor."""


@pytest.mark.skipif(bool(native.MISSING) and "CI" not in os.environ, reason=f"the compiled module: {native.MISSING}")
def test_ci_has_the_compiled_module():
    assert native.module is not None, native.MISSING


INSTEAD = """
import importlib.util, pytest, sys
name = "ringreduce.kernels._native"
spec = importlib.util.spec_from_file_location(name, sys.argv[1])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
sys.exit(pytest.main(sys.argv[2:]))
"""
TESTS = ["ranks/test_compiled", "ranks/test_lane", "unit/test_ops", "unit/test_half", "unit/test_quantized"]


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
    options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{sysconfig.get_paths()['include']}"]
    subprocess.run(["gcc", *FLAGS, *options, SOURCE, "-o", path], check=True)
    found = subprocess.run(["gcc", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    report = f"log_path={tmp_path}/report"
    variables = {
        "LD_PRELOAD": found.stdout.strip(),
        "TSAN_OPTIONS": f"{report}:exitcode=66",
        "ASAN_OPTIONS": f"{report}:detect_leaks=0",
        "UBSAN_OPTIONS": report,
    }
    chosen = "no_flag_is_seen" if sanitizer == "thread" else "not mpi"
    tests = [f"tests/{each}.py" for each in TESTS]
    command = [sys.executable, "-c", INSTEAD, path, "-q", "-n0", "-p", "no:cacheprovider", "-k", chosen, *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    reports = "".join(each.read_text() for each in tmp_path.glob("report*"))
    assert done.returncode == 0, done.stdout + reports
    assert not reports, reports
    assert " passed" in done.stdout
