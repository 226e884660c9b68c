"""`ringrun manifest`: what it prints is what Kubernetes' MPI Operator takes, and runs the command that was given."""

import copy
import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun import cli
from ringrun.errors import UsageError
from ringrun.kubernetes import manifest
from ringrun.kubernetes.mpijob import Request
from ringrun.kubernetes.mpijob import manifest as mpijob
from tests.launcher.mpi_operator_rules import expanded, refusals

Run = Callable[..., "subprocess.CompletedProcess[str]"]
needs_yaml = pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="no PyYAML")

IMAGE = "registry.example.org/train:1"
EVERYTHING = [
    *("-np", "7", "--image", IMAGE, "--name", "gpt", "--namespace", "team-a", "--slots-per-worker", "2"),
    *("--gpus-per-worker", "2", "--cpus", "500m", "--memory", "16Gi", "--mpi", "mpich", "--env", "A=$(HOME) b"),
    *("--user", "mpiuser:1000", "--ssh-port", "2200", "--ringrun-args", "--restarts 3 --fold"),
    *("python", "train.py", "--name", "$(HOME)", "$$", "$"),
]


def job(*arguments: str) -> dict[str, Any]:
    return mpijob(manifest.parse(arguments))


def container(made: dict[str, Any], kind: str) -> dict[str, Any]:
    return made["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"][0]


def test_the_least_that_can_be_said() -> None:
    made = job("-np", "4", "--image", IMAGE, "python", "train_gpt.py", "--steps", "100")
    assert refusals(made) == []
    assert made["metadata"] == {"name": "train-gpt"}
    assert made["spec"]["sshAuthMountPath"] == "/root/.ssh"
    assert made["spec"]["mpiImplementation"] == "OpenMPI"
    assert made["spec"]["slotsPerWorker"] == 1
    assert made["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
    launcher, worker = container(made, "Launcher"), container(made, "Worker")
    assert launcher["command"] == ["ringrun", "-np", "4", "python", "train_gpt.py", "--steps", "100"]
    assert worker["command"] == ["/usr/sbin/sshd", "-De"]
    assert worker["readinessProbe"]["tcpSocket"] == {"port": 22}
    assert not {"resources", "securityContext"} & (launcher.keys() | worker.keys())


def test_all_that_can_be_said() -> None:
    made = job(*EVERYTHING)
    assert refusals(made) == []
    assert made["metadata"] == {"name": "gpt", "namespace": "team-a"}
    spec = made["spec"]
    assert (spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Worker"]["replicas"]) == (2, 4)
    assert (spec["mpiImplementation"], spec["sshAuthMountPath"]) == ("MPICH", "/home/mpiuser/.ssh")
    launcher, worker = container(made, "Launcher"), container(made, "Worker")
    ringrun = ["ringrun", "-np", "7", "-p", "2200", "--env", "A", "--restarts", "3", "--fold"]
    command = [expanded(word, {"HOME": "/wrong"}) for word in launcher["command"]]
    assert command == [*ringrun, "python", "train.py", "--name", "$(HOME)", "$$", "$"]
    assert expanded(launcher["env"][0]["value"], {"HOME": "/wrong"}) == "$(HOME) b"
    assert launcher["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
    assert worker["resources"]["limits"] == {"cpu": "500m", "memory": "16Gi", "nvidia.com/gpu": 2}
    assert worker["command"] == ["/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config", "-p", "2200"]
    assert worker["readinessProbe"]["tcpSocket"] == {"port": 2200}
    assert [each["securityContext"]["runAsUser"] for each in (launcher, worker)] == [1000, 1000]


def test_ringreduce_gets_more_shared_memory_than_a_container_has() -> None:
    made = job("-np", "2", "--image", IMAGE, "true")
    pod = made["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    assert container(made, "Worker")["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]


@pytest.mark.parametrize(
    ("arguments", "slots", "workers"),
    [
        (["-np", "8"], 1, 8),
        (["-np", "8", "--gpus-per-worker", "4"], 4, 2),
        (["-np", "9", "--gpus-per-worker", "4"], 4, 3),
        (["-np", "8", "--gpus-per-worker", "4", "--slots-per-worker", "2"], 2, 4),
        (["-np", "3", "--slots-per-worker", "8"], 8, 1),
    ],
)
def test_workers_have_slots_for_all_ranks(arguments: list[str], slots: int, workers: int) -> None:
    made = job(*arguments, "--image", IMAGE, "true")
    assert made["spec"]["slotsPerWorker"] == slots
    assert made["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == workers


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "examples/Train_GPT.py"], "train-gpt"),
        (["python", "-m", "module"], "python"),
        (["./3rd.sh"], "rd"),
        (["/bin/[", "1"], "ringrun"),
        (["--", "-x"], "x"),
        (["a" * 100], "a" * 30),
    ],
)
def test_a_job_is_called_as_its_script(command: list[str], name: str) -> None:
    made = job("-np", "2", "--image", IMAGE, *command)
    assert made["metadata"]["name"] == name
    assert refusals(made) == []


