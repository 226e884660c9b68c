"""What a release consists of says the same everywhere: version, addresses, Pythons; what workflows may do."""

import configparser
import re

import pytest
import yaml

import ringreduce
from tests.support.jobs import ROOT


def loaded(path):
    return yaml.safe_load((ROOT / path).read_text())


METADATA = configparser.ConfigParser()
METADATA.read(ROOT / "setup.cfg")
METADATA = METADATA["metadata"]
CITATION = loaded("CITATION.cff")
WORKFLOWS = {path.name: loaded(path) for path in (ROOT / ".github" / "workflows").iterdir()}
JOBS = {name: job for workflow in WORKFLOWS.values() for name, job in workflow["jobs"].items()}
FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir() if path.name != "config.yml"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", METADATA["classifiers"])


def test_addresses_stand_in_setup_cfg_and_are_everywhere_the_same():
    urls = dict(re.findall(r"^(\w+) = (\S+)$", METADATA["project_urls"], re.MULTILINE))
    site = (ROOT / "mkdocs.yml").read_text()
    for found in (dict(re.findall(r"^(repo_url|site_url): *(\S+)", site, re.MULTILINE)), CITATION):
        of_source = [found[key] for key in ("repo_url", "repository-code") if key in found]
        of_site = [found[key] for key in ("site_url", "url") if key in found]
        assert of_source == [urls[key] for key in ["Source"] if key in urls]
        assert of_site == [urls[key] for key in ["Documentation"] if key in urls]


def test_a_citation_is_of_this_version_and_license():
    assert CITATION["version"] == ringreduce.__version__
    assert CITATION["license"] == METADATA["license_expression"]


def test_every_python_is_tested_and_has_a_wheel():
    assert JOBS["pythons"]["strategy"]["matrix"]["python"] == PYTHONS
    built = re.findall(r'"(cp\d+)-manylinux_x86_64"', (ROOT / "pyproject.toml").read_text())
    assert built == ["cp310", "cp311"], "from 3.11 on one wheel serves all: setup.py"


def test_a_workflow_names_lanes_that_are_there():
    lanes = re.search(r"^ +(check .*)\) ;;$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)[1].split(" | ")
    commands = [step.get("run", "") for job in JOBS.values() for step in job.get("steps", [])]
    used = {lane for command in commands for lane in re.findall(r"\.ci/run (\w+)$", command)}
    assert {*JOBS["lanes"]["strategy"]["matrix"]["lane"], *used} == {"check", "test", "adapters", "docs"} < set(lanes)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_only_and_takes_actions_of_a_version(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    for job in WORKFLOWS[name]["jobs"].values():
        assert job.get("permissions", {}) in ({}, {"id-token": "write"})
        assert job.get("timeout-minutes") or "uses" in job
        for step in job.get("steps", []):
            if "uses" in step:
                assert re.search(r"[@:]v?\d[\d.]*$", step["uses"])
                assert ("checkout" in step["uses"]) == (step.get("with") == {"persist-credentials": False})


def test_forms_ask_for_what_helps():
    asked = {path.stem: [field["id"] for field in loaded(path)["body"]] for path in FORMS}
    assert asked == {
        "bug": ["what", "output", "doctor"],
        "slow": ["what", "report", "doctor"],
        "feature": ["what", "how"],
    }
    for path in FORMS:
        form = loaded(path)
        assert {"name", "description", "labels", "body"} == set(form)
        assert {field["type"] for field in form["body"]} == {"textarea"}
        assert all({"label", "description"} <= set(field["attributes"]) for field in form["body"])
