"""examples/: each is short, says how to run it, stands in the README's order of learning, and is run by a test."""

import ast
import re

import kubernetes_validate
import yaml

from tests.support.documents import having
from tests.support.jobs import ROOT
from tests.support.loops import in_a_loop
from tests.support.sources import parsed

KINDS = (".py", ".ipynb", ".sbatch", ".yaml")
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.*") if path.suffix in KINDS)
SCRIPTS = [path for path in EXAMPLES if path.suffix == ".py"]
HOROVOD = [path for path in SCRIPTS if path.parent.name == "horovod"]
TESTS = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_examples.py")
OF_HOROVOD = (ROOT / "tests" / "end_to_end" / "test_horovod_scripts.py").read_text()


def name_of(path):
    return str(path.relative_to(ROOT))


@in_a_loop("path", EXAMPLES)
def test_each_is_short_and_told_in_the_readme_and_run_by_a_test(path):
    limit = 300 if path.name == "train_imagenet.py" else 200
    assert path.suffix == ".ipynb" or len(path.read_text().splitlines()) <= limit
    told = (ROOT / "examples" / "README.md").read_text()
    assert f"]({path.relative_to(ROOT / 'examples')})" in told
    assert path.name in TESTS or (path in HOROVOD and f'"{path.stem}"' in OF_HOROVOD), "no test names it"


def test_each_script_says_how_to_run_it():
    for path in SCRIPTS:
        doc = ast.get_docstring(parsed(path))
        assert re.search(rf"^ *(\w+=\w+ )?ringrun .*python {name_of(path)}\b", doc, re.MULTILINE), path.name


def test_the_readme_tells_of_nothing_that_is_not_there():
    told = re.findall(r"\]\(([^)]+)\)", (ROOT / "examples" / "README.md").read_text())
    assert len(told) > 20
    assert [each for each in told if not (ROOT / "examples" / each).exists()] == []


def test_in_horovods_scripts_nothing_but_the_import_differs():
    assert len(HOROVOD) == 11
    for path in HOROVOD:
        code = path.read_text().removeprefix('"""').partition('"""')[2]
        ours = [line for line in code.splitlines() if re.search("ringreduce|horovod", line)]
        assert ours == ["import ringreduce.torch as hvd  # before: import horovod.torch as hvd"]


@in_a_loop("path", [path for path in EXAMPLES if path.suffix == ".yaml"])
def test_objects_of_kubernetes_are_as_its_schemas_say(path):
    """Jobs and pods, also those within objects whose own schemas no package has."""
    for document in yaml.safe_load_all(path.read_text()):
        objects = [document] if document.get("apiVersion") in ("v1", "batch/v1") else []
        for kind, version, key in (("Job", "batch/v1", "completions"), ("Pod", "v1", "containers")):
            objects += [{"apiVersion": version, "kind": kind, "spec": spec} for spec in having(key, document)]
        assert objects or document.get("kind", "TrainJob") == "TrainJob"  # which has neither
        for each in objects:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
