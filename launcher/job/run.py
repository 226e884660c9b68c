"""Runs a job: everything around the supervisor is made here, and cleared away again, for each attempt."""

import contextlib
import os
import queue
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..agent import kept_commits
from ..agent.shm_cleanup import remove_folders
from ..connection.listener import Listener
from ..engines.detect import Detected
from ..environment import EXIT_S, Settings
from ..errors import LauncherError, MachineError, NotStartedError
from ..folders import current_folder, private_folder
from ..hosts import Host, is_here
from ..network import own_addresses
from ..output.display import Display, Output
from ..output.files import OutputFiles
from ..processes import raise_open_files
from ..run_report import Collector, Metrics, Writer
from . import plan, restarts
from .control_socket import ControlSocket
from .departures import Departures
from .events import Events
from .growth import Blacklist, Growth, HostWatch, InUse
from .misplaced import require_own_names
from .mpirun import MpiLauncher
from .plan import Job
from .ranks import Agents, RankSetup
from .restarts import Ending, Reallocate, SignalRelay
from .supervise import Supervisor

_OWN_FILES = 24  # ringrun's own, and a few questions of `ringrun stacks` and `ringrun top`
_PATIENCE_S = 1.0  # with a reader that pauses, once the job is to end
_REMOVAL_S = 5.0  # for a host that may be lost
_MPIRUNS_FILES = 6  # a rank: pipes and sockets of the launcher that starts it


def run_job(
    detected: Detected, job: Job, reallocate: Reallocate = lambda job, _: job, growth: Growth | None = None
) -> int:
    """Run a job to its end, again after a failure if it says so, and return ringrun's exit code.

    reallocate: the job on the known hosts that answer, see restarts.py; by default they are those that it had.
    growth:     of an elastic job whose hosts may come and go.
    """
    growth = growth or Growth(tuple, tuple, Blacklist(None), job.size)
    asked = job = replace(job, open_files=_raise_open_files(job, job.size))
    if job.elastic and (job.restarts or job.elastic.takes_hosts):
        job = replace(job, commits_folder=kept_commits.prepared(kept_commits.new_name()))
    signals = SignalRelay()
    with contextlib.ExitStack() as stack:
        kept_on: set[str] = set()
        stack.callback(_remove_commits, job, kept_on)
        files = None
        if job.output_directory is not None:  # one set for all attempts, so that each goes on where the last has ended
            most = growth.most if growth.most < sys.maxsize else 0
            files = OutputFiles(job.output_directory, job.size, most, appends=job.appends)
            stack.enter_context(contextlib.closing(files))
        display = Display(job.shown, fold=job.fold, time=job.timestamps)
        output = Output(job.size, os.environ, display=display, files=files)

        def say(text: str) -> None:
            output.message([text])

        collector, writer = Collector(job.command), None
        metrics = stack.enter_context(contextlib.closing(Metrics(job.metrics, collector)))
        if job.report_directory is not None:
            writer = Writer(job.report_directory, collector, say)

        def say_of_restarts(text: str) -> None:
            say(text)
            collector.note("elastic", text.removeprefix("ringrun: "))

        hosts = _Hosts(growth, lambda in_use: reallocate(asked, in_use), say)

        def attempt(job: Job, deadline_s: float | None) -> Ending:
            names = {host.name for host, _ in job.hosts}
            kept_on.update(names)
            if (more := job.size - asked.size) > 0:
                _raise_open_files(job, more)
            output.begin(job.size)
            start = partial(_start_and_supervise, detected, job, deadline_s, output, signals, hosts, collector, metrics)
            ending = _run_once(start, job, say)
            if not ending.keeps_commits:
                kept_on.difference_update(names)
            return ending

        def reallocate_now(job: Job, in_use: Collection[str]) -> Job | None:
            growth.update(say_of_restarts)
            return reallocate(job, in_use)

        try:
            code = restarts.run(job, attempt, reallocate_now, signals.wait, say_of_restarts, growth.blacklist)
        except LauncherError as error:
            say(f"ringrun: error: {error}")
            collector.card = str(error).splitlines()
            code = error.exit_code
        if writer is not None:
            writer.finish(code)
        return _finish(output, signals, code)


def _raise_open_files(job: Job, ranks: int) -> int:
    """Raise ringrun's limit of open files for so many ranks more; return what it was. MachineError if that is not
    allowed."""
    own = ranks * (1 if job.output_directory is None else 3) + _OWN_FILES
    return raise_open_files(own + ranks * _MPIRUNS_FILES, own)


def _finish(output: Output, signals: SignalRelay, code: int) -> int:
    """Wait for whoever reads the output, until a signal ends the job; return its exit code."""
    signals.start()  # where the job was not even started
    while not (is_read := output.finish(_PATIENCE_S)) and signals.ending is None:
        pass
    output.close(_PATIENCE_S)
    return code if code or is_read or signals.ending is None else 128 + signals.ending


