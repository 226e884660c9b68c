"""The agent: what mpirun starts as each rank. It starts the user's command, sends its output, reports its end.

    mpirun ── shim ── agent ── the command, leading its own process group

The process that mpirun starts only waits (the shim): when a rank calls MPI_Abort, hydra kills what it has
started at once, and the agent must outlive that to say which rank it was. The agent obeys ringrun alone, and goes
when ringrun goes. A command that ends is reported, and its agent stays until ringrun has heard from all ranks.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import IO, NoReturn

from .. import processes
from ..connection import wire
from ..connection.link import HostSilentError, Link, connect, is_listening
from ..engines import DAEMONS, ENGINES
from ..environment import RankInfo, Settings, error_file, rank_environment
from ..errors import MachineError
from ..folders import make_private_folder
from ..machine.cpus import usable_cpus
from ..machine.placement import Share, crowd, describe, place, threads_of
from ..machine.topology import Topology, read_topology
from ..text import counted, format_spans
from . import kept_commits
from .death_notice import await_death
from .join_watch import JoinWatch
from .master_port import MasterPort
from .oom import OomWatch
from .rank_socket import RankSocket
from .shm_cleanup import ShmCleanup, remove_daemons_files, remove_session_directory
from .stack_dumper import StackDumper

_CHUNK_BYTES = 1 << 16


class Agent:
    """One rank's agent, from its connection to ringrun until ringrun ends it."""

    def __init__(self, link: Link, rank_info: RankInfo, settings: Settings, daemon: int) -> None:
        """daemon: the process that started this agent's shim."""
        self._daemon = daemon
        self._since_s = time.time()
        self._link = link
        self._rank_info = rank_info
        self._settings = settings
        self._who = f"rank {rank_info.rank} of {rank_info.size} on host {socket.gethostname()}"
        # where the rank may leave files; on its own host ringrun removes them, if it can
        self._directory = settings.directory if link.is_local else make_private_folder()
        self._rank_socket = RankSocket(error_file(self._directory, rank_info.rank), self._pass_on)
        self._join_watch = JoinWatch()
        self._crowd = ""  # to be said once the rank joins others: the host has too few cores for its ranks
        self._dumper = StackDumper(self._directory, rank_info.rank, self._rank_socket, self._send)
        self._oom = OomWatch()
        self._shm_cleanup = ShmCleanup(self._directory, rank_info.rank)
        self._device = ""
        self._commits_folder = ""
        self._started_at_s = 0.0
        self._input: SimpleQueue[bytes] = SimpleQueue()
        self._taken = os.eventfd(0, os.EFD_CLOEXEC)  # counts the bytes that ringrun has taken
        self._ahead_bytes = 0  # of output, sent and not taken
        self._lost: Exception | None = None  # why the connection to ringrun ended without a message of its own
        self._sent: list[int] = []
        self._port: MasterPort | None = None  # of rank 0
        self._dying = threading.Lock()
        self._ended_at_s = 0.0  # set when it begins to die, if that is known
        self._exit: tuple[int, float] | None = None  # the code with which the script has ended, and when

    def run(self) -> NoReturn:
        """Run the command that ringrun sends to its end, and stay until ringrun says so."""
        self._port = MasterPort(self._settings.master_port) if self._rank_info.rank == 0 else None
        port = self._port.number if self._port else 0
        cpus = format_spans(usable_cpus())
        self._send(wire.Hello(*self._rank_info, socket.gethostname(), port, processes.boot(), cpus))
        setup = self._await_setup()
        processes.show_as([*sys.orig_argv, *setup.command])
        if self._rank_info.local_rank == 0:
            kept_commits.sweep()
        setup = setup._replace(commits=kept_commits.prepared(setup.commits))
        self._commits_folder = setup.commits
        self._started_at_s = time.time()
        try:
            child = self._start(setup)
        except OSError as error:
            self._send(wire.NotStarted(processes.why_not_started(error, setup.command[0])))
            self._await_end(None)
        self._send(wire.Started(child.pid, self._device))
        try:
            self._rank_socket.start(
                lambda mapped: self._on_init(child.pid, mapped), lambda *said: self._on_exit(child.pid, *said)
            )
            self._shm_cleanup.watch(child.pid)
            if self._rank_info.size > 1:
                self._join_watch.start(child.pid)
            ended = self._watch(child.pid)
            if child.stdin is not None:
                threading.Thread(target=self._feed, args=(child.stdin,), daemon=True).start()
            threading.Thread(target=self._await_end, args=(child.pid,), daemon=True).start()
        except RuntimeError as error:
            self._send(wire.NotStarted(f"{error}: too many processes run there (pids.max, ulimit -u)"))
            self._await_end(child.pid)
        self._forward(child, ended)

    def _await_setup(self) -> wire.Setup:
        """Return what ringrun says once all agents are there; end here if it gives up first."""
        while not isinstance(message := self._receive(), wire.Setup):
            if isinstance(message, wire.Signal):
                self._sent.append(message.number)
                self._send(wire.Ended(-message.number, time.time(), tuple(self._sent)))
            elif isinstance(message, wire.End):
                self._leave()
        return message.mapped(wire.native)

    def _start(self, setup: wire.Setup) -> "subprocess.Popen[bytes]":
        os.chdir(setup.folder)
        topology = read_topology({**os.environ, **setup.variables})
        share = self._share(topology)
        binds, masks = self._settings.bind, self._settings.mask_gpus
        threads = threads_of(share, topology, self._rank_info.local_size, bound=binds)
        only_gpu = share.gpu.name if masks and share.gpu else None
        self._device = f"GPU {share.gpu.name}" if share.gpu else ""
        placed_gpu = share.gpu.bus_id if share.gpu else ""
        gpus = only_gpu, placed_gpu
        environment = rank_environment(self._rank_info, setup, self._directory, os.environ, threads, *gpus)
        environment |= self._shm_cleanup.variables(ENGINES[self._settings.engine], environment)
        if self._port:
            self._port.release()
        return subprocess.Popen(
            setup.command,
            env=environment,
            stdin=self._stdin(setup),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # MPICH's rank speaks to hydra through an inherited descriptor, PMI_FD
            start_new_session=True,
            # safe: no thread runs yet
            preexec_fn=processes.before_exec(
                processes.die_with_parent(signal.SIGKILL),
                processes.bind_to(share.cpus) if binds else None,
                processes.limit_open_files(setup.open_files),
            ),
        )

    def _share(self, topology: Topology) -> Share:
        """Return what the rank gets of its host; the first rank there reports what all get."""
        shares = place(topology, self._rank_info.local_size)
        if self._rank_info.local_rank == 0:
            for text in _notes(shares, self._rank_info, self._settings, len(topology.gpus)):
                self._send(wire.Note(text))
            self._crowd = crowd(topology, self._rank_info.local_size, socket.gethostname(), _noun(self._rank_info))
        return shares[self._rank_info.local_rank]

    def _stdin(self, setup: wire.Setup) -> int:
        """Return what the command reads: one rank ringrun's stdin, or from another host a pipe with it."""
        if not setup.gives_stdin:
            return subprocess.DEVNULL
        return self._link.receive_descriptor() if self._link.is_local else subprocess.PIPE

    def _feed(self, stdin: IO[bytes]) -> None:
        """Write what ringrun reads to the command, asking for a piece at a time."""
        with contextlib.suppress(OSError), stdin:  # the command may have closed it, or ended
            while True:
                self._send(wire.InputWanted())
                if not (data := self._input.get()):
                    return
                stdin.write(data)
                stdin.flush()

    def _forward(self, child: "subprocess.Popen[bytes]", child_ended: int) -> NoReturn:
        """Send what the child writes; report once it has ended and its pipes are empty; go on for its own children."""
        assert child.stdout is not None
        assert child.stderr is not None
        streams: dict[int, wire.StreamName] = {child.stdout.fileno(): "stdout", child.stderr.fileno(): "stderr"}
        waiting_for_end = [child_ended]
        while True:
            may_send = self._ahead_bytes < wire.MOST_AHEAD_BYTES
            ready, _, _ = select.select([self._taken, *waiting_for_end, *(streams if may_send else ())], [], [])
            if self._taken in ready:
                self._ahead_bytes -= os.eventfd_read(self._taken)
            if child_ended in ready:
                waiting_for_end = []
                for descriptor, stream in streams.items():
                    self._drain(descriptor, stream)
                self._report(child.pid)
                continue
            for descriptor in streams.keys() & set(ready):
                if not self._pump(descriptor, streams[descriptor]):
                    del streams[descriptor]

    def _drain(self, descriptor: int, stream: wire.StreamName) -> None:
        """Send what is in a pipe now: what the child itself wrote came before its end, its own children may go on."""
        (left,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
        while left > 0 and (sent := self._pump(descriptor, stream)):
            left -= sent

    def _pump(self, descriptor: int, stream: wire.StreamName) -> int:
        data = os.read(descriptor, _CHUNK_BYTES)
        if data:
            self._ahead_bytes += len(data)
            self._send(wire.Output(stream, data))
        return len(data)

    def _on_init(self, pid: int, mapped: Sequence[str]) -> None:
        """ringreduce has started MPI, with these lines of /proc/PID/maps."""
        self._shm_cleanup.note(mapped)

        def watch() -> None:
            code = await_death(error_file(self._directory, self._rank_info.rank), pid)
            if code is not None:
                self._died(code)

        with contextlib.suppress(RuntimeError):  # then its end is heard of by its parent, a little later
            threading.Thread(target=watch, daemon=True).start()

    def _pass_on(self, report: wire.Report) -> None:
        """Send what the rank says; its first process may not know that another one has joined other ranks."""
        joins = isinstance(report, wire.InInit | wire.Initialized | wire.Grouped)
        self._join_watch.is_known |= joins
        if joins and self._crowd:
            self._send(wire.Note(self._crowd))
            self._crowd = ""
        if not (isinstance(report, wire.Alone) and self._join_watch.may_have_joined and not report.in_vain):
            self._send(report)

    def _on_exit(self, child: int, pid: int, code: int) -> None:
        """The script has ended with `code`, if it is that of `child`, the rank's first process.

        Others of its processes may fail without it.
        """
        if pid == child and not self._exit:
            self._exit = code, time.time()
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._end_late, args=(child, code), daemon=True).start()

    def _end_late(self, child: int, code: int) -> None:
        """End the rank if it does not: other ranks, which need it, hear of its failure when it has ended."""
        time.sleep(self._settings.exit_s)
        if not self._ended_at_s:
            late = f"still runs {self._settings.exit_s:g} s after its script ended with exit code {code}"
            why = "it may be waiting for a thread, a child process or an atexit function"
            self._send(wire.Note(f"ringrun: {self._who} {late}, and is killed; {why} (--grace allows more time)"))
            processes.signal_group(child, signal.SIGKILL)

    def _died(self, code: int) -> None:
        """Report that the rank dies or has ended, once: others of an elastic job wait for this alone."""
        with self._dying:
            if not self._ended_at_s:
                self._ended_at_s = time.time()
                self._rank_socket.read()  # what it said came before its end
                self._send(wire.Died(self._exit[0] if code and self._exit else code, self._ended_at_s))

    def _watch(self, pid: int) -> int:
        """Return a descriptor that becomes readable when process `pid` has ended."""
        ended, end = os.pipe()

        def watch() -> None:
            # not reaped, so that the number stays its own for as long as signals may be sent to its group
            while (result := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and result.si_pid != pid:
                os.waitpid(result.si_pid, 0)  # an orphan of its, which nobody else waits for
            self._died(_code(result))
            os.close(end)

        threading.Thread(target=watch, daemon=True).start()
        return ended

    def _report(self, pid: int) -> None:
        code = _code(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT))
        ended_at_s = self._ended_at_s
        if code and self._exit:
            code, ended_at_s = self._exit  # what the script ended with, before MPI or a signal did
        error = _read_error(self._directory, self._rank_info.rank)
        oom = self._oom.verdict(code, [pid, *self._dumper.pids()])
        ran_s = self._ended_at_s - self._started_at_s
        self._send(wire.Ended(code, ended_at_s, tuple(self._sent), error, ran_s, oom))

    def _await_end(self, pid: int | None) -> NoReturn:
        """Do what ringrun says until it says End, or is gone; then leave nothing behind, nor when that fails."""
        try:
            self._handle_messages(pid)
        except Exception as error:  # as without free descriptors: nobody else would end the rank
            self._send(wire.Note(f"ringrun: {self._who} was ended because its agent failed: {error!r}"))
            if pid is not None:
                processes.signal_group(pid, signal.SIGKILL)
            self._leave()  # the shim kills what is left

    def _handle_messages(self, pid: int | None) -> NoReturn:
        while not isinstance(message := self._receive(), wire.End):
            if isinstance(message, wire.Input):
                self._input.put(message.data)
            elif isinstance(message, wire.Taken):
                os.eventfd_write(self._taken, message.nbytes)
            elif pid is not None:
                self._handle(message, pid)
        if pid is not None:
            self._shm_cleanup.look(pid)
            processes.signal_group(pid, signal.SIGKILL)
            processes.kill_descendants()  # those that have left its group, too
        self._shm_cleanup.remove()
        if pid is not None and self._lost:
            self._log_loss(self._lost)
        if message.keeps_commits:
            kept_commits.keep(self._commits_folder, is_locked=self._link.is_local)
        elif self._lost:  # perhaps it alone is cut off
            kept_commits.remove_if_last(self._commits_folder)
        else:
            kept_commits.remove(self._commits_folder)
        self._leave()

    def _handle(self, message: wire.Message, pid: int) -> None:
        """Do what ringrun asks while the rank, whose first process is `pid`, may still run."""
        if isinstance(message, wire.Signal) and message.forwarded:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, message.number)
        elif isinstance(message, wire.Signal):
            self._sent.append(message.number)
            self._shm_cleanup.look(pid)
            processes.signal_group(pid, message.number)
        elif isinstance(message, wire.WakeUp) and (stopped := processes.wake_up(pid)):
            why = "was stopped while the others waited for it to end; it has been continued"
            self._send(wire.Note(f"ringrun: {self._who}, pid {stopped[0]}, {why}"))
        elif isinstance(message, wire.Membership | wire.Hosts | wire.Record):
            self._rank_socket.notify(message)
        elif isinstance(message, wire.Ask):
            try:  # in a thread: a signal must not wait for the answer
                threading.Thread(target=self._dumper.answer, args=(message.number, pid), daemon=True).start()
            except RuntimeError as error:  # as where the rank has started all the processes that there may be
                self._send(wire.Answer(message.number, "", "", f"its agent cannot ask it: {error}"))
            self._shm_cleanup.look(pid)

    def _leave(self) -> NoReturn:
        if self._port:
            self._port.close()
        if not self._link.is_local or (self._lost and not is_listening(self._directory)):  # others there may need it
            shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            remove_daemons_files(self._daemon, self._since_s)
        if isinstance(self._lost, HostSilentError):  # the MPI's daemon here may wait for it for many minutes
            processes.end_daemon(self._daemon, DAEMONS)
        remove_session_directory(self._daemon, os.environ)
        os._exit(0)

    def _log_loss(self, error: Exception) -> None:
        """Tell the system's log why the rank has ended: whoever else would tell is gone."""
        import syslog

        silent = f"its host has not answered for {self._link.lost_after_s:g} s (--lost-after)"
        why = silent if isinstance(error, HostSilentError) else str(error) or "it ended without a message"
        lost = f"the connection to ringrun on host {self._settings.address.host} is lost; {why}"
        syslog.openlog("ringrun")
        syslog.syslog(syslog.LOG_ERR, f"{self._who} was ended: {lost}")

    def _receive(self) -> wire.Message:
        """Return what ringrun says; End when it is gone, or is not the one that speaks."""
        try:
            return self._link.receive()
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, ValueError):  # ringrun is there, and hears of no other reason
                self._send(wire.Note(f"ringrun: {self._who} was ended: {error}"))
            self._lost = error
            return wire.End()

    def _send(self, message: wire.Message) -> None:
        with contextlib.suppress(OSError):  # ringrun is gone; _await_end sees it too, and exits
            self._link.send(message)


