"""What is asked of Kubernetes' MPI Operator, and the MPIJob (kubeflow.org/v2beta1) that says so. Pure functions.

    Launcher  one pod, runs `ringrun …`; the operator gives it the workers' names in a hostfile, and no GPU
    Worker    one pod for each host, runs sshd, over which ringrun starts that host's ranks

Source: the operator's types.go and mpi_job_controller.go; tests/launcher/mpi_operator_rules.py holds what it refuses.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..forward import is_secret

IMPLEMENTATIONS = {"openmpi": "OpenMPI", "mpich": "MPICH"}
"""What the operator calls an MPI: it writes the hostfile as that one reads it, and names it in its variable."""

SSHD = ("/usr/sbin/sshd", "-De")
"""In the foreground, its log on stderr; the operator's own choice."""

SSH_PORT = 22
LONGEST_LABEL = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # DNS-1035: the job's name becomes a service's
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # DNS-1123
_VARIABLE = re.compile(r"(?!RINGRUN_)[A-Za-z_][A-Za-z0-9_]*")  # what ringrun's --env takes
_FROM_SECRET = re.compile(rf"({_VARIABLE.pattern})=([a-z0-9](?:[-.a-z0-9]*[a-z0-9])?):([-._a-zA-Z0-9]+)")
_QUANTITY = re.compile(r"(?=.*[1-9])\d{1,15}(\.\d{1,9})?(m|k|[KMGTPE]i|[MGTPE])?")
_USER = re.compile(r"([a-z_][a-z0-9_-]{0,31}):([1-9][0-9]{0,8})")
_IMAGE = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class User:
    """Who a pod's processes belong to; its home is /home/NAME."""

    name: str
    number: int


@dataclass(frozen=True)
class Request:
    """One job: `size` ranks of `command` in pods of `image`, `slots` in each.

    Raises: UsageError for what the operator would refuse.
    """

    size: int
    image: str
    command: Sequence[str]
    name: str = ""
    """By default the command's own."""
    namespace: str | None = None
    slots: int = 1
    gpus: int = 0
    """Of each worker, as are `cpus` and `memory`."""
    cpus: str | None = None
    memory: str | None = None
    implementation: str = "openmpi"
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Variables whose values are in a Secret: its name and the key."""
    user: User | None = None
    """None: root."""
    ssh_port: int = SSH_PORT
    ringrun_arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        if twice := self.variables.keys() & self.secrets.keys():
            raise UsageError(f"--env and --env-from-secret both set {min(twice)}; give one of them")
        longest = f"{self.job_name}-worker-{self.workers - 1}"
        if not _LABEL.fullmatch(self.job_name) or len(longest) > LONGEST_LABEL:
            room = LONGEST_LABEL - len(longest) + len(self.job_name)
            raise UsageError(
                f"--name {self.job_name}: expected at most {room} lower-case letters, digits and dashes, "
                "a letter first and no dash last: it becomes a part of the pods' host names"
            )
        if self.namespace is not None and not (
            _NAMESPACE.fullmatch(self.namespace) and len(self.namespace) <= LONGEST_LABEL
        ):
            raise UsageError(f"--namespace {self.namespace}: expected lower-case letters, digits and dashes")
        if not _IMAGE.fullmatch(self.image):
            raise UsageError(f"--image {self.image!r}: expected an image's name, as in registry.example.org/train:1")
        for flag, quantity in (("--cpus", self.cpus), ("--memory", self.memory)):
            if quantity is not None and not _QUANTITY.fullmatch(quantity):
                example = "4 or 500m" if flag == "--cpus" else "16Gi"
                raise UsageError(
                    f"{flag} {quantity}: expected an amount above 0 as Kubernetes writes it, as in {example}"
                )

    @property
    def job_name(self) -> str:
        """The name that was given, or one made of the command's."""
        return self.name or _name_of(self.command)

    @property
    def workers(self) -> int:
        """How many pods it takes."""
        return -(-self.size // self.slots)


def parse_user(text: str, flag: str) -> User:
    """Return the user in `mpiuser:1000`."""
    match = _USER.fullmatch(text)
    if match is None:
        raise UsageError(f"{flag} {text}: expected the image's user and its number, as in mpiuser:1000")
    return User(match[1], int(match[2]))


def parse_variables(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Return the variables in NAME=VALUE, …"""
    variables = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        if not is_given or not _VARIABLE.fullmatch(name):
            raise UsageError(f"{flag} {text}: expected NAME=VALUE, as in RINGREDUCE_LOG_LEVEL=info")
        if is_secret(name, value):
            raise UsageError(
                f"{flag} {name}: it looks like a secret, and anybody who reads the manifest would see it; "
                f"put it into a Secret: --env-from-secret {name}=SECRET:KEY"
            )
        variables[name] = value
    return variables


def parse_secrets(texts: Sequence[str], flag: str) -> dict[str, tuple[str, str]]:
    """Return the variables in NAME=SECRET:KEY, … with the name of the Secret and the key in it."""
    secrets = {}
    for text in texts:
        match = _FROM_SECRET.fullmatch(text)
        if match is None:
            raise UsageError(f"{flag} {text}: expected NAME=SECRET:KEY, as in HF_TOKEN=hugging-face:token")
        secrets[match[1]] = (match[2], match[3])
    return secrets


def manifest(request: Request) -> dict[str, Any]:
    """Return the MPIJob, as Kubernetes' API takes it."""
    metadata = {"name": request.job_name}
    if request.namespace is not None:
        metadata["namespace"] = request.namespace
    home = "/root" if request.user is None else f"/home/{request.user.name}"
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata,
        "spec": {
            "slotsPerWorker": request.slots,
            "mpiImplementation": IMPLEMENTATIONS[request.implementation],
            "sshAuthMountPath": f"{home}/.ssh",
            "launcherCreationPolicy": "WaitForWorkersReady",
            # ringrun itself starts a job again, with --restarts
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {"Launcher": _launcher(request), "Worker": _worker(request)},
        },
    }


def _launcher(request: Request) -> dict[str, Any]:
    argv = ["ringrun", "-np", str(request.size)]
    if request.ssh_port != SSH_PORT:
        argv += ["-p", str(request.ssh_port)]
    for name in (*request.variables, *request.secrets):
        argv += ["--env", name]  # to the workers too, whatever the name
    argv += request.ringrun_arguments
    argv += ["--", *request.command] if request.command[0].startswith("-") else request.command
    container: dict[str, Any] = {"name": "launcher", "image": request.image, "command": list(map(_literal, argv))}
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(text)} for name, text in request.variables.items()]
    for name, (secret, key) in request.secrets.items():
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    if env:
        container["env"] = env
    # a namespace with a quota takes no pod without limits
    limits = {name: small for name, given, small in _amounts(request) if given is not None}
    return _replica(1, "Never", container, limits, request)


