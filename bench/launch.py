"""What it costs to start and end a job, by its number of ranks, each of which runs `true`.

    python bench/launch.py                                          # 8, 64 and 512 ranks: about a minute
    python bench/launch.py --who connections --ranks 512 4096       # ringrun's own part, without processes

Rows, in turns:

    processes       so many processes of one that starts them all and waits for them: the floor
    mpirun          mpirun, without ringrun; the larger jobs are left out, as in the next row
    ringrun         ringrun, with that mpirun: of each rank an agent, which is a Python, and its command
    forked agents   ringrun, whose agents no MPI starts: forked off one Python
    connections     what ringrun does itself: so many agents in one process, without commands, that connect over TCP all
                    at once, start, print a line, and end

Columns: time of the whole job (median of some runs), and of a rank; processor time, of all its processes, and of
`connections` of ringrun alone; the most threads and descriptors of ringrun; `#wrong`: ranks that did not do it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Column, Report, beside, flag, main

from ringrun.connection.link import introduce
from ringrun.connection.listener import Listener
from ringrun.connection.wire import End, Ended, Hello, Output, Setup, Started
from ringrun.job.plan import Job
from ringrun.job.ranks import Agents, RankSetup
from ringrun.job.supervise import Supervisor
from ringrun.output.display import Output as Printer
from ringrun.processes import raise_open_files

FORKING = Path(__file__).parents[1] / "tests" / "support" / "without_mpi.py"
MOST_OF_MPIRUN = 64  # ranks: each is an agent of its own, which computes for a tenth of a second until it is there
TIMEOUT_S = 300
COLUMNS = (
    Column("ranks", "ranks", "", 6, "d"),
    Column("who", "  who", width=16, left=True),
    Column("time_ms", "time", "ms", 9, ".0f"),
    Column("rank_us", "a rank", "us", 9, ".0f"),
    Column("cpu_ms", "processor", "ms", 11, ".0f"),
    Column("threads", "threads", "", 9, "d"),
    Column("descriptors", "descriptors", "", 13, "d"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def processes(size: int) -> dict[str, Any]:
    """So many of `true`."""
    code = "import subprocess, sys\nall_ = [subprocess.Popen(['true']) for _ in range(int(sys.argv[1]))]\n"
    return _command([sys.executable, "-c", code + "sys.exit(any(each.wait() for each in all_))", str(size)], size)


def mpirun(size: int) -> dict[str, Any]:
    """The MPI's own launcher."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-np", str(size)]
    return _command([beside("mpirun"), *root, *options, "true"], size)


def ringrun(size: int) -> dict[str, Any]:
    """As its users start it."""
    return _command([beside("ringrun"), "-np", str(size), "true"], size)


def forked_agents(size: int) -> dict[str, Any]:
    """Without an MPI."""
    return _command([sys.executable, str(FORKING), "-np", str(size), "true"], size)


def _command(argv: list[str], size: int) -> dict[str, Any]:
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S)
    took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"s": took_s, "cpu_s": _processor_s(before, after), "wrong": size if done.returncode or done.stderr else 0}


def _processor_s(before: resource.struct_rusage, after: resource.struct_rusage) -> float:
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def connections(size: int) -> dict[str, Any]:
    """The supervisor of a job and its connections; the agents are this process's child."""
    raise_open_files(2 * size + 64, size + 64)
    with tempfile.TemporaryDirectory(prefix="ringrun-") as folder, open(os.devnull, "wb") as nowhere:
        listener = Listener(folder, ["127.0.0.1"], size)
        began_s = time.perf_counter()
        child = os.fork()
        if not child:
            _exit_with(lambda: _be_agents(listener, size))
        printed = _Counting(size, {}, stdout=nowhere.fileno())
        events: Any = queue.SimpleQueue()
        job = Job(size, ["true"])
        agents = _Watched(listener, job, RankSetup(remote={"NAME": "value" * 1000}), printed, events)
        mpirun = SimpleNamespace(name="mpirun", code=0, tail=[], end=lambda steps: os.waitpid(child, 0))
        agents.start()
        before = resource.getrusage(resource.RUSAGE_SELF)
        code = Supervisor(job, mpirun, agents, printed, events).run()  # type: ignore[arg-type]
        took_s = time.perf_counter() - began_s
        cpu_s = _processor_s(before, resource.getrusage(resource.RUSAGE_SELF))
    found = {"s": took_s, "cpu_s": cpu_s, "threads": agents.threads, "descriptors": agents.descriptors}
    return {**found, "wrong": size if code else size - printed.lines}


class _Watched(Agents):
    threads = descriptors = 0

    def start(self) -> None:
        """Take connections."""
        self._others = threading.active_count() - 1  # an earlier run's, which prints until this process ends
        super().start()

    def set_up(self) -> None:
        """Let the agents begin, when all are connected."""
        self.descriptors = len(os.listdir("/proc/self/fd"))
        super().set_up()

    def close(self) -> None:
        """Stop listening."""
        self.threads = threading.active_count() - self._others
        super().close()


class _Counting(Printer):
    lines = 0

    def write(self, rank: int, name: Any, lines: Any, frame: bytes = b"") -> None:
        """Print and count."""
        self.lines += len(lines)
        super().write(rank, name, lines, frame)


def _be_agents(listener: Listener, size: int) -> None:
    address = ("127.0.0.1", listener.address.port)
    links = [introduce(sock, listener.authkey, TIMEOUT_S) for sock in _sockets(address, size)]
    for rank, link in enumerate(links):
        link.send(Hello(rank, size, rank, size, socket.gethostname(), 2345))
    for rank, link in enumerate(links):
        assert isinstance(link.receive(), Setup)
        link.send(Started(rank + 1))
        link.send(Output("stdout", b"epoch 1\n"))
        link.send(Ended(0, 1.0))
    for link in links:
        assert isinstance(link.receive(), End)


def _sockets(address: tuple[str, int], size: int) -> list[Any]:
    import socket

    return [socket.create_connection(address, timeout=TIMEOUT_S) for _ in range(size)]


def _exit_with(work: Callable[[], None]) -> None:
    with contextlib.suppress(BaseException):
        work()
        os._exit(0)
    os._exit(1)


WHO: dict[str, Callable[[int], dict[str, Any]]] = {
    "processes": processes,
    "mpirun": mpirun,
    "ringrun": ringrun,
    "forked agents": forked_agents,
    "connections": connections,
}


def bench(options: argparse.Namespace, report: Report) -> None:
    """Size by size."""
    for size in options.ranks:
        names = [name for name in options.who if size <= MOST_OF_MPIRUN or name not in ("mpirun", "ringrun")]
        runs = [{name: WHO[name](size) for name in names} for _ in range(options.runs)]
        for name in names:
            found = [run[name] for run in runs]
            took_s, cpu_s = (statistics.median(each[key] for each in found) for key in ("s", "cpu_s"))
            row = {"ranks": size, "who": f"  {name}", "time_ms": took_s * 1e3, "rank_us": took_s * 1e6 / size}
            most = {key: max(each[key] for each in found) for key in found[0] if key in ("threads", "descriptors")}
            row["runs_us"] = [round(each["s"] * 1e6) for each in found]
            report.add({**row, "cpu_ms": cpu_s * 1e3, **most, "wrong": sum(each["wrong"] for each in found)})


if __name__ == "__main__":
    ranks = flag("--ranks", [8, 64, 512], [4], metavar="N", help="(8 64 512)")
    who = flag("--who", list(WHO), choices=WHO, help="rows (all)")
    main("launch", __doc__, COLUMNS, bench, [ranks, who], runs=3, note="median of {runs} runs, the rows in turns")
