"""Whether a rank is where the plan says, by what its agent says; and plans that an MPI cannot keep.

An MPI's launcher has a view of names, slots and settings of its own. Where it differs from ringrun's, ranks would run
elsewhere, or use another's cores and GPU, or a part of their part of the cores. So each agent is compared with the plan
before any rank's command starts.
"""

import re
from collections.abc import Mapping

from ..connection.wire import Hello
from ..engines import Engine
from ..errors import MachineError
from ..text import listed
from .plan import Job

_STEERS = re.compile(r"(OMPI|PRTE)_MCA_(rmaps|ras|\w*hostfile)|HYDRA_|MPIEXEC_|SLURM_(DISTRIBUTION|HOSTFILE)")
"""Variables by which mpirun and srun place ranks, too."""

_PLACING_FLAGS = {
    *("H", "N", "bynode", "byslot", "cpus-per-rank", "f", "host", "hostfile", "hosts", "machinefile", "map-by"),
    *("nolocal", "npernode", "pernode", "perhost", "ppn", "rank-by", "rankfile", "rf"),
}
_BINDING_FLAGS = {"bind-to", "binding", "cpu-bind", "cpu-list", "cpu-set"}


def misplaced(job: Job, hello: Hello, environ: Mapping[str, str], cpus: str = "") -> str:
    """Return why the agent that says `hello` is not where its rank is to run; nothing if it is there.

    cpus: those that it is to find there, of which each rank will get its share; empty where that is not known.
    Where the user's own --mpi-args place the ranks there is no plan of them, and nothing to compare.
    """
    flags = {argument.lstrip("-").partition("=")[0] for argument in job.mpi_args}
    if flags & _PLACING_FLAGS or any("rmaps_" in argument for argument in job.mpi_args):
        return ""
    steering = [name for name in environ if _STEERS.match(name)]
    name, local_rank, local_size = job.place_of(hello.rank)
    own_name = job.machines.own_name(name) if job.hosts else name
    boot = job.machines.boot(name)
    if own_name not in ("", hello.host):
        called = f"{name}, which calls itself {own_name}" if own_name != name else name
        what = f"rank {hello.rank} is to run on {called}, but was started on {hello.host}"
        cure = "use the name that `hostname` prints on each host"
    elif boot and hello.boot and boot != hello.boot:
        elsewhere = f"another machine that calls itself {hello.host}, too"
        what = f"rank {hello.rank} is to run on {name}, but was started on {elsewhere}"
        cure = "give each a name of its own, as with `hostnamectl set-hostname`"
    elif (hello.local_rank, hello.local_size) != (local_rank, local_size):
        theirs = f"was started as local rank {hello.local_rank} of {hello.local_size}"
        what = f"rank {hello.rank} is to be local rank {local_rank} of {local_size} on {name}, but {theirs}"
        cure = "name each host once, with all its slots"
    elif job.bind and not flags & _BINDING_FLAGS and "" not in (cpus, hello.cpus) and hello.cpus != cpus:
        what = f"rank {hello.rank} is to get its share of the CPUs {cpus} of {name}, but was started on {hello.cpus}"
        cure = "let nothing but ringrun bind ranks to cores, or give ringrun --no-bind"
    else:
        return ""
    return f"{what}; {f'unset {listed(steering)}, which may have placed it' if steering else cure}"


def require_own_names(job: Job, engine: Engine) -> None:
    """Raise MachineError where hosts share a name that the MPI tells them apart by."""
    if not engine.needs_own_names:
        return
    names: dict[str, str] = {}
    for host, _ in job.hosts:
        own_name = job.machines.own_name(host.name)
        if (other := names.setdefault(own_name, host.name)) != host.name and own_name:
            what = f"{other} and {host.name} both call themselves {own_name}, by which {engine.title} tells hosts apart"
            cure = "give each a name of its own, as with `hostnamectl set-hostname`, or use MPICH: pip install mpich"
            raise MachineError(f"{what}; {cure}")
