"""Whether ranks stay on this host, which is as far as ringrun starts them."""

import socket
from collections.abc import Sequence

from ..errors import UsageError
from .host import Host

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_here(host: Host, own_name: str) -> bool:
    """Return whether this is the host called `own_name`: the names before the first dot count."""
    return host.name in LOOPBACK or host.name.partition(".")[0] == own_name.partition(".")[0]


def ranks_here(assigned: Sequence[tuple[Host, int]], why: str, own_name: str | None = None) -> int:
    """Return how many ranks there are, all on this host; UsageError if some go to others.

    why: where the hosts were named;  own_name: this host's, asked for by default.
    """
    own_name = own_name or socket.gethostname()
    others = [host.name for host, _ in assigned if not is_here(host, own_name)]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise UsageError(
            f"{why}: ranks would go to {', '.join(others[:3])}{more}, and ringrun starts ranks on this host "
            f"({own_name}) only; give -H localhost:N to stay here, or start the job with mpirun or srun"
        )
    return sum(count for _, count in assigned)
