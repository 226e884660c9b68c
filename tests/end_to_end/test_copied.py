"""Tutorials as readers use them: the site's button copies the program, as test_docs.py runs it, and says its name."""

import re
import sys
from importlib.metadata import requires

import pytest

from tests.end_to_end.conftest import run
from tests.support import environments
from tests.support.browser import CHROMIUM, Browser
from tests.support.pages import TUTORIALS, tutorial

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("frameworks")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the pages, as MkDocs builds them."""
    if CHROMIUM is None:
        pytest.skip("no chromium: no page of the site was opened in a browser; .ci/packages installs it")
    folder = tmp_path_factory.mktemp("site")
    needed = [each.partition(";")[0] for each in requires("ringreduce") if re.search("extra == .docs.", each)]
    path = environments.packages("TEST_DOCS_PYTHON", ".venv-test-docs", *needed)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    run(command, timeout_s=300, returncode=0, PYTHONPATH=path, NO_MKDOCS_2_WARNING="1")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("page", ["README.md", *TUTORIALS])
def test_the_button_copies_the_program_and_the_page_says_where_to_save_it(site, browser, page):
    browser.open(site / {"README.md": "index.html"}.get(page, page.replace(".md", ".html")))
    block = "[...document.querySelectorAll('.highlight')].find(each => each.querySelector('.filename'))"
    browser.click(f"{block}.querySelector('[data-md-type=copy]')")
    program, command, _ = tutorial(page)
    assert browser.clipboard() == program.text.rstrip("\n")
    assert browser.value(f"{block}.querySelector('.filename').textContent") in command
