"""What Kubernetes and its MPI Operator refuse in an MPIJob, written down again from their rules, not from our code.

Sources: the operator's pkg/apis/kubeflow/validation/validation.go, v2beta1/types.go (the schema's enums) and
pkg/controller/mpi_job_controller.go (what it adds to the pods); Kubernetes' own rules for pods.
"""

import re
from collections.abc import Iterator
from typing import Any

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SECRET_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
QUANTITY = re.compile(r"[+]?(\d+(\.\d*)?|\.\d+)(m|k|[KMGTPE]i|[MGTPE]|[eE][+-]?\d+)?")
LABEL_LENGTH = 63
INT32 = 2**31 - 1
ADDED_VOLUMES = {"ssh-auth", "mpi-job-config"}
ADDED_MOUNTS = {"/etc/mpi"}

SPEC_FIELDS = {
    "slotsPerWorker",
    "runLauncherAsWorker",
    "runPolicy",
    "mpiReplicaSpecs",
    "sshAuthMountPath",
    "launcherCreationPolicy",
    "mpiImplementation",
}
RUN_POLICY_FIELDS = {
    "cleanPodPolicy",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "backoffLimit",
    "schedulingPolicy",
    "suspend",
    "managedBy",
}


def refusals(job: dict[str, Any]) -> list[str]:
    """Each rule that `job` breaks, as `path: why`; none: the operator takes it."""
    return list(_job(job))


def _job(job: dict[str, Any]) -> Iterator[str]:
    if job.get("apiVersion") != "kubeflow.org/v2beta1":
        yield "apiVersion: not kubeflow.org/v2beta1"
    if job.get("kind") != "MPIJob":
        yield "kind: not MPIJob"
    yield from _unknown("", job, {"apiVersion", "kind", "metadata", "spec"})
    metadata, spec = job.get("metadata", {}), job.get("spec", {})
    replicas = spec.get("mpiReplicaSpecs", {}).get("Worker", {}).get("replicas", 1)
    for suffix in (f"-worker-{replicas - 1 if isinstance(replicas, int) else 0}", "-launcher"):
        yield from _label("metadata.name", f"{metadata.get('name', '')}{suffix}", DNS_1035)
    if "namespace" in metadata:
        yield from _label("metadata.namespace", metadata["namespace"], DNS_1123)
    yield from _unknown("metadata", metadata, {"name", "namespace", "labels", "annotations"})
    yield from _spec(spec)


def _spec(spec: dict[str, Any]) -> Iterator[str]:
    yield from _unknown("spec", spec, SPEC_FIELDS)
    yield from _integer("spec.slotsPerWorker", spec.get("slotsPerWorker"), 0)
    if not str(spec.get("sshAuthMountPath", "")).startswith("/"):
        yield "spec.sshAuthMountPath: required, absolute"
    yield from _one_of("spec.mpiImplementation", spec.get("mpiImplementation"), {"OpenMPI", "Intel", "MPICH"})
    policy = spec.get("launcherCreationPolicy", "AtStartup")
    yield from _one_of("spec.launcherCreationPolicy", policy, {"AtStartup", "WaitForWorkersReady"})
    run_policy = spec.get("runPolicy", {})
    yield from _unknown("spec.runPolicy", run_policy, RUN_POLICY_FIELDS)
    clean = run_policy.get("cleanPodPolicy")
    yield from _one_of("spec.runPolicy.cleanPodPolicy", clean, {"None", "Running", "All"})
    for name in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"):
        if name in run_policy:
            yield from _integer(f"spec.runPolicy.{name}", run_policy[name], 0)
    replicas = spec.get("mpiReplicaSpecs")
    if not replicas:
        yield "spec.mpiReplicaSpecs: required"
        return
    yield from _unknown("spec.mpiReplicaSpecs", replicas, {"Launcher", "Worker"})
    if "Launcher" not in replicas:
        yield "spec.mpiReplicaSpecs[Launcher]: required"
    for kind, replica in replicas.items():
        path = f"spec.mpiReplicaSpecs[{kind}]"
        yield from _replica(path, replica)
        if kind == "Launcher" and replica.get("replicas") not in (None, 1):
            yield f"{path}.replicas: must be 1"
        if kind == "Worker" and isinstance(replica.get("replicas"), int) and replica["replicas"] < 1:
            yield f"{path}.replicas: must be at least 1"
        for container in replica.get("template", {}).get("spec", {}).get("containers", []):
            mounted = {mount.get("mountPath") for mount in container.get("volumeMounts", [])}
            if spec.get("sshAuthMountPath") in mounted:
                yield f"{path}: two mounts at sshAuthMountPath"


