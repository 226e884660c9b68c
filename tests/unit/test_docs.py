"""README and docs/ say what is there: names, settings, flags, links, and which block is run by which test."""

import ast
import dataclasses
import importlib
import json
import re
from pathlib import Path

import pytest

import ringreduce
import ringrun
from ringreduce.settings import HOROVOD, NO_EFFECT, PREFIX, Settings
from ringrun import cli
from ringrun.config import resolve
from ringrun.doctor import wire_cost
from ringrun.join import command
from ringrun.run_report.causes import KINDS
from tests.support.jobs import ROOT
from tests.support.loops import in_a_loop
from tests.support.pages import BLOCKS, ELSEWHERE, NOT_RUN, PAGES, TUTORIALS, blocks, sides, tutorial
from tests.support.sources import parsed

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


@in_a_loop("page", TUTORIALS)
def test_a_tutorial_begins_with_a_whole_file_then_its_output_and_what_has_changed(page):
    program, command, output = tutorial(page)
    assert program.number == 0
    assert "ringrun " in command
    assert output
    for diff in blocks("diff", page=page)[:1]:
        assert sides(diff.text)[1] in (program.text, program.text.splitlines(keepends=True)[1])


def test_the_programs_of_the_readme_are_those_of_the_tutorials():
    numpys, torchs = (tutorial(page).program.text for page in ("numpy.md", "pytorch.md"))
    assert [block.text for block in blocks("python", page="README.md")][:2] == [numpys, torchs]
    assert tutorial("gpu.md").program.text == torchs


def test_a_file_to_save_is_no_diff():
    """Which nobody can copy whole."""
    assert [block.start for block in blocks("diff") if block.title] == []


def test_links_lead_somewhere():
    """Those of docs/ are checked by `mkdocs build --strict`, with their anchors."""
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "examples/README.md",
        "bench/README.md",
    ):
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert (folder / target).exists(), f"{page}: {target}"


def test_links_to_the_reference_lead_to_headings_which_the_repository_has_too():
    """The site alone has anchors of single names."""
    heads = re.findall(r"^#+ (.*)", PAGES["reference.md"], re.MULTILINE)
    there = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}
    linked = re.findall(r"\]\(reference\.md#([^)]+)", DOCS)
    assert {"ringreduceps", "training"} <= set(linked) <= there


def test_the_site_has_no_programs_of_its_own():
    assert re.findall(r"^exclude_docs: \|\n((?:  .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE) == [
        "  __pycache__/\n  /*.py\n"
    ]


def test_a_model_whose_losses_are_shown_begins_alike_each_time():
    shown = {block.page for block in blocks("text", title="output") if "loss " in block.text}
    made = [block for block in blocks("python") if block.title and "torch.nn.Linear(" in block.text]
    assert len(made) > 2, "or this test finds nothing"
    assert [block.name for block in made if block.page in shown and "torch.manual_seed(" not in block.text] == []


def test_a_path_that_a_page_sets_keeps_what_was_there():
    exported = re.findall(r"^export (\w*PATH)=(.*)", DOCS, re.MULTILINE)
    assert exported
    assert [line for name, line in exported if f"${name}" not in line and f"${{{name}" not in line] == []


def test_the_page_says_which_share_of_the_bytes_doctor_assumes_of_powersgd():
    share = wire_cost.SHARES["PowerSGD(rank=4)"]
    assert f"it assumes 1/{1 / share:.0f}, as for matrices" in PAGES["less-on-the-wire.md"]


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    added = ["index.md", "examples/README.md", "changelog.md"]  # docs/hooks.py
    assert sorted([*listed, "README.md"]) == sorted([*PAGES, *added])


