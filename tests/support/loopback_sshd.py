"""A real OpenSSH server on a loopback port, with keys and a configuration of its own below a folder."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ringrun.agent.master_port import free_port
from tests.support.patience import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def why_not() -> str:
    """Return why there can be no server here, nothing if there can."""
    if not SSHD or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
        return "OpenSSH is not installed (openssh-server, openssh-client)"
    return "" if os.geteuid() == 0 else "sshd needs root"


@dataclass(frozen=True)
class Server:
    folder: Path
    port: int

    def aliases(self) -> str:
        """h1, h2 and h3: names for ssh that are not this host's to ringrun, and loopback all the same."""
        names = ("h1", "h2", "h3")
        hosts = (f"Host {name}\n HostName 127.0.0.1\n HostKeyAlias [{name}]:{self.port}" for name in names)
        return "\n".join([*hosts, "Host *"])

    def config(self, *lines: str, name: str = "config", user_key: str = "user", known: str = "known") -> list[str]:
        """Write a client's configuration, which knows nothing but this test's, and return the argv that uses it."""
        path = self.folder / name
        text = [
            *lines,
            "BatchMode yes",
            "ConnectTimeout 5",
            "LogLevel ERROR",
            f"Port {self.port}",
            f"IdentityFile {self.folder / user_key}",
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f"UserKnownHostsFile {self.folder / known}",
            "GlobalKnownHostsFile none",
        ]
        path.write_text("\n".join(text) + "\n")
        return ["ssh", "-F", str(path)]


@contextmanager
def sshd(folder: Path, *lines: str) -> Iterator[Server]:
    """Run a server that lets `folder`/user in, and whose key is in `folder`/known, not in `folder`/unknown."""
    for name in ("host", "another_host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    _write_known_hosts(folder, "known", port, "host")
    _write_known_hosts(folder, "changed", port, "another_host")
    (folder / "unknown").write_text("")
    config = folder / "sshd_config"
    config.write_text(
        "\n".join(
            [
                *lines,
                f"Port {port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {folder / 'host'}",
                f"AuthorizedKeysFile {folder / 'user.pub'}",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "UsePAM no",
                "StrictModes no",
                "PidFile none",
                "MaxStartups 100",
                f"SetEnv HOME={folder}",  # this user's own start-up files of the shell may write
                "",
            ]
        )
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _is_taken(port), 20)
        yield Server(folder, port)
    finally:
        process.terminate()
        process.wait()


def _write_known_hosts(folder: Path, name: str, port: int, key: str) -> None:
    kind, text = (folder / f"{key}.pub").read_text().split()[:2]
    names = [f"[{host}]:{port}" for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3", "h1", "h2", "h3")]
    (folder / name).write_text(f"{','.join(names)} {kind} {text}\n")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
