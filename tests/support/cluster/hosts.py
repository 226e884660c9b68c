"""Hosts on one machine, as honest as Linux makes them. Needs root.

    with Hosts(4, folder) as hosts:
        hosts.run(0, ["ssh", "h3", "hostname"])

Each host is a set of namespaces: its own network (one link to a switch that only they are on), host name, processes,
IPC, /dev/shm, /run and /tmp; and a real sshd with a host key of its own. They share the file system otherwise, as the
hosts of a cluster do, and a home directory in `folder`, whose ~/.ssh lets root log in from each host to each, host keys
checked. Of /tmp they see their own, and in it only the directories that they are told to share.

Nothing of it has a name outside, and nothing outlives the process that made it, even one that is killed: each host's
first process ends when the pipe to it is closed, and the kernel then ends the others and takes the namespaces away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.support.cluster.keys import make_key, write_home
from tests.support.cluster.processes import Inside, child_of, inner_pid, processes_beside
from tests.support.patience import patient

Script = Callable[[str], Path]  # what the fixture `script` is
ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "cluster" / "programs"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
NEEDED = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
NEEDED |= {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}

NAMESPACES = ["--mount", "--uts", "--ipc", "--net", "--pid"]
UNTIL_CLOSED = "echo ready; while read -r; do :; done"
SWITCH = f"ip link add switch type bridge && ip link set switch up && {UNTIL_CLOSED}"
# The first process of a host. Arguments: the folder, the host's name, the directories in /tmp that stay visible.
# bash goes on as its init: it collects those whose parents are gone.
HOST = f"""
set -e
folder=$1 tmp=$1/$2/tmp
hostname "$2"; shift 2
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run; mkdir /run/sshd
mount --rbind /sys/fs/cgroup "$folder/cgroup"
mount -t sysfs sysfs /sys  # the devices of this network, not of the machine's
mount --rbind "$folder/cgroup" /sys/fs/cgroup; umount -l "$folder/cgroup"
for each; do mkdir -p "$tmp/${{each#/tmp/}}"; mount --bind "$each" "$tmp/${{each#/tmp/}}"; done
for each in "$folder"/etc/*; do mount --bind "$each" "/etc/${{each##*/}}"; done
mount --rbind "$tmp" /tmp
ip link set lo up
{UNTIL_CLOSED}
"""
SSHD_CONFIG = """\
HostKey {key}
PidFile /run/sshd.pid
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
AcceptEnv LANG LC_*
"""


def why_not(needed: Mapping[str, str] = NEEDED) -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, and making them needs root"
    for command, package in needed.items():
        if shutil.which(command, path=f"{os.environ.get('PATH', '')}:{PATH}") is None:
            return f"the command {command} is missing (Debian's package {package})"
    try_it = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "mount", "-t", "sysfs", "sysfs", "/sys"]
    tried = subprocess.run(try_it, capture_output=True, text=True)
    return f"a host's namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """Some hosts on one switch. Host k is called h<k> and has the address 10.77.0.<k + 1>."""

    def __init__(self, count: int, folder: Path, shared: Iterable[Path] = ()) -> None:
        self.names = [f"h{k}" for k in range(count)]
        self.addresses = [f"10.77.0.{k + 1}" for k in range(count)]
        self.files = folder
        self.folder = folder  # where programs start; tests that share hosts have one each
        self.home = folder / "home"
        self._shared = [folder, ROOT, Path(sys.prefix), Path(sys.base_prefix), *shared]
        self._shared += [Path(each) for each in os.environ.get("PYTHONPATH", "").split(":") if each]
        self._holders: list[subprocess.Popen[str]] = []
        self._started: list[Inside] = []
        self._inits: list[int] = []
        self._daemons: set[int] = set()
        self._switch = 0

    def __enter__(self) -> Hosts:
        try:
            self._write_files()
            self._switch = self._hold(["--net"], SWITCH)
            for k in range(len(self.names)):
                self._make_host(k)
                self.start_sshd(k)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.stdin.close()
        _collect(self._holders)
        _collect(self._started)

    def tidy_up(self) -> None:
        """End whatever a test has left running, and remove its files, for the next test."""
        for k in range(len(self.names)):
            self.kill_all(k)
            for path in self.left_behind(k):
                self.check(k, ["rm", "-r", path])
        _collect(self._started)

    def environment(self, **changes: str) -> dict[str, str]:
        """What a login on a host gives, and where Python finds the code that is tested."""
        variables = {"HOME": str(self.home), "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "PATH": PATH}
        variables |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        return variables | {"LANG": "C.UTF-8"} | changes

    def start(self, k: int, argv: Sequence[object], *, env: Mapping[str, str] | None = None, **options) -> Inside:
        """Start a program on host k, as a user of that host would, in `folder` and without stdin if not told otherwise.

        Its pid here is nsenter's; signals go to the program.
        """
        enter = ["nsenter", "--target", str(self._inits[k]), *NAMESPACES, "--"]
        # a shell starts what runs in its background deaf to SIGINT, these tests too
        chdir = ["env", "--default-signal=INT", "-C", str(options.pop("cwd", self.folder))]
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True} | options
        process = Inside([*enter, *chdir, *map(str, argv)], env=self.environment(**env or {}), **options)
        self._started.append(process)
        return process

    def run(
        self, k: int, argv: Sequence[object], *, timeout: float = 60, returncode: int | None = None, **options
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on host k to its end, as jobs.run; fail if that takes longer than the timeout."""
        process = self.start(k, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            process.kill()
            text = "".join(each.decode(errors="replace") for each in (late.stdout, late.stderr) if each)
            raise AssertionError(f"{argv} has not ended after {timeout} s:\n{text}") from None
        assert returncode in (None, process.returncode), f"ended with {process.returncode}:\n{out}\n{err}"
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def ringrun(self, python: Path, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
        """Run `ringrun ARGUMENTS` on host 0, with the ringrun beside `python`."""
        return self.run(0, [python.parent / "ringrun", *arguments], **options)

    def start_ringrun(self, python: Path, *arguments: object) -> Inside:
        """The same, left running."""
        command = [python.parent / "ringrun", *arguments]
        return self.start(0, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def check(self, k: int, argv: Sequence[object]) -> str:
        """Run a program on host k that must succeed; return its stdout."""
        done = self.run(k, argv)
        if done.returncode:
            raise RuntimeError(f"{argv} on {self.names[k]}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def processes(self, k: int) -> dict[int, str]:
        """The processes of host k but its init and its daemons: their pids as seen from outside, and command lines."""
        own = {self._inits[k], self._sshd(k), *self._daemons}
        return {pid: line for pid, line in processes_beside(self._inits[k]) if pid not in own}

    def only_ssh_sessions(self, k: int) -> bool:
        """Nothing runs on host k but what sshd waits for TCP with, which does not know that a link is down."""
        return all(line.startswith("sshd:") for line in self.processes(k).values())

    def count_as_daemons(self) -> None:
        """Whatever runs on the hosts now belongs there."""
        self._daemons |= {pid for k in range(len(self.names)) for pid in self.processes(k)}

    def path(self, k: int, path: str) -> Path:
        """What host k sees at `path`, as in path(1, "/dev/shm"), for this process to look at."""
        return Path(f"/proc/{self._inits[k]}/root{path}")

    def left_behind(self, k: int) -> list[str]:
        """The files in host k's own /dev/shm and /tmp."""
        shared = {str(Path(each).relative_to("/tmp").parts[0]) for each in self._shared_in_tmp()}
        found = [f"/tmp/{each.name}" for each in self.path(k, "/tmp").iterdir() if each.name not in shared]
        return found + [f"/dev/shm/{each.name}" for each in self.path(k, "/dev/shm").iterdir()]

    def kill_all(self, k: int) -> None:
        """Kill everything on host k but its init and its daemons."""
        while left := self.processes(k):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def wait_until_gone(self, *only: int, within_s: float = 5) -> float:
        """Wait until nothing more runs on these hosts (on all if none is named); return the seconds, or fail."""
        begin = time.monotonic()
        while left := {self.names[k]: found for k in only or range(len(self.names)) if (found := self.processes(k))}:
            assert time.monotonic() < begin + patient(within_s), f"after {within_s} s there is still: {left}"
            time.sleep(0.05)
        return time.monotonic() - begin

    def assert_nothing_is_left(self, within_s: float = 5) -> None:
        """No process, and no file in /dev/shm and /tmp."""
        self.wait_until_gone(within_s=within_s)
        left = {name: files for k, name in enumerate(self.names) if (files := self.left_behind(k))}
        assert not left, f"left behind: {left}"

    def rename(self, own: Mapping[int, str], aliases: Mapping[int, Sequence[str]] | None = None) -> None:
        """Let hosts call themselves otherwise than they are reached; or, too, be reached by other names."""
        for k, name in own.items():
            self.check(k, ["hostname", name])
        table, known = self.files / "etc" / "hosts", self.home / ".ssh" / "known_hosts"
        for k, names in (aliases or {}).items():
            key = (self.files / self.names[k] / "host_key.pub").read_text()
            table.write_text(f"{table.read_text()}{self.addresses[k]} {' '.join(names)}\n")
            known.write_text(f"{known.read_text()}{','.join(names)} {key}")

    def link_down(self, k: int) -> None:
        """Pull host k's cable out of the switch: nobody is told, packets just vanish."""
        self._at_switch("link", "set", self.names[k], "down")

    def link_up(self, k: int) -> None:
        """Plug it in again; that hosts had asked for each other's address in vain is forgotten."""
        self._at_switch("link", "set", self.names[k], "up")
        for host in range(len(self.names)):
            self.check(host, ["ip", "neigh", "flush", "dev", "eth0"])

    def shape(self, k: int, mbit: int) -> None:
        """Give host k's link this rate, both ways; a burst of 64 KiB passes unshaped."""
        rate = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
        for pid, device in ((self._inits[k], "eth0"), (self._switch, self.names[k])):
            _do(["nsenter", "-t", str(pid), "--net", "tc", "qdisc", "replace", "dev", device, *rate])

    def start_sshd(self, k: int) -> None:
        config = self.files / self.names[k] / "sshd_config"
        log = config.with_name("sshd.log")
        self.check(k, ["/usr/sbin/sshd", "-f", config, "-E", log])
        begin = time.monotonic()
        while not self._sshd(k):  # it forks, and only then listens and writes its pid
            assert time.monotonic() - begin < patient(10), log.read_text()
            time.sleep(0.01)

    def stop_sshd(self, k: int) -> None:
        """From now on host k refuses connections; those that are open stay."""
        os.kill(self._sshd(k), signal.SIGTERM)
        while self._sshd(k):
            time.sleep(0.01)

    def new_host_key(self, k: int) -> None:
        """Give host k another host key, as if it were set up anew or somebody else stood in its place."""
        self.stop_sshd(k)
        key = self.files / self.names[k] / "host_key"
        key.unlink()
        make_key(key)
        self.start_sshd(k)

    def _sshd(self, k: int) -> int:
        """The pid of the sshd that listens on host k, as seen from outside; 0 if there is none."""
        try:
            inner = int(self.path(k, "/run/sshd.pid").read_text())
        except (OSError, ValueError):
            return 0
        return next((pid for pid, _ in processes_beside(self._inits[k]) if inner_pid(pid) == inner), 0)

    def _write_files(self) -> None:
        etc = self.files / "etc"
        for each in (etc, self.files / "cgroup", *(self.files / name / "tmp" for name in self.names)):
            each.mkdir(parents=True)
        write_home(self.home, etc / "passwd")
        (etc / "resolv.conf").write_text("# nobody can be asked\n")
        table, known = "127.0.0.1 localhost\n::1 localhost\n", ""
        for name, address in zip(self.names, self.addresses, strict=True):
            key = self.files / name / "host_key"
            make_key(key)
            key.with_name("sshd_config").write_text(SSHD_CONFIG.format(key=key))
            known += f"{name},{address} {key.with_suffix('.pub').read_text()}"
            table += f"{address} {name}\n"
        (etc / "hosts").write_text(table)
        (self.home / ".ssh" / "known_hosts").write_text(known)

    def _shared_in_tmp(self) -> list[str]:
        """The shared directories in /tmp, without those that lie in others."""
        found = sorted({str(each) for each in self._shared if each.is_relative_to("/tmp")})
        return [each for each in found if not any(each.startswith(f"{other}/") for other in found)]

    def _make_host(self, k: int) -> None:
        unshare = [*NAMESPACES, "--fork", "--mount-proc", "--kill-child"]
        holder = self._hold(unshare, HOST, str(self.files), self.names[k], *self._shared_in_tmp())
        self._inits.append(child_of(holder))
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(self._inits[k])]
        self._at_switch("link", "add", self.names[k], *peer)
        self._at_switch("link", "set", self.names[k], "master", "switch", "up")
        self.check(k, ["ip", "addr", "add", f"{self.addresses[k]}/24", "dev", "eth0"])
        self.check(k, ["ip", "link", "set", "eth0", "up"])

    def _hold(self, namespaces: Sequence[str], script: str, *arguments: str) -> int:
        """Run a script in new namespaces that ends with UNTIL_CLOSED; return its holder's pid when it is ready."""
        command = ["unshare", *namespaces, "bash", "-c", script, "bash", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        holder = subprocess.Popen(command, env={"PATH": PATH, "LANG": "C.UTF-8"}, start_new_session=True, **pipes)
        self._holders.append(holder)
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"this has failed, and stderr tells why:\n{script}")
        return holder.pid

    def _at_switch(self, *words: str) -> None:
        _do(["nsenter", "-t", str(self._switch), "--net", "ip", *words])


def _collect(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for these to end."""
    while processes:
        process = processes.pop()
        process.wait()
        for stream in filter(None, (process.stdout, process.stderr, process.stdin)):
            stream.close()


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