@pytest.fixture
def tables(monkeypatch):
    """bench/tables.py, which finds the other modules beside itself."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("tables")


def written(tables, found):
    """The pages and the pictures that these results make."""
    pages = [tables.rewritten(path.read_text(), found) for path in tables.PAGES]
    return [*pages, *(draw(found[0]) for draw in tables.PICTURES.values())]


def test_figures_and_pictures_are_those_of_bench_results(tables):
    found = tables.machines()
    there = [path.read_text() for path in (*tables.PAGES, *(tables.DOCS / name for name in tables.PICTURES))]
    assert there == written(tables, found), "python bench/tables.py"
    for picture in there[len(tables.PAGES) :]:
        assert "white" not in picture, "the page's background may be dark"
        assert int(re.search('width="([0-9]+)"', picture)[1]) <= 400, "a phone's page is no wider"
    for name, drawn in tables.DRAWN.items():
        assert (tables.DOCS / name).read_text() == drawn(), "python bench/tables.py"
    assert [name for name in (*tables.PICTURES, *tables.DRAWN) if f"]({name})" not in DOCS] == [], "no page shows it"
    for jobs in found[0].sets.values():
        for row in (row for job in jobs for row in job.get("rows", ())):
            assert not row["wrong"]
            row["runs_us"] = [each * 3 for each in row["runs_us"]]
            row["heard"] = 3 * row.get("heard", 0.0)
    assert all(map(str.__ne__, there, written(tables, found))), "each of them changes with its figures"


def test_no_figure_of_speed_is_typed_by_hand(tables):
    for path in tables.PAGES:
        typed = tables.REGION.sub("", path.read_text())
        assert re.findall(r".*\d (?:ms|µs|times|GB/s)\b.*|.*\d %.*|.*\d times.*", typed) == [], path.name


def job(*rows, **more):
    """As bench/run.py keeps it."""
    return {
        "header": {},
        "load": 0.1,
        "commit": "c",
        "rows": [{"model": "gpt2", "wrong": 0, **row} for row in rows],
        **more,
    }


def test_a_figure_is_the_median_of_all_runs_and_a_faster_peer_is_told(tables):
    ours, peer = {"who": "ringreduce, NumPy"}, {"who": "DDP gloo"}
    jobs = [job(ours | {"runs_us": [9e3, 1e4]}, peer | {"runs_us": [8e3, 7e3]}), job(ours | {"runs_us": [1.2e6]})]
    kept = {"machine": "m", "quick": False, "date": "2026-01-02", "sets": {"gradients, 2 ranks": jobs}}
    found = tables.Machine(kept)
    assert "| Gradients of GPT-2, 2 ranks, ms | 10.0<br>9.00–1,200 | **7.50**<br>7.00–8.00 |" in tables.main_table(
        found
    )
    assert "| 10.0 (9.00–1,200) | DDP over gloo 7.50 (7.00–8.00): 1.33× as fast |" in tables.slower(found)
    said = tables.summary(found)
    assert "the lowest median in 0 of 1 rows; in 0 of these its slowest" in said
    assert "DDP over gloo takes 0.75 to 0.75 times as long." in said
    assert "- **DDP over gloo**: gradients of GPT-2, 2 ranks\n" in said
    other = tables.Machine(
        {**kept, "sets": {"gradients, 2 ranks": [job(ours | {"runs_us": [6e3, 7e3]}, jobs[0]["rows"][1])]}}
    )
    assert "1 of 1 rows; in 0 of these" in tables.summary(other)
    jobs[0]["rows"][0]["runs_us"], jobs[1:] = [5e3, 6.9e3], []
    assert "1 of 1 rows; in 1 of these" in tables.summary(found)
    assert "quick" not in tables.summary(found)
    assert "quick run" in tables.summary(tables.Machine({**kept, "quick": True}))


def test_the_table_of_memory_has_the_median_and_the_range_of_its_jobs(tables, tmp_path, monkeypatch):
    rows = [
        {"who": who, "ranks": ranks, "shared_mb": 8.57, "more_runs_mb": [ranks, 3, 1], "peak_runs_mb": [30, 29, 31.04]}
        for ranks in (2, 4)
        for who in ("alone", "by name")
    ]
    (tmp_path / "memory.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "<!-- figures: memory -->\nof before\n<!-- end of figures -->"
    heads = " | ".join(f"{what}, {ranks} ranks" for ranks in (2, 4) for what in ("private", "shared", "peak"))
    cells = ["2.00<br>1.00–3.00 | 8.57 | 30.0<br>29.0–31.0", "3.00<br>1.00–4.00 | 8.57 | 30.0<br>29.0–31.0"]
    made = tables.rewritten(page, []).splitlines()
    assert made[1:-1] == [
        f"| MB | {heads} |",
        "|---|" + 6 * "---:|",
        f"| each array by name | {cells[0]} | {cells[1]} |",
    ]


def test_messages_that_have_an_answer_are_those_of_the_code():
    messages = re.findall(r"^### `(.*)`$", PAGES["failures.md"], re.MULTILINE)
    assert len(messages) > 8
    parts = [part.strip() for each in messages for part in re.split(r"…|\(\)|; use ", each) if part.strip()]
    begin = re.compile("|".join(re.escape(part[:24]) for part in parts))
    texts = []
    for path in (*PACKAGE.rglob("*.py"), *LAUNCHER.rglob("*.py")):
        for node in ast.walk(parsed(path)) if begin.search(path.read_text()) else ():
            texts += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    assert [part for part in parts if not any(part in text for text in texts)] == []


def test_every_kind_of_straggler_has_a_cure():
    told = dict(re.findall(r"^\| ([a-z ]+) \| `([^`]+)`", PAGES["is-it-slow.md"], re.MULTILINE))
    assert told == {kind: text for kind, (text, _) in KINDS.items()}


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
    rows = re.findall(r"^\| (`HOROVOD_.*`) \| (.*?)(?: \(\[.*)? \|$", PAGES["settings.md"], re.MULTILINE)
    reasons = {name: why.replace("`", "") for names, why in rows for name in re.findall(r"\w+", names)}
    assert {name: reasons[name] for name in NO_EFFECT} == NO_EFFECT


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


def test_no_signature_in_the_reference_is_that_below_a_decorator():
    assert re.findall(r"^- `([\w.]+)\(call\)`", PAGES["reference.md"], re.MULTILINE) == []
    ordered = (
        "tensor, device_dense='', compression=Compression.none, op=Average, name=None, process_set=global_process_set, "
    )
    ordered += "ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0"
    assert f"- `ringreduce.tensorflow.reducescatter({ordered})`" in PAGES["reference.md"]
    assert (
        "- `ringreduce.tensorflow.allgather(tensor, name=None, ignore_name_scope=False, proc" in PAGES["reference.md"]
    )


def test_the_tables_of_horovods_names_and_flags_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "horovod.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.written(PAGES["horovod.md"]) == PAGES["horovod.md"], "python docs/horovod.py"
    assert len(tables.TABLE.findall(PAGES["horovod.md"])) == 3


@in_a_loop("name", ["", ".torch", ".torch.distributed", ".elastic", ".ps", ".sweeps", ".testing", ".dask", ".spark"])
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
    own = set().union(*(documented(f"ringreduce.{folder}{each}") for each in ("", ".callbacks", ".elastic")))
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
