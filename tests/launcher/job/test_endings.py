"""Runs that are ended from outside: Ctrl-C and other signals, a reader that leaves, ringrun killed. Nothing stays."""

import os
import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from ringrun.job.control_socket import TOTALS, ask, find_jobs
from tests.support import jobs, tiers
from tests.support.patience import patient, wait_until
from tests.support.tiers import parted

GONE_WITHIN_S = 5.0
both_mpis = pytest.mark.parametrize("python", ["openmpi", pytest.param("mpich", marks=tiers.extended)], indirect=True)


@pytest.fixture
def started(start, program):
    def run(what, *flags):
        process = start("-np", 3, *flags, *program("runs_on"), what)
        for _ in range(3):
            assert process.stdout.readline().endswith("] up\n")
        return process

    return run


def ended(process):
    """Return how long ringrun took to end, and what it wrote."""
    begin = time.monotonic()
    output, errors = process.communicate(timeout=patient(30))
    return time.monotonic() - begin, output, errors


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "ringrun: interrupted; ending 3 ranks"),
        (signal.SIGTERM, 143, "ringrun: got SIGTERM; ending 3 ranks"),
        (signal.SIGHUP, 129, "ringrun: got SIGHUP; ending 3 ranks"),
        (signal.SIGQUIT, 131, "ringrun: got SIGQUIT; ending 3 ranks"),
    ],
)
def test_a_signal_ends_everything(number, code, message, started, wait_until_gone):
    process = started("die")
    process.send_signal(number)
    seconds, _, errors = ended(process)
    assert process.returncode == code
    assert errors == message + "\n"
    assert seconds + wait_until_gone() < patient(GONE_WITHIN_S)


def test_ctrl_c_lets_a_script_save(started, wait_until_gone):
    process = started("save")
    process.send_signal(signal.SIGINT)
    _, output, _ = ended(process)
    assert sorted(output.splitlines()) == [f"[{rank}] saved after SIGINT" for rank in range(3)]
    assert process.returncode == 130
    wait_until_gone()


def test_sigterm_and_sighup_at_once_are_one_request_and_leave_the_time_to_save(started, wait_until_gone):
    process = started("ignore", "--grace", 2)
    for number in (signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    seconds, _, errors = ended(process)
    first = {143: "SIGTERM", 129: "SIGHUP"}[process.returncode]  # of two that come at once, in whatever order
    assert errors == f"ringrun: got {first}; ending 3 ranks\n"
    assert seconds > 2
    wait_until_gone()


@both_mpis
def test_a_signal_to_all_processes_of_a_job_reaches_its_ranks_and_ends_none(start, program, processes_of, tmp_path):
    forwarding = start("-np", 2, "--forward-signals", "usr2", *program("gets_signals"))
    ups = [tmp_path / f"up{rank}" for rank in range(2)]
    wait_until(lambda: all(up.exists() and up.read_text() for up in ups))
    ranks = {int(up.read_text()) for up in ups}
    for pid in set(processes_of()) - {forwarding.pid}:
        os.kill(pid, signal.SIGUSR1)
        if pid not in ranks:
            os.kill(pid, signal.SIGUSR2)
    forwarding.send_signal(signal.SIGUSR2)
    _, _, errors = ended(forwarding)
    assert (forwarding.returncode, processes_of()) == (9, {}), errors
    assert errors.startswith("ringrun: passed SIGUSR2 on to 2 ranks\n")
    assert "exit code 9" in errors


@pytest.mark.parametrize(("pauses_s", "least_s", "most_s"), [([0], 2.5, GONE_WITHIN_S), ([0, 0.3], 0, 2.5)])
def test_ctrl_c_ends_ranks_that_ignore_it_and_a_second_one_at_once(pauses_s, least_s, most_s, started, wait_until_gone):
    process = started("ignore")
    for pause_s in pauses_s:
        time.sleep(pause_s)
        process.send_signal(signal.SIGINT)
    seconds, _, _ = ended(process)
    assert process.returncode == 130
    assert least_s < seconds + wait_until_gone() < patient(most_s)  # without the second it takes 3.5


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


ENDS = {
    "Ctrl-C": (130, [], "ringrun: interrupted"),
    "SIGTERM": (143, [], "ringrun: got SIGTERM"),
    "its time is up": (124, ["--timeout", 12], "--timeout"),
    "another rank dies": (137, [], "SIGKILL"),
    "it does not read": (1, ["--lost-after", 3], "its agent has not read what ringrun sends for 3 s (--lost-after)"),
}


@both_mpis
@pytest.mark.parametrize("end", parted(ENDS, lambda end: end in ("SIGTERM", "it does not read")))
def test_an_agent_that_is_stopped_holds_nobody_up_and_does_not_stay(end, start, program, processes_of, wait_until_gone):
    code, flags, told = ENDS[end]
    process = start("-np", 2, *(flags or ["--lost-after", 60]), *program("runs_on"), "die")
    assert [process.stdout.readline()[3:] for _ in range(2)] == [" up\n"] * 2
    found = processes_of()
    parents = {pid: parent_of(pid) for pid in found}
    ranks = [pid for pid, line in found.items() if "script.py die" in line and "ringrun" not in line]
    stopped, *_ = [parents[pid] for pid in ranks if "ringrun.agent" in found.get(parents[pid], "")]
    os.kill(stopped, signal.SIGSTOP)
    job = next(job for job in find_jobs() if job.pid == process.pid)
    for _ in range(400):  # as `ringrun top`, each of which has ringrun tell all agents something
        ask(job, TOTALS)
    if end in ("Ctrl-C", "SIGTERM"):
        process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGTERM)
    elif end == "another rank dies":
        os.kill(next(pid for pid in ranks if parents[pid] != stopped), signal.SIGKILL)
    seconds, _, errors = ended(process)
    assert seconds < patient(10) + 12 * (end == "its time is up")
    assert (process.returncode, told in errors) == (code, True), errors
    wait_until_gone()


