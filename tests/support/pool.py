"""A pool of real ranks: `ringrun -np N python -m tests.support.pool SOCKET` waits for functions; each rank runs each.

A job takes seconds to start, a function in a job that is there milliseconds. Every rank has a Unix socket of its own to
the tests, gets a pickled function, runs it between init() and shutdown(), and sends back what it returned or
raised. A rank that dies, or a function that takes too long, ends that pool, and says in its error what the ranks did.
"""

import dataclasses
import gc
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import ringreduce as rr
from ringreduce.settings import PREFIX, Settings
from ringreduce.transport import pickling
from tests.support.jobs import ROOT
from tests.support.patience import patient

START_S = 60
END_S = 10
OF_OTHER_JOBS = ("OMPI_", "PMI", "RINGREDUCE", "HOROVOD")
"""How variables begin that a pool's job must not inherit."""


class RankError(Exception):
    """The cause of a rank's exception, where it is raised again: which rank, and the traceback there."""


class PoolEndedError(Exception):
    """A rank died, or a function took too long; the pool has ended."""


class Pool:
    """So many ranks of a job that `python` runs."""

    def __init__(self, python: Path, size: int) -> None:
        self.ended = False
        self._ringrun = str(python.parent / "ringrun")
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        self._output = Path(self._folder.name) / "output"
        path = f"{self._folder.name}/socket"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHER_JOBS)}
        with socket.socket(socket.AF_UNIX) as listener, self._output.open("w") as output:
            listener.bind(path)
            listener.listen(size)
            command = [self._ringrun, "-np", str(size), str(python), "-m", "tests.support.pool", path]
            self._job = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            self._ranks: dict[Connection, int] = {}
            listener.settimeout(0.2)
            self._accept(listener, size)

    def _accept(self, listener: socket.socket, size: int) -> None:
        deadline = time.monotonic() + patient(START_S)
        while len(self._ranks) < size:
            try:
                accepted = Connection(listener.accept()[0].detach())
                self._ranks[accepted] = accepted.recv()
            except TimeoutError:
                if self._job.poll() is not None or time.monotonic() > deadline:
                    self._fail("it did not start", [])

    def run(
        self,
        program: Callable[[], Any],
        *,
        settings: Settings | None = None,
        timeout_s: float = 20.0,
        process_sets: Sequence[Sequence[int]] = (),
    ) -> list[Any]:
        """What `program` returned, by rank; see `ringreduce.testing.run_ranks`, which raises alike."""
        settings = settings or Settings()
        if not settings.stall_abort_s:
            settings = dataclasses.replace(settings, stall_abort_s=patient(timeout_s))
        request = pickling.dumps((program, variables(settings), process_sets))
        results: dict[int, Any] = {}
        failures: list[tuple[BaseException, RankError]] = []
        deadline = time.monotonic() + 2 * patient(timeout_s)  # a stall is reported sooner
        try:
            for rank in self._ranks:
                rank.send_bytes(request)
            here = set(self._ranks)
            while here:
                ready = wait(here, max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._fail(f"its function took longer than {timeout_s} s", failures)
                for each in ready:
                    answer = each.recv()
                    if answer is None:  # it has left the world
                        here.remove(each)
                    elif answer[0]:
                        results[self._ranks[each]] = pickle.loads(answer[1])
                    else:
                        failures.append(failure(self._ranks[each], *answer[1:]))
        except (EOFError, ConnectionError):
            self._fail("a rank died", failures)
        if failures:
            first = next((each for each in failures if not isinstance(each[0], rr.PeerLostError)), failures[0])
            raise first[0] from first[1]
        return [results[rank] for rank in sorted(results)]

    def _fail(self, why: str, failures: Sequence[tuple[BaseException, RankError]]) -> NoReturn:
        """End the pool; raises PoolEndedError with all that is known."""
        stacks = ""
        if why == "a rank died":
            self._await_end()  # ringrun ends the others, and says which it was
        elif self._job.poll() is None:
            asked = [self._ringrun, "stacks", str(self._job.pid)]
            stacks = subprocess.run(asked, capture_output=True, text=True, timeout=patient(START_S)).stdout
        self._job.terminate()
        self._await_end()
        said = "".join(f"{each}\n" for _, each in failures)
        text = f"the pool of {self._job.args[2]} ranks has ended: {why}\n{said}{stacks}{self._output.read_text()}"
        self.close()
        raise PoolEndedError(text)

    def _await_end(self) -> None:
        try:
            self._job.wait(patient(END_S))
        except subprocess.TimeoutExpired:
            self._job.kill()
            self._job.wait()

    def close(self) -> None:
        """End the job, whose ranks exit when nobody is at the other end any more."""
        if not self.ended:
            self.ended = True
            for rank in self._ranks:
                rank.close()
            self._await_end()
            self._folder.cleanup()


def variables(settings: Settings) -> dict[str, str]:
    """The settings that are not the default's, as ranks read them."""
    default, chosen = dataclasses.asdict(Settings()), dataclasses.asdict(settings)
    return {PREFIX + name.upper(): str(value) for name, value in chosen.items() if value != default[name]}


def failure(rank: int, pickled: bytes | None, text: str) -> tuple[BaseException, RankError]:
    """A rank's exception, or one that stands for it, and its cause."""
    cause = RankError(f"on rank {rank}:\n{text}")
    return (pickle.loads(pickled) if pickled else cause), cause


def answer(request: bytes) -> tuple[Any, ...]:
    """Run what was asked for; what to send back."""
    before = dict(os.environ)
    try:
        program, chosen, process_sets = pickle.loads(request)
        os.environ.update(chosen)
        rr.init(process_sets=process_sets)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return True, pickling.dumps(program())
    except BaseException as exc:
        try:
            pickled = pickling.dumps(exc)
            pickle.loads(pickled)
        except Exception:
            pickled = None
        return False, pickled, traceback.format_exc()
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def serve(path: str) -> None:
    """A rank's life: one function after the other, until the tests have ended."""
    with Client(path, "AF_UNIX") as tests:
        tests.send(int(os.environ["RANK"]))
        modules = 0
        while True:
            try:
                request = tests.recv_bytes()
            except EOFError:
                return
            tests.send(answer(request))
            rr.shutdown()
            tests.send(None)
            if len(sys.modules) > modules:  # torch's 300,000 objects stay: no init() need look through them
                modules = len(sys.modules)
                gc.collect()
                gc.freeze()


if __name__ == "__main__":
    serve(sys.argv[1])
