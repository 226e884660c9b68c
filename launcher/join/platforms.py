"""Which node of a job this one is, from the variables that a platform sets on each of its nodes. Pure functions.

A platform is a row of PLATFORMS: the variable by which it is known, and what reads the rest. A user's own torchrun
variables count before those of the platform below them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..arguments import parse_port, whole
from ..errors import UsageError
from ..hosts import HOSTFILE_VARIABLES
from ..hosts.nodelist import NODELIST, expand_nodelist
from ..text import quoted

DEFAULT_PORT = 29400
"""As torchrun's."""
MAX_NODES = 65536
_SLURM_PORTS = (20000, 10000)  # from which one, and how many: jobs of one node have different ones

Environ = Mapping[str, str]


@dataclass(frozen=True)
class NodeRank:
    """This node's `index` among the `count` of its job, of which the one with index 0 is the head.

    -1 as the index: a node that is not the head, and which one, nobody has said.
    """

    index: int
    count: int
    head: str
    port: int = DEFAULT_PORT
    why: str = ""
    """Which variables say so."""


def find_node_rank(environ: Environ, hostname: str) -> NodeRank | None:
    """Return what the platform says; None where none is known. hostname: this host's, with its domain if it has one."""
    environ = {name: value for name, value in environ.items() if value.strip()}  # an empty one says nothing
    for title, variable, read in PLATFORMS:
        if variable in environ:
            try:
                return read(environ, hostname)
            except KeyError as error:
                missing = f"{title} was recognized by {variable}, but {error.args[0]} is not set"
                cure = "say --nodes N" if error.args[0] == "NNODES" else "set it, or give HEAD:PORT and --nodes N"
                raise UsageError(f"{missing}; {cure}") from None
    return None


def _number(environ: Environ, name: str, least: int = 0, most: int = MAX_NODES) -> int:
    return whole(environ[name], f"{name}={quoted(environ[name])}", least, most)


def _port(environ: Environ, name: str) -> int:
    return parse_port(text, f"{name}={quoted(text)}") if (text := environ.get(name)) else DEFAULT_PORT


def _node_rank(index: int, count: int, head: str, port: int = DEFAULT_PORT, why: str = "") -> NodeRank:
    if not index < count:
        raise UsageError(f"{why}: this is node {index}, but with {count} nodes the last is {count - 1}")
    return NodeRank(index, count, head, port, why)


def _torchrun(prefix: str) -> Callable[[Environ, str], NodeRank]:
    def read(environ: Environ, _: str) -> NodeRank:
        rank, nodes, address, port = (
            f"{prefix}{name}" for name in ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT")
        )
        most = {nodes: environ[nodes].rpartition(":")[2]}  # 1:4 for torchrun's elastic jobs
        why = f"{rank}={environ[rank]}, {nodes}={environ[nodes]}"
        return _node_rank(_number(environ, rank), _number(most, nodes, 1), environ[address], _port(environ, port), why)

    return read


def _skypilot(environ: Environ, _: str) -> NodeRank:
    addresses, rank = environ["SKYPILOT_NODE_IPS"].split(), _number(environ, "SKYPILOT_NODE_RANK")
    why = f"SKYPILOT_NODE_RANK={rank}, SKYPILOT_NODE_IPS={quoted(' '.join(addresses))}"
    return _node_rank(rank, len(addresses), addresses[0], why=why)


def _sagemaker(environ: Environ, _: str) -> NodeRank:
    why = f"SM_HOSTS={environ['SM_HOSTS']}, SM_CURRENT_HOST={environ['SM_CURRENT_HOST']}"
    try:
        hosts = sorted(map(str, json.loads(environ["SM_HOSTS"])))
        return NodeRank(hosts.index(environ["SM_CURRENT_HOST"]), len(hosts), hosts[0], why=why)
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f'{why}: expected a list with this host in it, as in ["algo-1", "algo-2"]') from None


def _aws_batch(environ: Environ, hostname: str) -> NodeRank:
    """Only nodes other than the main one have its address."""
    index, main, count = (
        _number(environ, f"AWS_BATCH_JOB_{name}") for name in ("NODE_INDEX", "MAIN_NODE_INDEX", "NUM_NODES")
    )
    why = f"AWS_BATCH_JOB_NODE_INDEX={index}, AWS_BATCH_JOB_MAIN_NODE_INDEX={main}, AWS_BATCH_JOB_NUM_NODES={count}"
    head = hostname if index == main else environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
    return _node_rank((index - main) % count if index < count else index, count, head, why=why)


def _kubernetes(environ: Environ, hostname: str) -> NodeRank:
    """An Indexed Job, JobSet's too: pods are called NAME-INDEX, and have a domain if there is a headless service."""
    index = _number(environ, "JOB_COMPLETION_INDEX")
    why = f"JOB_COMPLETION_INDEX={index}, NNODES={environ['NNODES']}"
    name, dot, domain = hostname.partition(".")
    head = environ.get("MASTER_ADDR") or f"{name.removesuffix(f'-{index}')}-0{dot}{domain}"
    if not environ.get("MASTER_ADDR") and not name.endswith(f"-{index}"):
        raise UsageError(f"{why}: this pod is called {name}, not NAME-{index}; set MASTER_ADDR to the name of pod 0")
    return _node_rank(index, _number(environ, "NNODES", 1), head, _port(environ, "MASTER_PORT"), why)


def _slurm(environ: Environ, _: str) -> NodeRank:
    index, tasks = _number(environ, "SLURM_NODEID"), _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    nodes = expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ[NODELIST])
    first, span = _SLURM_PORTS
    why = f"SLURM_NODEID={index}, {NODELIST}={environ[NODELIST]}, SLURM_STEP_NUM_TASKS={tasks}"
    if tasks != len(nodes):
        raise UsageError(f"{why}: expected one task on each node: srun --ntasks-per-node=1 ringrun join …")
    return _node_rank(index, len(nodes), nodes[0], first + _number(environ, "SLURM_JOB_ID", 0, 1 << 32) % span, why)


PLATFORMS: tuple[tuple[str, str, Callable[[Environ, str], NodeRank]], ...] = (
    ("torchrun", "NODE_RANK", _torchrun("")),
    ("Kubeflow's Trainer", "PET_NODE_RANK", _torchrun("PET_")),
    ("SkyPilot", "SKYPILOT_NODE_RANK", _skypilot),
    ("SageMaker", "SM_HOSTS", _sagemaker),
    ("AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", _aws_batch),
    ("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", _kubernetes),
    ("a step of Slurm", "SLURM_STEP_NUM_TASKS", _slurm),
)
"""A name for messages, the variable that says it is this one, and what reads the others."""

OF_PLATFORM = (
    *("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PET_*", *HOSTFILE_VARIABLES),
)
"""Variables that are about this node, beside those of batch systems; what the node starts gets none of them."""
