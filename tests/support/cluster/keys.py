"""The keys that hosts and users of a test have, and the home directory of root there."""

import shutil
import subprocess
from pathlib import Path


def make_key(path: Path) -> None:
    """Make a key pair without a passphrase: `path` and `path`.pub."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True)


def write_home(home: Path, passwd: Path) -> None:
    """Make a home directory for root, whose ~/.ssh has a key that lets root in, and an /etc/passwd that names it.

    ssh and sshd look for ~/.ssh where /etc/passwd says, not in $HOME.
    """
    key = home / ".ssh" / "id_ed25519"
    key.parent.mkdir(parents=True, mode=0o700)
    make_key(key)
    shutil.copy(key.with_suffix(".pub"), key.with_name("authorized_keys"))
    lines = Path("/etc/passwd").read_text().splitlines(keepends=True)
    passwd.write_text("".join(_with_home(line, home) for line in lines))


def _with_home(line: str, home: Path) -> str:
    fields = line.split(":")
    return ":".join([*fields[:5], str(home), *fields[6:]]) if fields[0] == "root" else line
