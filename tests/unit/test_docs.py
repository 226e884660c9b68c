"""README and docs/ say what is there: names, settings, flags, links, and which block is run by which test."""

import ast
import dataclasses
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import ringreduce
import ringrun
from ringreduce.settings import HOROVOD, NO_EFFECT, PREFIX, Settings
from ringrun import cli
from ringrun.config import resolve
from ringrun.join import command
from ringrun.run_report.causes import KINDS
from tests.support.jobs import ROOT
from tests.support.pages import BLOCKS, ELSEWHERE, NOT_RUN, PAGES, blocks, sides

PACKAGE, LAUNCHER = (Path(package.__file__).parent for package in (ringreduce, ringrun))
DOCS = "\n".join(PAGES.values())


def test_readme_is_short():
    assert len(PAGES["README.md"]) <= 9000


def test_every_block_is_run_or_says_why_not():
    others = {block.start for block in BLOCKS if block.language not in ("sh", "diff", "python", "text")}
    known = [*ELSEWHERE, *NOT_RUN]
    assert [start for start in others if not start.startswith(tuple(known))] == []
    assert [each for each in known if not any(start.startswith(each) for start in others)] == [], "no longer there"
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())


def test_what_is_no_command_is_marked_as_text():
    commands = re.compile(r"^(\$ |pip |python3? |ringrun -|mpirun )", re.MULTILINE)
    assert [block.start for block in BLOCKS if block.language == "text" and commands.search(block.text)] == []
    outside = re.sub(r"^```.*?^```$", "", DOCS, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n(?: {4}|\t).*", outside) == [], "code that is only indented: nothing runs it"
    assert len(re.findall(r"^```", DOCS, re.MULTILINE)) == 2 * len(BLOCKS), "a fence that support/pages.py cannot read"


@pytest.mark.parametrize(
    "page", ["numpy.md", "pytorch.md", "ddp.md", "horovod.md", "jax.md", "keras.md", "tensorflow.md"]
)
def test_a_tutorial_shows_a_whole_file_its_output_and_then_what_has_changed(page):
    [program] = blocks("python", page=page, title="train.py")
    assert program.number < blocks("text", page=page, title="output")[0].number
    for diff in blocks("diff", page=page)[:1]:
        changed = sides(diff.text)[1]
        assert diff.number > program.number
        assert changed in (program.text, program.text.splitlines(keepends=True)[1])


def test_a_file_to_save_is_no_diff():
    """Which nobody can copy whole."""
    assert [block.start for block in blocks("diff") if block.title] == []


def test_links_lead_somewhere():
    """Those of docs/ are checked by `mkdocs build --strict`, with their anchors."""
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "bench/README.md", "bench/LOG.md"):
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert (folder / target).exists(), f"{page}: {target}"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    added = ["index.md", "examples/README.md", "changelog.md"]  # docs/hooks.py
    assert sorted([*listed, "README.md"]) == sorted([*PAGES, *added])


def test_the_picture_shows_the_table_of_bench():
    spec = importlib.util.spec_from_file_location("picture", ROOT / "bench" / "picture.py")
    drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    assert drawn.PICTURE.read_text() == drawn.picture(), "python bench/picture.py"
    assert "white" not in drawn.picture(), "the page's background may be dark"