@pytest.mark.parametrize("what", ["die", "ignore"])
def test_ringrun_killed_leaves_nothing(what, started, grace, wait_until_gone):
    process = started(what, *grace)
    process.kill()
    process.wait()
    wait_until_gone()


@both_mpis
def test_ringrun_killed_leaves_no_mpirun_that_handles_no_signal(start, program, processes_of, wait_until_gone):
    """As Open MPI's sometimes does: where SIGTERM came amid its own work, its handler waits for a lock that it has."""
    process = start("-np", 2, *program("runs_on"), "die")
    assert [process.stdout.readline()[3:] for _ in range(2)] == [" up\n"] * 2
    (mpirun,) = [pid for pid, line in processes_of().items() if re.search(r"/(prterun|mpiexec\S*) ", line)]
    assert parent_of(mpirun) == process.pid
    os.kill(mpirun, signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_until_gone()


@both_mpis
@pytest.mark.parametrize(("ends", "code"), [("interrupted", 130), ("a rank fails", 3)])
def test_nothing_waits_for_whoever_reads_the_output(ends, code, start, grace, program, tmp_path, processes_of):
    read, write = os.pipe()
    process = start("-np", 2, *grace, *program("fills_pipe"), ends, stdout=write, stderr=write)
    os.close(write)
    wait_until((tmp_path / "paused").exists)
    if ends == "a rank fails":
        wait_until(lambda: set(processes_of()) == {process.pid})  # it waits for its reader
    process.send_signal(signal.SIGINT)
    assert process.wait(patient(15)) == code
    assert processes_of() == {}
    os.close(read)


@pytest.mark.without_mpi
def test_memory_is_bounded_while_the_reader_is_slow(start, script, tmp_path):
    source = """
        import os
        written = 0
        while True:
            written += os.write(1, b"y" * 65535 + b"\\n")
            with open(f"written{os.environ['RANK']}", "w") as file:
                file.write(str(written))
    """
    process = start("-np", 1, *script(source))
    progress = tmp_path / "written0"
    wait_until(lambda: progress.exists() and progress.read_text() != "")
    time.sleep(1.5)
    first = int(progress.read_text() or 0)
    assert 0 < first < 4_000_000  # pipes and buffers, not all it could write in a second
    time.sleep(0.5)
    assert int(progress.read_text() or 0) == first
    process.send_signal(signal.SIGKILL)


def test_a_reader_that_leaves_ends_the_job(start, script, wait_until_gone):
    process = start("-np", 2, *script("import itertools\nfor i in itertools.count(): print(i)"))
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    assert process.wait(patient(20)) == 141
    assert wait_until_gone() < patient(GONE_WITHIN_S)


@pytest.mark.without_mpi
@pytest.mark.parametrize("end", ["sys.exit(0)", "1 / 0", "os.kill(agent, signal.SIGKILL)"])
@pytest.mark.parametrize("shell", [[], ["bash", "-c", '"$@"; exit $?', "sh"]])
def test_nothing_that_a_rank_has_started_outlives_the_job(shell, end, ringrun, script, wait_until_gone):
    source = """
        import os, signal, subprocess, sys
        agent = os.getppid()
        if sys.argv[1:]:
            agent = int(open(f"/proc/{agent}/stat").read().rpartition(")")[2].split()[1])
        for of_its_own in (os.setpgrp, os.setsid):
            subprocess.Popen(["sh", "-c", "sleep 100; exit", __file__], preexec_fn=of_its_own)
        subprocess.run(["sh", "-c", f"setsid sh -c 'sleep 100; exit' {__file__} & exit"])
        print("up", flush=True)
    """
    command = script(textwrap.dedent(source) + end + "\n" + "signal.pause()")
    ringrun("-np", 2, *shell, *command, *shell[:1], returncode=end != "sys.exit(0)")
    wait_until_gone()


@pytest.mark.without_mpi
def test_closed_descriptors_are_no_others(ringrun, ringrun_command, python, tmp_path):
    source = "import sys, pathlib; pathlib.Path('read').write_text(repr(sys.stdin.read())); print('x')"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *ringrun_command, "-np", "1", python, "-c", source],
        cwd=tmp_path,
        env=jobs.environment(),
        timeout=patient(30),
    )
    assert done.returncode == 0
    assert (tmp_path / "read").read_text() == "''"


