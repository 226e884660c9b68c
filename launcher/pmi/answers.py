"""PMI-1, the server's half: what MPICH asks while it starts and ends, and what it is told."""

import itertools
from collections.abc import Callable, Sequence

_TOGETHER = {
    "init": "response_to_init pmi_version=1 pmi_subversion=1",
    "barrier_in": "barrier_out",
}
"""What all ranks ask before any is answered."""


class Answers:
    """Of one world, whose ranks are on `hosts`, by rank. Not to be called by two threads at once.

    name: of the world; MPICH names its shared memory by it, so it is to be no other world's of this host.
    """

    def __init__(self, name: str, hosts: Sequence[str]) -> None:
        self.has_started = False
        """All ranks have met once more after the first time: MPICH has what it needs of the others."""
        self._name, self._size = name, len(hosts)
        self._values = {"PMI_process_mapping": mapping(hosts)}
        self._waiting: dict[int, Callable[[str], None]] = {}
        self._meetings = 0

    def answer(self, rank: int, line: str, send: Callable[[str], None]) -> None:
        """Answer a line of a rank's MPI by `send`, now or when all ranks have asked the same."""
        asked = dict(word.partition("=")[::2] for word in line.split())
        command = asked.get("cmd", "")
        if command in _TOGETHER:
            self._waiting[rank] = send
            if len(self._waiting) == self._size:
                self._meetings += 1
                self.has_started = self._meetings > 1
                for each in self._waiting.values():
                    each(f"cmd={_TOGETHER[command]} rc=0\n")
                self._waiting.clear()
        else:
            send(f"cmd={self._alone(command, asked)}\n")

    def _alone(self, command: str, asked: dict[str, str]) -> str:
        match command:
            case "get_maxes":
                return "maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0"
            case "get_appnum":
                return "appnum appnum=0 rc=0"
            case "get_universe_size":
                return f"universe_size size={self._size} rc=0"
            case "get_my_kvsname":
                return f"my_kvsname kvsname={self._name} rc=0"
            case "put":
                self._values[asked.get("key", "")] = asked.get("value", "")
                return "put_result rc=0 msg=success"
            case "get":
                value = self._values.get(asked.get("key", ""))
                found = "rc=-1 msg=key_not_found value=unknown" if value is None else f"rc=0 msg=success value={value}"
                return f"get_result {found}"
            case "finalize":
                return "finalize_ack rc=0"
            case _:  # such as spawn
                return f"{command}_result rc=-1 msg=not_supported"


def mapping(hosts: Sequence[str]) -> str:
    """Which ranks share a host, as MPICH wants it: runs of (number of the host, 1 host, how many ranks).

    >>> mapping(["a", "a", "b", "a"])
    '(vector,(0,1,2),(1,1,1),(0,1,1))'
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    runs = itertools.groupby(numbers[host] for host in hosts)
    return f"(vector,{','.join(f'({number},1,{len(list(run))})' for number, run in runs)})"