def test_messages_that_have_an_answer_are_those_of_the_code():
    texts = []
    for path in (*PACKAGE.rglob("*.py"), *LAUNCHER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            texts += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    messages = re.findall(r"^### `(.*)`$", PAGES["failures.md"], re.MULTILINE)
    assert len(messages) > 8
    for message in messages:
        for part in filter(None, (each.strip() for each in re.split(r"…|\(\)|; use ", message))):
            assert any(part in text for text in texts), part


def test_every_kind_of_straggler_has_a_cure():
    told = dict(re.findall(r"^\| ([a-z ]+) \| `([^`]+)`", PAGES["is-it-slow.md"], re.MULTILINE))
    assert told == {kind: text for kind, (text, _) in KINDS.items()}


def rows_of(page):
    """The cells of all rows of its tables; DDP over gloo is only "DDP" in bench/LOG."""
    plain = page.replace("**", "").replace("DDP over gloo", "DDP")
    return [re.split(r" ?\| ", row) for row in re.findall(r"^\| ?(.*?) ?\|$", plain, re.MULTILINE)]


def not_measured(page, measured):
    """What does not stand in the same row of bench/LOG, same machine, or is left out of which runs these were.

    The first row of a name counts.
    """
    cells = {first.partition(" (")[0]: rest for first, *rest in reversed(rows_of(measured))}
    wrong, what = [], ""
    for first, *rest in rows_of(page):
        what = first or what
        if len(rest) == 3 and (machine := re.match("(EPYC|Xeon), ([-0-9]+)$", rest[0])):
            cell = cells[what][machine[1] == "Xeon"]
            runs = re.findall(f"{machine[2]}, ([^:;]+): ringreduce", cell)  # five of them, say
            wrong += [f"{what}: {each}" for each in runs if each not in rest[1]]
            parts = [machine[2], *f"ringreduce {rest[1]}, {rest[2]}".strip(", ").split(", ")]
            wrong += [f"{what}: {part}" for part in parts if not re.search(re.escape(part) + r"(?![\d]|[.,]\d)", cell)]
        elif first.isdigit():  # the sizes of one buffer
            columns = [cells[first][number] for number in (4, 5, 6)]
            wrong += [] if columns == rest else [f"{first}: {rest}"]
    return wrong


def test_figures_of_benchmarks_are_those_of_their_row_in_bench():
    page, measured = PAGES["benchmarks.md"], (ROOT / "bench" / "LOG.md").read_text()
    assert not_measured(page, measured) == []
    changes = [("73.0", "95.2"), ("**14.0", "**22.6"), ("(5.4 to", "(5.3 to"), ("**989**", "2182"), (", five runs", "")]
    for figure, other in changes:
        assert len(not_measured(page.replace(figure, other, 1), measured)) == 1, figure


def test_halves_of_an_allreduce_that_are_slower_than_mpis_are_told():
    [[what, *cells]] = [row for row in rows_of((ROOT / "bench" / "LOG.md").read_text()) if "`halves.py`" in row[0]]
    told = PAGES["benchmarks.md"].partition("## Where ringreduce is slower")[2]
    speeds = [re.findall(r"[\d.]+", cell.partition(";")[0]) for cell in cells]
    for name, *speed in zip(re.findall(r"`(\w+)`", what), *speeds, strict=True):
        assert min(map(float, speed)) >= 1 or f"**`{name}` of 64 MiB" in told, name


def shown(value):
    """A default as docs/settings.md writes it."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and value >= 1 << 10 and value % (1 << 10) == 0:
        return f"{value >> 20} MiB" if value % (1 << 20) == 0 else f"{value >> 10} KiB"
    return str(value)


def test_settings_and_their_defaults_are_those_of_the_code():
    rows = dict(re.findall(rf"^\| `{PREFIX}(\w+)` \|([^|]*)\|", PAGES["settings.md"], re.MULTILINE))
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert set(rows) == {name.upper() for name in resolve.public_settings()} | {"REPORT"}  # ringrun's flag is its own
    words = {"CACHE_CAPACITY": "16384", "COSTS": "measured", "CUDA_DEVICE": "by local rank"}
    for name, default in rows.items():
        assert default.strip() == words.get(name, shown(defaults[name.lower()])), name
    for name in re.findall(rf"`{PREFIX}(\w+)`", DOCS):
        assert name.lower() in defaults, name
    assert set(re.findall(r"`(HOROVOD_\w+)`", PAGES["settings.md"])) == {*HOROVOD, *NO_EFFECT}


def documented(module):
    """The names of this module that the reference has."""
    return set(
        re.findall(rf"^- `{re.escape(module)}\.(?:sweeps\.sweep\.)?(\w+)\b[(`]", PAGES["reference.md"], re.MULTILINE)
    )


def test_the_reference_has_the_signatures_and_first_sentences_of_the_code():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert PAGES["reference.md"] == reference.written(PAGES["reference.md"]), "python docs/reference.py"
    assert reference.LINE.pattern in (ROOT / "docs" / "hooks.py").read_text(), "the site finds the same lines"


@pytest.mark.parametrize("name", ["", ".torch", ".torch.distributed", ".elastic", ".ps", ".sweeps", ".testing"])
def test_every_public_name_is_in_the_reference(name):
    module = importlib.import_module(f"ringreduce{name}")
    everywhere = documented("ringreduce") | documented("ringreduce.elastic")
    public = set(module.__all__) - {"__version__"}
    assert public - documented(f"ringreduce{name}") - (everywhere if name else set()) == set()
    assert documented(f"ringreduce{name}") - {"collectives"} <= set(dir(module))


@pytest.mark.parametrize("folder", ["jax", "keras", "tensorflow"])
def test_every_name_of_a_framework_that_may_be_missing_here_is_in_the_reference(folder):
    """Read, not imported."""
    names = set()
    for path in (PACKAGE / folder).glob("*.py"):
        for listed in re.findall(r"^__all__ \+?= \[([^\]]*)\]", path.read_text(), re.MULTILINE):
            names |= set(re.findall(r'"(\w+)"', listed))
    everywhere = documented("ringreduce") | documented("ringreduce.elastic")
    own = documented(f"ringreduce.{folder}") | documented(f"ringreduce.{folder}.elastic")
    assert names - own - everywhere == set()
    assert len(documented(f"ringreduce.{folder}")) >= 7


def test_every_function_is_in_the_overview():
    for name in ringreduce.__all__:
        if name[0].islower():
            assert re.search(rf"\b{name}\b", PAGES["functions.md"] + PAGES["ringrun.md"] + PAGES["more-ways.md"]), name


def test_flags_of_ringrun_that_pages_name_exist():
    manual = cli._parser().format_help() + command._parser().format_help()
    known = set(re.findall(r"--[a-z][\w-]+", manual))
    settings = [field.name for field in dataclasses.fields(Settings)]
    for page in ("README.md", "ringrun.md", "clusters.md", "failures.md", "elastic.md", "settings.md"):
        named = set(re.findall(r"`(?:ringrun [^`]*?)?(--[a-z][\w-]+)", PAGES[page]))
        assert {flag for flag in named - known - OF_OTHERS if flag[2:].replace("-", "_") not in settings} == set(), page


OF_OTHERS = {"--json", "--env-from-secret", "--gpus-per-worker", "--shm-size", "--batch", "--full", "--dependency"}
"""Flags of ringrun's other commands, and of other programs."""
