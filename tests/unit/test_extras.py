"""The extras that messages and documents name are there, as extras of a clone: ringreduce is on no index yet."""

import configparser
import re
from pathlib import Path

import pytest

import ringreduce
import ringrun
from tests.support.jobs import ROOT

FOLDERS = {package.__name__: Path(package.__file__).parent for package in (ringreduce, ringrun)}
SOURCES = [
    *(path for folder in FOLDERS.values() for path in folder.rglob("*.py")),
    *(path for folder in ("bench", "docs", "examples") for path in (ROOT / folder).rglob("*.*")),
    *ROOT.glob("*.md"),
]
TEXTS = {path: path.read_text() for path in SOURCES if path.suffix in (".py", ".md", ".sbatch", ".yaml")}


def extras():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return dict(config["options.extras_require"])


def test_an_extra_that_is_named_somewhere_exists():
    named = {}
    for path, text in TEXTS.items():
        for names in re.findall(r"'\.\[([a-z0-9,-]+)\]", text):
            named |= dict.fromkeys(names.split(","), path.name)
    assert {path.name for path, text in TEXTS.items() if "ringreduce[" in text} == set(), "of no index"
    assert {"openmpi", "cuda12", "cuda13", "torch"} <= set(named), "or this test finds nothing"
    assert {name: path for name, path in named.items() if name not in extras()} == {}


def test_the_page_lists_all_extras():
    """But one that test installs."""
    page = (ROOT / "docs" / "install.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])}
    named |= {name for row in rows for name in re.findall(r"'\.\[([a-z0-9]+)\]'", row.split("|")[1])}
    assert named == extras().keys() - {"test-mpi"}


@pytest.mark.parametrize("major", [12, 13])
def test_with_cupy_comes_what_compiles_its_kernels(major):
    needed = extras()[f"cuda{major}"]
    assert re.search(rf"^cupy-cuda{major}x>=14$", needed, re.MULTILINE), "the first that finds NVRTC's wheel"
    assert "nvidia-cuda-nvrtc" in needed
    assert "nvidia-cuda-runtime" in needed, "its headers"


def test_what_is_no_python_is_installed_too():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for package, folder in FOLDERS.items():
        declared = config["options.package_data"][package].replace(",", " ").split()
        kinds = (".typed", ".pyi", ".cu", ".jinja")
        there = {path for path in folder.rglob("*") if path.suffix in kinds or path.name == "METADATA"}
        assert there == {path for pattern in declared for path in folder.glob(pattern)}