def test_a_command_may_look_like_a_flag() -> None:
    command = container(job("-np", "2", "--image", IMAGE, "--", "-strange", "x"), "Launcher")["command"]
    assert command == ["ringrun", "-np", "2", "--", "-strange", "x"]


WRONG = [
    (["--image", IMAGE, "true"], "-np is missing, as in: ringrun manifest -np N --image IMAGE command"),
    (["-np", "2", "true"], "--image is missing"),
    (["-np", "2", "--image", IMAGE], "a command is missing"),
    (["-np", "0", "--image", IMAGE, "true"], "-np: expected a whole number from 1 to 999999, got '0'"),
    (["-np", "auto", "--image", IMAGE, "true"], "-np: expected a whole number from 1 to 999999, got 'auto'"),
    (["-np", "2", "--image", "a b", "true"], "--image 'a b': expected an image's name"),
    (["-np", "2", "--image", IMAGE, "--name", "Gpt", "true"], "--name Gpt: expected at most 54 lower-case letters"),
    (["-np", "2", "--image", IMAGE, "--name", "a" * 55, "true"], "expected at most 54 lower-case letters"),
    (["-np", "11", "--image", IMAGE, "--name", "a" * 54, "true"], "expected at most 53 lower-case letters"),
    (["-np", "2", "--image", IMAGE, "--namespace", "a_b", "true"], "--namespace a_b: expected lower-case letters"),
    (["-np", "2", "--image", IMAGE, "--gpus-per-worker", "x", "true"], "--gpus-per-worker: expected a whole number"),
    (["-np", "2", "--image", IMAGE, "--slots-per-worker", "0", "true"], "--slots-per-worker: expected a whole"),
    (["-np", "2", "--image", IMAGE, "--cpus", "0", "true"], "--cpus 0: expected an amount above 0"),
    (["-np", "2", "--image", IMAGE, "--memory", "16 GB", "true"], "--memory 16 GB: expected an amount above 0"),
    (["-np", "2", "--image", IMAGE, "--mpi", "intel", "true"], "--mpi intel: expected one of openmpi, mpich"),
    (["-np", "2", "--image", IMAGE, "--env", "NAME", "true"], "--env NAME: expected NAME=VALUE"),
    (["-np", "2", "--image", IMAGE, "--env", "a.b=c", "true"], "--env a.b=c: expected NAME=VALUE"),
    (["-np", "2", "--image", IMAGE, "--env", "RINGRUN_X=1", "true"], "--env RINGRUN_X=1: expected NAME=VALUE"),
    (
        ["-np", "2", "--image", IMAGE, "--env", "HF_TOKEN=hush", "true"],
        "--env HF_TOKEN: it looks like a secret, and anybody who reads the manifest would see it; put it into a "
        "Secret: --env-from-secret HF_TOKEN=SECRET:KEY",
    ),
    (["-np", "2", "--image", IMAGE, "--env", "DB=postgres://me:hush@h/d", "true"], "--env DB: it looks like a secret"),
    (
        ["-np", "2", "--image", IMAGE, "--env-from-secret", "A=b", "true"],
        "--env-from-secret A=b: expected NAME=SECRET:",
    ),
    (
        ["-np", "2", "--image", IMAGE, "--env-from-secret", "A=b:", "true"],
        "--env-from-secret A=b:: expected NAME=SECRET:",
    ),
    (["-np", "2", "--image", IMAGE, "--env-from-secret", "A=B:c", "true"], "--env-from-secret A=B:c: expected NAME="),
    (
        ["-np", "2", "--image", IMAGE, "--env-from-secret", "A=b:c", "--env", "A=1", "true"],
        "--env and --env-from-secret both set A; give one of them",
    ),
    (["-np", "2", "--image", IMAGE, "--user", "root", "true"], "--user root: expected the image's user and its number"),
    (["-np", "2", "--image", IMAGE, "--ssh-port", "0", "true"], "--ssh-port: expected a port from 1 to 65535, got '0'"),
    (["-np", "2", "--image", IMAGE, "--ringrun-args", "'", "true"], '--ringrun-args "\'": no closing quotation'),
    (
        ["-np", "2", "--image", IMAGE, "--timeout", "3", "true"],
        "there is no flag --timeout; see ringrun manifest --help",
    ),
    (["-np", "2", "--image", IMAGE, "\udcff"], "manifest: '\\udcff' is not text in UTF-8"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_command_line_is_one_clear_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        manifest.parse(arguments)
    assert str(caught.value).startswith(message) or message in str(caught.value)


words = st.one_of(
    st.sampled_from(["-np", "--image", IMAGE, "--name", "a-b", "--slots-per-worker", "2", "--user", "u:1", "true"]),
    st.text(max_size=20),
)


@needs_yaml
@given(st.lists(words, max_size=12))
def test_any_words_give_what_the_operator_takes_or_one_usage_error(arguments: list[str]) -> None:
    import yaml

    try:
        request = manifest.parse(["-np", "3", "--image", IMAGE, *arguments])
    except (UsageError, SystemExit):  # the latter for -h
        return
    check(request, yaml)


@needs_yaml
@given(
    size=st.integers(1, 999_999),
    slots=st.integers(1, 999_999),
    command=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1),
    name=st.text(st.sampled_from("ab-1A")),
    value=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_whatever_is_asked_the_operator_takes_it(
    size: int, slots: int, command: list[str], name: str, value: str
) -> None:
    import yaml

    try:
        request = Request(size, IMAGE, command, name=name, slots=slots, variables={"A": value})
    except UsageError:
        assert name  # one that is made of the command's is always taken
    else:
        check(request, yaml)


def check(request: Request, yaml: Any) -> None:
    made = mpijob(request)
    assert refusals(made) == []
    assert yaml.safe_load(manifest.as_yaml(made)) == made
    command = [expanded(word, {}) for word in container(made, "Launcher")["command"]]
    assert command[-len(request.command) :] == list(request.command)
    spec = made["spec"]
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] * spec["slotsPerWorker"] >= request.size


def change(made: dict[str, Any], path: str, value: object) -> None:
    """Set what `path` names, or take it away (None)."""
    *above, last = path.split("/")
    for part in above:
        made = made[int(part) if part.isdecimal() else part]
    if value is None:
        del made[last]
    else:
        made[last] = value


LAUNCHER, WORKER = (f"spec/mpiReplicaSpecs/{kind}" for kind in ("Launcher", "Worker"))
CONTAINER = "template/spec/containers/0"
BROKEN = [
    ("apiVersion", "kubeflow.org/v1"),
    ("kind", "Job"),
    ("extra", 1),
    ("metadata/name", "Train"),
    ("metadata/name", "1train"),
    ("metadata/name", "a" * 55),
    ("metadata/namespace", "a_b"),
    ("metadata/color", "red"),
    ("spec/slotsPerWorker", None),
    ("spec/slotsPerWorker", -1),
    ("spec/slotsPerWorker", "2"),
    ("spec/sshAuthMountPath", None),
    ("spec/mpiImplementation", "openmpi"),
    ("spec/launcherCreationPolicy", "Later"),
    ("spec/waitForWorkers", True),
    ("spec/runPolicy", {}),
    ("spec/runPolicy/cleanPodPolicy", "Never"),
    ("spec/runPolicy/backoffLimit", -1),
    ("spec/runPolicy/ttlSecondsAfterFinished", -1),
    ("spec/runPolicy/retries", 3),
    ("spec/mpiReplicaSpecs", None),
    (LAUNCHER, None),
    (f"{LAUNCHER}/replicas", 2),
    (f"{LAUNCHER}/replicas", None),
    (f"{WORKER}/replicas", 0),
    (f"{WORKER}/restartPolicy", "Always"),
    (f"{WORKER}/restartPolicy", None),
    (f"{WORKER}/template/spec/containers", []),
    (f"{WORKER}/template/spec/volumes", []),
    (f"{WORKER}/template/spec/volumes/0/emptyDir/medium", "RAM"),
    (f"{WORKER}/template/spec/volumes/0/name", "ssh-auth"),
    (f"{WORKER}/{CONTAINER}/name", "The worker"),
    (f"{WORKER}/{CONTAINER}/image", ""),
    (f"{WORKER}/{CONTAINER}/port", 22),
    (f"{LAUNCHER}/{CONTAINER}/command", ["ringrun", "-np", 7]),
    (f"{LAUNCHER}/{CONTAINER}/env/0/name", "1A"),
    (f"{LAUNCHER}/{CONTAINER}/env/0/value", 1),
    (f"{WORKER}/{CONTAINER}/resources/limits/memory", "16 GB"),
    (f"{WORKER}/{CONTAINER}/resources/limits/nvidia.com~gpu", "500m"),
    (f"{WORKER}/{CONTAINER}/volumeMounts/0/mountPath", "/home/mpiuser/.ssh"),
    (f"{WORKER}/{CONTAINER}/volumeMounts/0/mountPath", "/etc/mpi"),
    (f"{WORKER}/{CONTAINER}/readinessProbe/tcpSocket/port", 70000),
    (f"{WORKER}/{CONTAINER}/securityContext/runAsUser", "mpiuser"),
]


@pytest.mark.parametrize(("path", "value"), BROKEN)
def test_each_rule_refuses_what_breaks_it(path: str, value: object) -> None:
    broken = copy.deepcopy(job(*EVERYTHING))
    *above, last = path.split("/")
    change(broken, "/".join([*above, last.replace("~", "/")]) if "~" not in last else path, value)
    if "~" in last:
        limits = container(broken, "Worker")["resources"]["limits"]
        limits["nvidia.com/gpu"] = limits.pop(last)
    assert refusals(broken)


def test_a_secret_does_not_stand_in_the_manifest() -> None:
    made = job("-np", "2", "--image", IMAGE, "--env-from-secret", "HF_TOKEN=hub:my.token_1", "--env", "A=1", "true")
    assert refusals(made) == []
    launcher = container(made, "Launcher")
    reference = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "my.token_1"}}}
    assert launcher["env"] == [{"name": "A", "value": "1"}, reference]
    assert launcher["command"] == ["ringrun", "-np", "2", "--env", "A", "--env", "HF_TOKEN", "true"]
    assert "env" not in container(made, "Worker"), "workers get it from ringrun"