def _notes(shares: Sequence[Share], where: RankInfo, settings: Settings, gpus: int) -> Iterator[str]:
    """Yield what is worth telling about the shares of all ranks of this host, which has so many `gpus`."""
    host, has_gpus = socket.gethostname(), shares[0].gpu is not None
    masks = settings.mask_gpus and has_gpus
    if settings.mask_gpus and not has_gpus:
        yield f"ringrun: --mask-gpus: {host} has no NVIDIA GPU that its ranks may use"
    noun = _noun(where)
    shown = (settings.bind or masks) and (settings.verbose or has_gpus)
    line = describe(shares, host, bound=settings.bind, noun=noun) if shown else f"ringrun: {host}"
    if (idle := gpus - len(shares)) > 0:
        cure = "to run a rank on each, raise -np, or Slurm's --ntasks-per-node"
        yield f"{line}; {idle} of {counted(gpus, 'GPU')} idle: {cure}"
    elif shown:
        yield line


def _noun(where: RankInfo) -> str:
    """Return what the ranks of this host are called, whose numbers are those of ranks where there is no other host."""
    return "rank" if where.size == where.local_size else "local rank"


def _code(result: "os.waitid_result | None") -> int:
    """Return the exit code of a process that has ended, or minus the signal that ended it."""
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _read_error(directory: str, rank: int) -> wire.RankError | None:
    try:
        return wire.rank_error(json.loads(error_file(directory, rank).read_text(errors="replace")))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _detach() -> None:
    """Fork: the parent waits as the shim, the child goes on as the agent, out of mpirun's reach.

    The shim kills what an agent leaves that is killed itself. When an MPI's launcher ends it, an agent that is stopped
    (SIGSTOP) goes on, so that it can see what ringrun has said, or that it is gone.
    """
    processes.adopt_orphans()
    agent = os.fork()
    if agent:
        signal.signal(signal.SIGTERM, partial(_end_shim, agent))
        _, status = os.waitpid(agent, 0)
        processes.kill_descendants()
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.setsid()
    processes.adopt_orphans()