def _worker(request: Request) -> dict[str, Any]:
    sshd = list(SSHD)
    if request.user is not None:
        sshd += ["-f", f"/home/{request.user.name}/.sshd_config"]
    if request.ssh_port != SSH_PORT:
        sshd += ["-p", str(request.ssh_port)]
    container = {
        "name": "worker",
        "image": request.image,
        "command": sshd,
        "readinessProbe": {"tcpSocket": {"port": request.ssh_port}, "periodSeconds": 2},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - where MPI's shared memory is
    }
    limits: dict[str, Any] = {name: given for name, given, _ in _amounts(request) if given is not None}
    if request.gpus:
        limits["nvidia.com/gpu"] = request.gpus
    replica = _replica(request.workers, "OnFailure", container, limits, request)
    # a container's own /dev/shm has 64 MB; this one counts as the pod's memory
    replica["template"]["spec"]["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return replica


def _amounts(request: Request) -> list[tuple[str, str | None, str]]:
    """Return what is limited, what a worker gets of it, and what is enough for the launcher."""
    return [("cpu", request.cpus, "1"), ("memory", request.memory, "1Gi")]


def _replica(
    count: int, restart_policy: str, container: dict[str, Any], limits: Mapping[str, Any], request: Request
) -> dict[str, Any]:
    if limits:
        container["resources"] = {"limits": dict(limits)}
    if request.user is not None:
        container["securityContext"] = {"runAsUser": request.user.number}
    return {"replicas": count, "restartPolicy": restart_policy, "template": {"spec": {"containers": [container]}}}


def _literal(text: str) -> str:
    """Return `text` so that Kubernetes, which replaces $(NAME), leaves it as it was."""
    return text.replace("$", "$$")


def _name_of(command: Sequence[str]) -> str:
    """Return a name made of the first file that is no interpreter: `train` for `python -u train.py`."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    name = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-0123456789")
    return name[:30].rstrip("-") or "ringrun"