@dataclass(frozen=True)
class _Hosts:
    """What all attempts of a job know of hosts; `reallocate`: see HostWatch."""

    growth: Growth
    reallocate: Callable[[Collection[str]], Job | None]
    say: restarts.Say

    def watch(self, job: Job, in_use: Callable[[], InUse | None], events: Events) -> HostWatch:
        """Begin to look for more of them while `job` runs, if it can take them."""
        watch = HostWatch(self.growth, self.reallocate, in_use, events, self.say)
        if job.elastic and job.commits_folder:
            watch.start()
        return watch


def _remove_commits(job: Job, names: Collection[str]) -> None:
    """Remove the commits that agents have left for a restart: here, and on the hosts `names`, which had none."""
    kept_commits.remove(job.commits_folder)
    if job.commits_folder and (away := [name for name in names if not is_here(Host(name))]):
        with private_folder() as directory:
            job.reach.remote(directory, _REMOVAL_S).run(away, ["/bin/rm", "-rf", job.commits_folder])


def _run_once(start: Callable[[], Ending], job: Job, say: restarts.Say) -> Ending:
    try:
        return start()
    except NotStartedError as error:
        if job.hosts:
            raise
        # Open MPI 5's mpirun fails now and then when others start at the same moment ("The PMIx server's listener
        # thread failed to start"); nothing has run yet, so a second try does no harm
        if job.verbose:
            say(f"ringrun: trying once more: {error}")
    return start()


def _start_and_supervise(
    detected: Detected,
    job: Job,
    deadline_s: float | None,
    output: Output,
    signals: SignalRelay,
    hosts: _Hosts,
    collector: Collector,
    metrics: Metrics,
) -> Ending:
    require_own_names(job, detected.engine)
    events: Events = queue.SimpleQueue()
    with private_folder() as directory:
        addresses = _addresses(job) if job.hosts else ()
        listener = Listener(
            directory,
            addresses,
            job.size,
            connect_s=job.start_timeout_s / 2,  # so that an agent can say what it waits for
            lost_after_s=job.lost_after_s,
        )
        settings = Settings(
            listener.address,
            detected.engine.name,
            directory,
            bind=job.bind,
            mask_gpus=job.mask_gpus,
            verbose=job.verbose,
            master_port=job.master_port,
            exit_s=EXIT_S if job.grace_s is None else job.grace_s,
        )
        departures = Departures(job.reach.departures, events)
        ControlSocket(directory, job.size, job.command, events).start(listener)
        environment = plan.job_environment(detected, job, os.environ, settings, listener.authkey)
        for name, text in job.reach.files(plan.aliases(job)).items():
            Path(directory, name).write_bytes(os.fsencode(text))
        if beyond := plan.across(job, environment, directory):
            environment |= detected.engine.across_environment(beyond)
        remote = plan.remote_variables(job, environment)
        local = plan.local_variables(job, os.environ) if job.reach.sends_environment else remote
        for_all = plan.elastic_variables(detected, job, os.environ) | ({"PWD": job.folder} if job.folder else {})
        folder = job.folder or current_folder()
        of_hosts = plan.network_variables(detected, job, os.environ)
        setup = RankSetup(folder, local | for_all, remote | for_all, _ranks_stdin(job), of_hosts)
        agents = Agents(listener, job, setup, output, events)
        argv = plan.job_command(detected, job, beyond, as_root=os.geteuid() == 0)
        signals.to(events)
        try:
            launcher = MpiLauncher(argv, environment, events)
        except OSError as error:
            raise MachineError(f"{argv[0]} cannot be executed: {error.strerror}") from error
        agents.start()
        metrics.start(lambda text: output.message([text]))
        signals.start()
        launcher.start(output if job.verbose else None)
        blacklist, lost_peer_code = hosts.growth.blacklist, detected.engine.lost_peer_code
        given = (deadline_s, lost_peer_code, blacklist, collector)
        supervisor = Supervisor(job, launcher, agents, output, events, *given)
        departures.start()
        watch = hosts.watch(job, supervisor.in_use, events)
        try:
            return Ending(supervisor.run(), supervisor.failed, supervisor.scales_up, supervisor.keeps_commits)
        finally:
            watch.close()
            departures.close()
            remove_folders(directory)


def _addresses(job: Job) -> Sequence[str]:
    """Return this host's addresses for agents on others, but those that others have, too, if it has any of its own."""
    found, equal = own_addresses([host.name for host, _ in job.hosts], job.interfaces), job.machines.equal_addresses()
    return [address for address in found if address not in equal] or found


def _ranks_stdin(job: Job) -> int | None:
    """Return what one rank reads: our stdin, unless it is a terminal that nobody has asked to give away.

    mpirun is not asked to pass it on: pip's Open MPI 5.0.11 loses it, and hydra lets the other ranks wait for it. A
    rank that reads a terminal takes lines from a shell where ringrun is in the background, so it must be asked for.
    """
    return None if os.isatty(0) and not job.gives_terminal else 0