def _end_shim(agent: int, number: int, _: object) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGCONT)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def main() -> NoReturn:
    """Run as `python -m ringrun.agent`, started by ringrun through mpirun."""
    try:
        authkey = bytes.fromhex(os.environ[wire.AUTHKEY_VARIABLE])
        settings = Settings.from_environment(os.environ)
        rank = ENGINES[settings.engine].rank_info(os.environ)
    except (KeyError, ValueError, TypeError) as error:
        sys.exit(f"ringrun.agent is started by ringrun, not by hand: {error!r}")
    daemon = os.getppid()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # sent to all of a job, as by scancel: they are for the rank
        signal.signal(number, lambda *_: None)
    _detach()
    # Slurm sends it to all processes of a job that is cancelled; the rank ends by it, and the agent cleans up after it
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        link = connect(settings.address, authkey)
    except (OSError, EOFError) as error:
        sys.exit(
            f"rank {rank.rank} on {socket.gethostname()} cannot reach ringrun on {settings.address.host}: {error}; "
            "name a network that all hosts share with --network-interfaces, and let its firewall pass TCP between them"
        )
    try:
        agent = Agent(link, rank, settings, daemon)
    except (OSError, MachineError) as error:
        sys.exit(f"rank {rank.rank} on {socket.gethostname()} cannot start: {error}")
    with open(os.devnull, "w") as null:
        for pipe in (1, 2):  # mpirun's, which waits for their ends before it exits
            os.dup2(null.fileno(), pipe)
    agent.run()
