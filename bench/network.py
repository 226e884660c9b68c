"""Hosts on one machine: network namespaces on a bridge, each with a link of its own whose rate is shaped. Needs root.

    with Network(4) as network:
        network.shape(1000)
        found = network.run(["python", "script.py", "--json"], per_host=2)

All names carry a random tag, so that nothing else on the machine is met. When the block ends, in whatever way, the
processes inside are ended and everything that was made is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

AGENT = '#!/bin/bash\nhost=$1; shift\nexec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"\n'
INSIDE = 'hostname "$1"; shift; exec "$@"'
TCP_ONLY = {
    "pml": "ob1",
    "btl": "tcp,sm,self",  # shared memory within a host, as on a real one
    "btl_tcp_if_include": "eth0",
    "mpi_yield_when_idle": "1",  # else each host spins on the others' cores
    "osc": "^ucx",
}
NONE: Mapping[str, str] = types.MappingProxyType({})
BURST_S = 1e-3
SHORTEST_BURST = 64 << 10


def why_not() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, and making them needs root"
    for command, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            return f"the command {command} ({package}) is not on PATH"
    if "Open MPI" not in _version_of_mpirun():
        return f"mpirun of Open MPI 5 is not beside {sys.executable} nor on PATH"
    made = subprocess.run(["ip", "netns", "add", name := f"ringtry{uuid.uuid4().hex[:6]}"], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespace can be made here: {made.stderr.decode().strip()}" if made.returncode else ""


def _mpirun_path() -> str:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else "mpirun"


def _version_of_mpirun() -> str:
    try:
        return subprocess.run([_mpirun_path(), "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""


CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


class Network:
    """Some hosts on a bridge. Host k is called ring<k>-<tag> and has the address 10.77.0.<k + 1>."""

    def __init__(self, hosts: int) -> None:
        self.tag = uuid.uuid4().hex[:6]
        self.bridge = f"rrb{self.tag}"
        self.names = [f"ring{k}-{self.tag}" for k in range(hosts)]
        self.links = [f"rrv{k}-{self.tag}" for k in range(hosts)]
        self.addresses = [f"10.77.0.{k + 1}" for k in range(hosts)]
        self.folder = Path(tempfile.mkdtemp(prefix="ringbench-"))

    def __enter__(self) -> Network:
        self.before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through __exit__
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: types.TracebackType | None) -> None:
        self._remove()

    def shape(self, mbit: int, names: Sequence[str] = (), inbound: bool = False) -> None:
        """Give the outgoing links of all hosts, or of some, this rate; a burst of a millisecond passes unshaped.

        inbound: the incoming ones, too.
        """
        burst = max(SHORTEST_BURST, int(mbit * 1e6 / 8 * BURST_S))
        tbf = ["root", "tbf", "rate", f"{mbit}mbit", "burst", f"{burst}b", "latency", "50ms"]
        for name, link in zip(self.names, self.links, strict=True):
            if not names or name in names:
                _run(["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", *tbf])
                if inbound:
                    _run(["tc", "qdisc", "replace", "dev", link, *tbf])

    def shape_between(self, one: int, other: int, mbit: int, slow: int) -> None:
        """Give two hosts another rate to each other than to all the others."""
        for source, to in ((one, other), (other, one)):
            tc = ["ip", "netns", "exec", self.names[source], "tc"]
            _run([*tc, "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10"])
            for number, rate in ((10, mbit), (20, slow)):
                htb = ["htb", "rate", f"{rate}mbit", "burst", "64k", "quantum", "15000"]
                _run([*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", f"1:{number}", *htb])
            match = ["u32", "match", "ip", "dst", f"{self.addresses[to]}/32", "flowid", "1:20"]
            _run([*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "prio", "1", *match])

    def run(
        self, program: Sequence[str], per_host: int = 1, variables: Mapping[str, str] = NONE, timeout_s: float = 180
    ) -> dict[str, Any]:
        """What `program` writes as JSON to the file that it gets as its last argument; see `mpirun`."""
        result = self.folder / "result.json"
        command = self.mpirun([*program, str(result)], per_host, variables)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"the ranks ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def mpirun(self, program: Sequence[str], per_host: int, variables: Mapping[str, str] = NONE) -> list[str]:
        """The command that starts `program` on each host, `per_host` times, with further environment variables."""
        usual = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        usual |= {"RINGBENCH_ADDRESS": self.addresses[0], "GLOO_SOCKET_IFNAME": "eth0"}
        kept = [name for name in os.environ if name == "PYTHONPATH" or name.startswith("RINGREDUCE_")]
        variables = usual | {name: os.environ[name] for name in kept} | dict(variables)
        command = [_mpirun_path(), "--allow-run-as-root", "--bind-to", "none"]
        command += ["-np", str(per_host * len(self.names)), "-H", ",".join(f"{name}:{per_host}" for name in self.names)]
        command += ["--prtemca", "plm_ssh_agent", str(self.folder / "agent"), "--prtemca", "prte_if_include", "eth0"]
        command += [word for name, value in TCP_ONLY.items() for word in ("--mca", name, value)]
        command += [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
        inside = ["bash", "-c", INSIDE, "bash", self.names[0], *command, *program]
        return ["ip", "netns", "exec", self.names[0], "unshare", "--uts", *inside]

    def _make(self) -> None:
        agent = self.folder / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        _run(["ip", "link", "add", self.bridge, "type", "bridge"])
        _run(["ip", "link", "set", self.bridge, "up"])
        table = "".join(f"{each} {name}\n" for each, name in zip(self.addresses, self.names, strict=True))
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _run(["ip", "netns", "add", name])
            _run(["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name])
            _run(["ip", "link", "set", link, "master", self.bridge, "up"])
            _run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0"])
            for device in ("eth0", "lo"):
                _run(["ip", "-n", name, "link", "set", device, "up"])
            # controlled by losses, as Linux's default is: bbr, which some machines have, probes the shaped rate, and is
            # measured with everybody
            _run(["ip", "netns", "exec", name, "sh", "-c", f"echo reno > {CONGESTION_CONTROL}"])
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + table)

    def _remove(self) -> None:
        """Everything, whatever of it is there; a second Ctrl-C does not keep it from its end."""
        signal.signal(signal.SIGTERM, self.before)
        with _uninterrupted():
            for how in (signal.SIGTERM, signal.SIGKILL):
                if self._signal(how):
                    time.sleep(0.5)
            for name in self.names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
                shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
            for link in (*self.links, self.bridge):
                subprocess.run(["ip", "link", "del", link], capture_output=True)
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                Path("/etc/netns").rmdir()  # only if it is empty

    def _signal(self, how: signal.Signals) -> bool:
        """Send it to all that still runs inside these hosts; False when nothing does."""
        found = False
        for name in self.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in map(int, inside.split()):
                found = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
        return found


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
