"""A real Slurm on test hosts: a munged and a slurmd on each, slurmctld on the first. All end with their hosts."""

import os
import time

from tests.support.cluster.hosts import NEEDED, Hosts
from tests.support.patience import patient

SLURM_NEEDED = NEEDED | {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
READY_WITHIN_S = 30
CONFIG = """\
ClusterName=test
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName={nodes} CPUs={cpus} Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def start_slurm(hosts: Hosts, cpus: int = 2) -> None:
    """Start it on all these hosts, each with so many CPUs, whatever it has, and wait until they are idle."""
    folder = hosts.files / "slurm"
    (folder / "etc").mkdir(parents=True)
    (folder / "state").mkdir()
    config = CONFIG.format(folder=folder, nodes=",".join(hosts.names), cpus=cpus)
    (folder / "etc" / "slurm.conf").write_text(config)
    (folder / "etc" / "gres.conf").write_text("Name=gpu File=/dev/null\n")  # to ask for; it is none
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    numbers = range(len(hosts.names))
    munge = ["--log-file", "/run/munge/log", "--pid-file", "/run/munge/pid", "--seed-file", "/run/munge/seed"]
    for k in numbers:
        hosts.check(k, ["mount", "--bind", folder / "etc", "/etc/slurm"])
        hosts.path(k, "/run/munge").mkdir(mode=0o755)
        hosts.check(k, ["munged", "--key-file", key, *munge])
    hosts.check(0, ["slurmctld"])
    for k in numbers:
        hosts.check(k, ["slurmd", "-N", hosts.names[k]])
    wait_until_idle(hosts)
    hosts.count_as_daemons()


def wait_until_idle(hosts: Hosts) -> None:
    """Wait until no job has anything of the nodes any more."""
    begin = time.monotonic()
    while True:
        answer = hosts.run(0, ["sinfo", "-h", "-N", "-o", "%N %T"])
        if answer.stdout.split() == [word for name in hosts.names for word in (name, "idle")]:
            return
        if time.monotonic() - begin > patient(READY_WITHIN_S):
            logs = "".join(f"{log}:\n{log.read_text()}" for log in (hosts.files / "slurm").glob("*.log"))
            raise RuntimeError(f"Slurm is not ready after {READY_WITHIN_S} s: {answer}\n{logs}")
        time.sleep(0.1)
