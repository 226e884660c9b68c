"""examples/mpijob.yaml, and docker/Dockerfile, the image for it."""

import configparser
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

from ringrun import cli
from ringrun.agent.master_port import free_port
from ringrun.config import resolve as config
from ringrun.join import command
from tests.support import loopback_sshd
from tests.support.jobs import ROOT, run
from tests.support.patience import wait_until
from tests.support.sources import found

SPEC = yaml.safe_load((ROOT / "examples" / "mpijob.yaml").read_text())["spec"]
PODS = {name: each["template"]["spec"] for name, each in SPEC["mpiReplicaSpecs"].items()}
LAUNCHER, WORKER = (PODS[name]["containers"][0] for name in ("Launcher", "Worker"))
IMAGE = (ROOT / "docker" / "Dockerfile").read_text()
SSHD_CONFIG = re.search(r"&& printf '(.*)' > /home/mpiuser/\.sshd_config", IMAGE)[1].replace("\\n", "\n")


def test_the_launcher_runs_a_command_line_of_ringruns_with_a_slot_for_each_rank():
    assert LAUNCHER["command"][0] == "ringrun"
    request = cli.parse(LAUNCHER["command"][1:])
    assert request.np == SPEC["slotsPerWorker"] * SPEC["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert request.np == WORKER["resources"]["limits"]["nvidia.com/gpu"] * SPEC["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert (ROOT / request.job.command[1]).is_file()
    assert f"Port {request.job.reach.options.port}\n" in SSHD_CONFIG
    assert WORKER["readinessProbe"]["tcpSocket"]["port"] == request.job.reach.options.port


def test_the_image_is_built_from_what_is_there_for_the_user_that_the_pods_have():
    """No registry and no daemon here: its lines are read."""
    allowed = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert [name for name in allowed if name[0] == "!" and not found(name[1:]).exists()] == []
    copied = [line.split()[-2] for line in IMAGE.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert copied == [".", "examples"]
    user = WORKER["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} --create-home mpiuser" in IMAGE
    assert IMAGE.endswith(f"\nUSER {user}\n"), "by number: Kubernetes cannot tell from a name that it is not root"
    extras = configparser.ConfigParser(interpolation=None)
    extras.read(ROOT / "setup.cfg")
    named = ",".join(re.findall(r"EXTRAS=(\S+)", IMAGE)).split(",")
    assert set(named) <= set(extras["options.extras_require"])
    for script in re.findall(r"\bringrun .* python (\S+)", IMAGE):
        assert (ROOT / script).is_file()
    (joined,) = re.findall(r"\bringrun join (.*)", IMAGE)
    options = config.resolve(command._parser(), joined.split()[1:], {}).options
    assert (options.nodes, options.slots_per_host) == ("2", "2")


@pytest.mark.parametrize("container", [LAUNCHER, WORKER], ids=["launcher", "worker"])
def test_a_restricted_namespace_takes_the_pods(container):
    """https://kubernetes.io/docs/concepts/security/pod-security-standards: what "restricted" asks of a container."""
    context = container["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not context.get("privileged")


def test_shared_memory_is_larger_than_a_container_has():
    (shm,) = [each["name"] for each in WORKER["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    assert {"name": shm, "emptyDir": {"medium": "Memory"}} in PODS["Worker"]["volumes"]


@pytest.mark.adapters
@pytest.mark.skipif(bool(loopback_sshd.why_not()), reason=loopback_sshd.why_not())
def test_its_sshd_needs_no_rights():
    """As in the pod: user 1000, no capability, none to gain; the key is root's, and everybody may read it."""
    home = Path(tempfile.mkdtemp())  # others may not enter pytest's own folders
    uid, port = str(WORKER["securityContext"]["runAsUser"]), free_port()
    try:
        (home / ".ssh").mkdir()
        home.chmod(0o755)
        for key in (home / "mine", home / ".ssh" / "id_rsa"):
            subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", key], check=True)
        key.chmod(0o644)
        shutil.copy(home / "mine.pub", home / ".ssh" / "authorized_keys")
        (home / ".sshd_config").write_text(SSHD_CONFIG.replace("/home/mpiuser", str(home)).replace("2222", str(port)))
        (home / "passwd").write_text(f"root:x:0:0::/:/bin/sh\nmpiuser:x:{uid}:{uid}::{home}:/bin/sh\n")
        sshd = " ".join(WORKER["command"]).replace("/home/mpiuser", str(home))
        rights = f"--reuid {uid} --regid {uid} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
        pod = f"mount --bind {home}/passwd /etc/passwd && exec setpriv {rights} {sshd}"
        options = ["BatchMode=yes", "StrictHostKeyChecking=no", f"UserKnownHostsFile={os.devnull}"]
        ssh = ["ssh", "-F", "none", "-i", home / "mine", "-p", str(port), *(f"-o{each}" for each in options)]
        with subprocess.Popen(["unshare", "-m", "sh", "-c", pod], stderr=subprocess.DEVNULL) as server:
            try:
                wait_until(lambda: run([*ssh, "mpiuser@127.0.0.1", "id", "-u"]).stdout == f"{uid}\n", within_s=10)
            finally:
                server.terminate()
    finally:
        shutil.rmtree(home)
