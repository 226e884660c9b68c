"""What the pages for contributors say of the code: files, functions, tests and pictures that are there."""

import re
from pathlib import Path

import pytest

import ringreduce
import ringrun
from tests.support.jobs import ROOT
from tests.support.pages import PAGES
from tests.support.sources import found

INSIDE = ("architecture.md", "invariants.md", "after-a-death.md")


def definitions(path):
    """The names that a file defines: functions, classes, and what is in them."""
    return set(re.findall(r"^ *(?:async )?(?:def|class) (\w+)", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", INSIDE)
def test_what_a_page_names_is_in_the_code(page):
    named = re.findall(r"`((?:ringreduce|launcher|tests|bench)/[\w/]+\.(?:py|c))(?:::([\w.]+))?`", PAGES[page])
    assert len(named) > 5
    for file, name in named:
        if file.endswith(".c") and not found(file).is_relative_to(ROOT):
            continue  # a wheel has what is compiled, not its source
        assert found(file).exists(), file
        assert set(filter(None, name.split("."))) <= definitions(found(file)), f"{file} has no {name}"


def test_what_is_to_be_changed_to_add_something_is_there():
    named = re.findall(r"`([\w/]+\.\w+|[\w/]+/)`", PAGES["adding.md"])
    assert len(named) > 30
    texts = []
    for file in named:
        assert found(file).exists(), file
        texts += [found(file).read_text()] if found(file).is_file() else []
    for name in re.findall(r"`(_?[A-Za-z]+_[A-Za-z_]+|[A-Z]{4,}|[A-Z][a-z]+)`", PAGES["adding.md"]):
        assert any(re.search(rf"\b{name}\b", text) for text in texts), name


@pytest.mark.parametrize(("package", "heading"), [(ringreduce, "ringreduce"), (ringrun, "the launcher")])
def test_every_folder_is_described_and_drawn(package, heading):
    described = PAGES["architecture.md"].partition(f"## The folders of {heading}\n")[2].partition("\n## ")[0]
    folders = {path.parent.name for path in Path(package.__file__).parent.glob("*/__init__.py")}
    assert set(re.findall(r"\*\*`(\w+)/`\*\*", described)) == folders
    drawn = (ROOT / "docs" / "architecture.svg").read_text()
    assert {folder for folder in folders if f"{folder}/" not in drawn} == set()


def test_each_invariant_has_its_number_and_tests():
    _, *sections = re.split(r"^## ", PAGES["invariants.md"], flags=re.MULTILINE)
    assert [each.partition(". ")[0] for each in sections] == [str(number) for number in range(1, 12)]
    for each in sections:
        why, code, tests = (each.index(f"**{word}:**") for word in ("Why", "Code", "Tests"))
        assert why < code < tests
        assert re.findall(r"^- `tests/[\w/]+\.py::test_\w+`$", each[tests:], re.MULTILINE), each.partition("\n")[0]


def test_the_drawing_has_the_files_and_steps_of_its_page():
    page, drawing = PAGES["after-a-death.md"], (ROOT / "docs" / "after-a-death.svg").read_text()
    drawn = re.findall(r">(\w+\.py)<", drawing)
    assert len(drawn) > 10
    assert [file for file in drawn if f"/{file}" not in page] == []
    assert re.findall(r">(\d+) · ", drawing) == re.findall(r"^(\d+)\. ", page, re.MULTILINE)


def test_files_of_tests_that_tests_name_are_there():
    """As "unit/transport/test_window" in a list of what one test runs."""
    folders = "|".join(each.name for each in (ROOT / "tests").iterdir() if each.is_dir())
    pattern = re.compile(rf'"(?:tests/)?((?:{folders})/[\w/]*test_\w+)(?:\.py)?[":]')
    named = {(file, name) for file in (ROOT / "tests").rglob("*.py") for name in pattern.findall(file.read_text())}
    assert len(named) > 10
    assert [(str(file), name) for file, name in named if not (ROOT / "tests" / f"{name}.py").exists()] == []
