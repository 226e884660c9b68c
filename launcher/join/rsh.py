"""Stands in for ssh where nodes have joined: `rsh.py SOCKET HOST WORD …`, as an MPI's launcher calls it.

The hub (hub.py), which listens at SOCKET, gets this process's own stdin, stdout and stderr, and says how the command
has ended. Imports next to nothing: one of these is started for each node, all at the same time.
"""

import os
import socket
import sys


def main() -> int:
    """Return the command's exit code, or ssh's own, 255, if it was not run to its end."""
    path, host, *words = map(os.fsencode, sys.argv[1:])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hub:
        try:
            hub.connect(path)
            socket.send_fds(hub, [host + b"\0" + b" ".join(words)], [0, 1, 2])
            if answer := hub.recv(16):
                return int(answer)
            why: object = "the process that holds their connections gave no answer"
        except OSError as error:
            why = error
    print(f"the job's nodes cannot be reached: {why}", file=sys.stderr)
    return 255


if __name__ == "__main__":
    sys.exit(main())