AWKWARD = [
    chr(code) for code in [*range(0x300), *range(0x2000, 0x2070), 0xD7FF, 0xE000, 0xFEFF, 0xFFFD, 0xFFFE, 0x1F600]
]


@needs_yaml
@pytest.mark.parametrize("text", ["{}", "{}{}", "a{}", "{}a", "a{}b", "- {}", " {} ", "a{} b: c", "{}\n\n {}"])
def test_every_character_comes_back_from_the_yaml(text: str) -> None:
    import yaml

    words = [text.replace("{}", character) for character in AWKWARD]
    assert yaml.safe_load(manifest.as_yaml(words)) == words
    assert yaml.safe_load(manifest.as_yaml(dict.fromkeys(words, 1))) == dict.fromkeys(words, 1)


@needs_yaml
def test_it_is_printed_as_yaml(ringrun: Run) -> None:
    import yaml

    done = ringrun("manifest", *EVERYTHING)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout) == job(*EVERYTHING)


def test_without_pyyaml_the_cure_is_told(ringrun: Run, tmp_path) -> None:
    (tmp_path / "yaml.py").write_text("raise ImportError('none')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = ringrun("manifest", "-np", 2, "--image", IMAGE, "true", env={"PYTHONPATH": path})
    assert done.returncode == 2
    assert done.stderr == ("ringrun: error: manifest: writing YAML needs PyYAML; pip install 'ringreduce[yaml]'\n")


def test_its_own_help(ringrun: Run) -> None:
    done = ringrun("manifest", "--help")
    assert done.returncode == 0
    for part in ("What must stand in the image", "openssh-server", "--gpus-per-worker N", "kubectl apply -f -"):
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_a_program_of_that_name_can_be_run_still() -> None:
    assert cli.parse(["-np", "2", "manifest", "x"]).job.command == ["manifest", "x"]
    assert cli.parse(["-np", "2", "--", "manifest"]).job.command == ["manifest"]
    with pytest.raises(UsageError, match="command not found: 'manifest'"):
        cli.run(["--", "manifest"])


def test_the_recipe_of_the_docs_is_what_the_operator_takes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    (recipe,) = re.findall(r"^ringrun manifest (.*) \| kubectl apply -f -$", page, re.MULTILINE)
    made = job(*shlex.split(recipe))
    assert refusals(made) == []
    assert f"kubectl logs --follow job/{made['metadata']['name']}-launcher\n" in page


def test_what_the_launcher_runs_is_a_command_line_of_ringruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags are known, and its variables may be sent to other hosts."""
    _, *arguments = [expanded(word, {}) for word in container(job(*EVERYTHING), "Launcher")["command"]]
    monkeypatch.setenv("A", "$(HOME) b")  # as the pod has it
    options = cli.parse(arguments)
    assert (options.np, options.job.restarts, options.job.fold, options.job.asked) == (7, 3, True, {"A": "$(HOME) b"})
    assert options.ssh.port == 2200
    assert options.job.command == ["python", "train.py", "--name", "$(HOME)", "$$", "$"]