def _replica(path: str, replica: dict[str, Any]) -> Iterator[str]:
    yield from _unknown(path, replica, {"replicas", "restartPolicy", "template"})
    yield from _integer(f"{path}.replicas", replica.get("replicas"), 0)
    yield from _one_of(f"{path}.restartPolicy", replica.get("restartPolicy"), {"Never", "OnFailure"})
    pod = replica.get("template", {}).get("spec", {})
    yield from _unknown(f"{path}.template.spec", pod, {"containers", "volumes"})
    containers = pod.get("containers", [])
    if not containers:
        yield f"{path}.template.spec.containers: at least one"
    volumes = [volume.get("name") for volume in pod.get("volumes", [])]
    if len(volumes) != len(set(volumes)) or ADDED_VOLUMES & set(volumes):
        yield f"{path}: two volumes of one name"
    for volume in pod.get("volumes", []):
        if volume.get("emptyDir", {}).get("medium", "") not in ("", "Memory"):
            yield f"{path}: emptyDir.medium"
    for container in containers:
        yield from _container(f"{path}.{container.get('name')}", container, volumes)


def _container(path: str, container: dict[str, Any], volumes: list[str]) -> Iterator[str]:
    known = {"name", "image", "command", "args", "env", "resources", "securityContext", "readinessProbe"}
    yield from _unknown(path, container, known | {"volumeMounts"})
    yield from _label(f"{path}.name", container.get("name", ""), DNS_1123)
    image = container.get("image", "")
    if not image or image != image.strip():
        yield f"{path}.image: required, without spaces around"
    for name in ("command", "args"):
        if not all(isinstance(word, str) for word in container.get(name, [])):
            yield f"{path}.{name}: words must be strings"
    names = [each.get("name", "") for each in container.get("env", [])]
    if len(names) != len(set(names)) or not all(map(ENV_NAME.fullmatch, names)):
        yield f"{path}.env: names"
    if not all(isinstance(each.get("value", ""), str) for each in container.get("env", [])):
        yield f"{path}.env: values must be strings"
    for each in container.get("env", []):
        source = each.get("valueFrom", {"secretKeyRef": {"name": "a", "key": "b"}})
        reference = source.get("secretKeyRef", {})
        if (
            set(source) != {"secretKeyRef"}
            or set(reference) != {"name", "key"}
            or ("valueFrom" in each) == ("value" in each)
        ):
            yield f"{path}.env: a value, or a secret's name and key"
        elif not SUBDOMAIN.fullmatch(reference["name"]) or not SECRET_KEY.fullmatch(reference["key"]):
            yield f"{path}.env: no secret's name or key"
    for name, quantity in container.get("resources", {}).get("limits", {}).items():
        if isinstance(quantity, bool) or not QUANTITY.fullmatch(str(quantity)):
            yield f"{path}.resources.limits.{name}: no quantity"
        if "/" in name and not str(quantity).isdecimal():
            yield f"{path}.resources.limits.{name}: whole devices only"
    mounts = container.get("volumeMounts", [])
    paths = [mount.get("mountPath") for mount in mounts]
    if len(paths) != len(set(paths)) or ADDED_MOUNTS & set(paths):
        yield f"{path}.volumeMounts: two at one path"
    if any(mount.get("name") not in volumes for mount in mounts):
        yield f"{path}.volumeMounts: no such volume"
    if "readinessProbe" in container:
        port = container["readinessProbe"].get("tcpSocket", {}).get("port")
        if type(port) is not int or not 1 <= port <= 65535:
            yield f"{path}.readinessProbe: no port"
    user = container.get("securityContext", {}).get("runAsUser", 0)
    yield from _integer(f"{path}.securityContext.runAsUser", user, 0)


def _unknown(path: str, found: dict[str, Any], known: set[str]) -> Iterator[str]:
    """The API server drops what it does not know; kubectl refuses it."""
    yield from (f"{path}.{name}: unknown field" for name in found.keys() - known)


def _label(path: str, text: str, form: re.Pattern[str]) -> Iterator[str]:
    if not form.fullmatch(text) or len(text) > LABEL_LENGTH:
        yield f"{path}: {text!r} is no label"


def _one_of(path: str, value: object, known: set[str]) -> Iterator[str]:
    if value not in known:
        yield f"{path}: {value!r}"


def _integer(path: str, value: object, least: int) -> Iterator[str]:
    if type(value) is not int or not least <= value <= INT32:
        yield f"{path}: {value!r}"


def expanded(text: str, variables: dict[str, str]) -> str:
    """What a container gets for `text` in its command or environment: $(NAME) is replaced, $$ is $.

    Source: Kubernetes' third_party/forked/golang/expansion/expand.go.
    """
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda match: "$" if match[1] == "$" else variables.get(match[2], match[0]),
        text,
    )