HEAD = """
import _thread, argparse, os, sys, threading, time
def leave(*code):
    sys.exit(*code)
"""
# what a script does to end itself, and the code with which ringrun ends if MPI ends the rank with 14 on its way out
WAYS_OUT = {
    "leave(7)": 7,
    "leave('a text')": 1,
    "leave()": 14,
    "leave(0)": 14,
    "leave(256 + 7)": 7,
    "leave(-1)": 255,
    "raise SystemExit(7)": 7,
    "raise type('Exit', (SystemExit,), {})(7)": 7,
    "exit(7)": 7,
    "raise SystemExit": 14,
    "argparse.ArgumentParser().error('x')": 2,
    "def thrown(): raise SystemExit(7)\ntry: thrown()\nexcept SystemExit as error: print(error.code)": 14,
    "raise ValueError('x')": 1,
    "sys.excepthook(ValueError, ValueError('x'), None)": 14,
    "try: leave(7)\nfinally: print('tidied up')": 7,
    "with open(os.devnull): leave(7)": 7,
    "try: leave(7)\nexcept SystemExit: raise": 7,
    "try: leave(7)\nexcept SystemExit: pass": 14,
    "try: leave(7)\nexcept SystemExit: leave(0)": 14,
    "def caught():\n    try: leave(7)\n    except SystemExit: pass\ncaught()": 14,
    "def handled():\n    try: leave(7)\n    except ValueError: pass\nhandled()": 7,
    "def handled():\n    for _ in range(2):\n        try: leave(7)\n        except SystemExit: pass\nhandled()": 14,
    "thread = threading.Thread(target=leave, args=[7])\nthread.start()\nthread.join()": 14,
    "_thread.start_new_thread(leave, (7,))\ntime.sleep(0.3)": 14,
}


@pytest.mark.without_mpi
@pytest.mark.parametrize(
    ("stays", "end"),
    [
        ("threading.Thread(target=time.sleep, args=[60]).start()", "leave(7)"),
        ("threading.Thread(target=time.sleep, args=[60]).start()", "raise ValueError('x')"),
        ("multiprocessing.get_context('fork').Process(target=time.sleep, args=[60]).start()", "raise SystemExit(7)"),
    ],
)
def test_a_script_that_has_failed_does_not_keep_its_rank_alive(ringrun, grace, script, wait_until_gone, stays, end):
    """Other ranks hear of it when the process has ended, which waits for threads and children."""
    code, flags, wait_s = (7, grace, 1) if "7" in end else (1, [], 3)  # without a flag as long as the manual says
    fails = f"if os.environ['RANK'] == '1':\n    {stays}\n    {end}\n"
    begin_s = time.monotonic()
    done = ringrun("-np", 2, *flags, *script(f"{HEAD}import multiprocessing\n{fails}time.sleep(60)"), returncode=code)
    assert time.monotonic() - begin_s < patient(30)
    late = f" {wait_s} s after its script ended with exit code {code}, and is killed; it may be waiting for a thread"
    assert done.stderr.count(f" still runs{late}") == 1, done.stderr
    assert "rank 1 of 2 failed first" in done.stderr
    wait_until_gone()


@pytest.mark.without_mpi
def test_grace_is_for_what_a_failed_script_still_does(ringrun, script):
    saves = "import atexit\natexit.register(lambda: (time.sleep(3), print('saved', flush=True)))\nleave(7)\n"
    done = ringrun("-np", 1, "--grace", 60, *script(HEAD + saves), returncode=7)
    assert (done.stdout, "is killed" in done.stderr) == ("[0] saved\n", False)


@pytest.mark.without_mpi
@pytest.mark.parametrize(("line", "code"), [("exit 3", 3), ("exit 0", 0), ("kill -9 $$", 137)])
def test_of_a_shell_script_its_own_exit_code_counts(ringrun, tmp_path, line, code):
    (tmp_path / "run.sh").write_text(f"(exit 7)\necho goes on after $?\n{line}\n")
    done = ringrun("-np", 1, "bash", "run.sh", returncode=code)
    assert done.stdout == "[0] goes on after 7\n"


@pytest.mark.without_mpi
@pytest.mark.parametrize("way", parted(WAYS_OUT, lambda way: way in ("leave(7)", "leave(0)")))
def test_the_exit_code_is_the_script_s_whatever_happens_on_its_way_out(ringrun, script, way):
    ringrun("-np", 1, *script(f"{HEAD}import atexit\natexit.register(os._exit, 14)\n{way}\n"), returncode=WAYS_OUT[way])
