"""A program on every host: here, over a real sshd on loopback, through a fake srun; and why a host did not run it."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.hosts import Found, Host
from ringrun.remote import Answer, OverSlurm, OverSsh, Remote, Slurm, Ssh, parallel, reach_of
from ringrun.remote.base import Runner
from ringrun.remote.over_ssh import MAX_BYTES, REMOTE_COMMAND, payload, split_exit
from ringrun.remote.parallel import Outcome, Task, run_all
from ringrun.remote.refusals import program_problem, srun_problem, ssh_problem
from ringrun.ssh import SshOptions
from tests.launcher.conftest import PROGRAMS
from tests.support.jobs import executable
from tests.support.loops import in_a_loop
from tests.support.patience import patient, wait_until

HERE = "127.0.0.1"


def over_ssh(server, timeout_s=20.0, **options):
    prefix = server.config(server.aliases(), name=f"config{len(list(server.folder.iterdir()))}", **options)
    return Remote(Ssh(prefix, timeout_s), timeout_s + 1)


def problem_of(answer):
    return f"{answer.problem.what}; {answer.problem.cure}"


# many programs at once


def test_each_program_s_output_input_and_end():
    program = (
        "import sys; print(sys.stdin.read() * 2); print('err', sys.argv[1], file=sys.stderr); exit(int(sys.argv[1]))"
    )
    tasks = [Task([sys.executable, "-c", program, str(code)], f"input {code}".encode()) for code in range(5)]
    outcomes = run_all(tasks, 30, at_once=2)
    assert [outcome.code for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert [outcome.stdout for outcome in outcomes] == [f"input {code}".encode() * 2 + b"\n" for code in range(5)]
    assert [outcome.stderr for outcome in outcomes] == [f"err {code}\n".encode() for code in range(5)]


def test_no_more_at_once_than_may_be(tmp_path):
    program = """
import os, sys, time
open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close()
time.sleep(0.2)
print(len(os.listdir(sys.argv[1])))
os.remove(os.path.join(sys.argv[1], str(os.getpid())))
"""
    outcomes = run_all([Task([sys.executable, "-c", program, str(tmp_path)])] * 9, 30, at_once=3)
    assert 1 <= max(int(outcome.stdout) for outcome in outcomes) <= 3


def test_much_input_and_output_do_not_block_each_other():
    data = os.urandom(1 << 20)
    outcome = run_all([Task(["cat"], data)], 30)[0]
    assert (outcome.code, outcome.stdout == data) == (0, True)


def test_one_that_reads_nothing_and_one_that_is_not_there():
    deaf, missing = run_all([Task(["true"], bytes(1 << 20)), Task(["/no/such/program"])], 30)
    assert (deaf.code, deaf.not_run) == (0, "")
    assert (missing.code, missing.not_run) == (127, "No such file or directory")


def group_exists(leader):
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_that_takes_too_long_is_ended_with_its_children():
    began_s = time.monotonic()
    quick, slow = run_all([Task(["echo", "done"]), Task(["sh", "-c", "echo $$; sleep 77; echo never"])], 1.0)
    assert time.monotonic() - began_s < 20
    assert (quick.code, quick.stdout, slow.code) == (0, b"done\n", None)
    group = int(slow.stdout)
    wait_until(lambda: not group_exists(group))


def test_one_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(parallel, "_PATIENCE_S", 0.1)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(20)"
    )
    outcome = run_all([Task([sys.executable, "-c", f"{deaf}; print('never')"])], 2.0)[0]
    assert outcome.code is None
    assert b"never" not in outcome.stdout


def test_programs_do_not_outlive_ringrun(tmp_path):
    program = f"""
from ringrun.remote.parallel import Task, run_all
run_all([Task(["sh", "-c", "echo $$ > {tmp_path}/pid; exec sleep 600"])], 60)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    try:
        wait_until(lambda: process_state(pid) in "Z", within_s=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def process_state(pid):
    """Its letter in /proc; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Sleeping(Runner):
    """Runs `sleep` for each host, or one for all, which is as late as the last."""

    def __init__(self, one_for_all):
        super().__init__(30)
        self.one_for_all = one_for_all

    def tasks(self, names, argv, variables):
        seconds = ["4" if name.startswith("late") else "0" for name in names]
        return [Task(["sleep", each]) for each in ([max(seconds)] if self.one_for_all else seconds)]

    def answers(self, names, program, outcomes):
        return [Answer(name) for name in names]


@pytest.mark.parametrize(
    ("one_for_all", "said"),
    [(False, "2 answered, waiting for late1, late2"), (True, "1 answered, waiting for n1, late1, late2")],
)
def test_hosts_that_let_one_wait_are_told(one_for_all, said, monkeypatch, capsys):
    monkeypatch.setattr(parallel, "PROGRESS_AFTER_S", 1.8)  # those that answer at once have, on a busy machine too
    remote = Remote(Sleeping(one_for_all), 30, own_name="here")
    remote.run(["n1", "late1", "here", "late2"], ["/bin/true"])
    first, *more = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"ringrun: 4 hosts asked [2-9] s ago, {said}", first), first
    assert len(more) <= 1, "each time after twice as long"


def test_ctrl_c_while_a_program_starts_ends_it_too():
    done = subprocess.run([sys.executable, PROGRAMS / "interrupted.py"], capture_output=True, timeout=30)
    assert b"KeyboardInterrupt" in done.stderr
    group = int(done.stdout)
    wait_until(lambda: not group_exists(group))


def test_programs_do_not_inherit_that_ctrl_c_waits():
    (outcome,) = run_all([Task(["grep", "SigBlk", "/proc/self/status"])], 60)
    assert int(outcome.stdout.split()[1], 16) & 1 << signal.SIGINT - 1 == 0


def test_ctrl_c_ends_all_of_them(tmp_path):
    program = f"""
from ringrun.remote.parallel import Task, run_all
run_all([Task(["sh", "-c", "echo $$ > {tmp_path}/$0; sleep 77", str(number)]) for number in range(3)], 60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    wait_until(lambda: len([path for path in tmp_path.iterdir() if path.read_text().endswith("\n")]) == 3)
    groups = [int(path.read_text()) for path in tmp_path.iterdir()]
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=patient(30))[1]
    wait_until(lambda: not any(group_exists(group) for group in groups))


def test_a_child_s_child_that_keeps_the_pipes_is_not_waited_for():
    began_s = time.monotonic()
    outcome = run_all([Task(["sh", "-c", "echo said; sleep 20 & exit 4"])], 30)[0]
    assert time.monotonic() - began_s < 15
    assert (outcome.code, outcome.stdout) == (4, b"said\n")


def test_when_output_came_is_noted():
    before_s = time.time()
    outcome = run_all([Task(["sh", "-c", "echo a; sleep 0.5; echo b"])], 30)[0]
    first, last = outcome.arrived_by(2), outcome.arrived_by(4)
    assert before_s <= first <= last - 0.3
    assert last <= time.time()
    assert outcome.arrived_by(5) == 0.0


# this host


@pytest.mark.parametrize("name", ["localhost", HERE, socket.gethostname()])
def test_this_host_needs_no_ssh(name):
    remote = Remote(Ssh(["/no/such/ssh"], 20), 20)
    answer = remote.run(
        [name], [sys.executable, "-c", "import os; print(os.environ['MINE']); exit(3)"], {"MINE": "a b"}
    )
    assert (answer[name].stdout, answer[name].code, answer[name].problem) == (b"a b\n", 3, None)


@pytest.mark.parametrize(
    ("there", "name", "program", "problem"),
    [
        (
            Ssh(["ssh"], 20),
            "localhost",
            "/no/python",
            "/no/python is not there (No such file or directory); give every",
        ),
        (Ssh(["/no/ssh"], 20), "h1", "/bin/true", "ssh cannot be executed on this host: No such file or directory; in"),
        (Slurm("/no/srun", 30), "h1", "/bin/true", "srun cannot be executed on this host: No such file or directory"),
    ],
    ids=["interpreter", "ssh", "srun"],
)
def test_what_is_missing_here(there, name, program, problem):
    assert problem_of(Remote(there, 30).run([name], [program])[name]).startswith(problem)


# over ssh


def test_words_travel_apart_from_the_command():
    assert payload(["/a b/py'thon", "-c", ""], {"A": "x y"}) == b"all\0A=x y\0--\0/a b/py'thon\0-c\0\0"
    for argv in (["a\0b"], ["x" * MAX_BYTES]):
        with pytest.raises(ValueError, match="expected no zero byte"):
            payload(argv, {})


def test_why_a_login_shell_refuses_is_shown_wherever_it_says_so():
    said = b"This account is currently not available.\n"
    runner = Ssh(["ssh"], 20)
    for outcome in (Outcome(1, stdout=said), Outcome(1, stderr=said), Outcome(1, stdout=b"Welcome\n", stderr=said)):
        answer = runner._answer("h1", "/bin/true", outcome)
        assert answer.problem.what == f"ssh ended with exit code 1 and wrote: {said.decode().strip()}"
        assert answer.code is None


def test_a_program_may_write_what_ends_its_output():
    stderr = b"ringrun: exit 3\nringrun: exit 0\n"
    assert split_exit(stderr) == ("ringrun: exit 3\n", 0)


def test_how_hosts_are_reached(tmp_path):
    options = SshOptions(connect_timeout_s=7.0)
    for found in (None, Found([Host("h1")], "-H h1", in_slurm=False)):
        assert reach_of(found, options) == OverSsh(options)
    slurm = reach_of(Found([Host("n1")], "SLURM_JOB_NODELIST='n1'", in_slurm=True), options)
    assert slurm == OverSlurm(7.0)
    assert slurm.environment == {"SLURM_EXPORT_ENV": "ALL", "SLURM_OVERLAP": "1"}, (
        "all variables, also in a step of salloc"
    )
    assert slurm.rsh(str(tmp_path)) == ()
    remote = OverSsh(options).remote(str(tmp_path))
    assert remote._there._timeout_s == 7
    assert remote._timeout_s > 7, "ssh's own limit comes first, and says what it waited for"
    assert "ConnectTimeout 7" in (tmp_path / "ssh_config").read_text()


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])  # zsh, tcsh, fish and busybox were tried by hand
def test_the_remote_command_is_the_same_to_every_shell(shell):
    program = "import os, sys; print(sys.argv[1:], os.environ['V']); print('warn', file=sys.stderr); exit(5)"
    words = ["'", '"', "$HOME", "a  b", "`id`", "!x", "\\", "*", "\n", "-x", "", "é"]
    done = subprocess.run(
        [shell, "-c", REMOTE_COMMAND],
        input=payload([sys.executable, "-c", program, *words], {"V": "1 '\" $2"}),
        capture_output=True,
    )
    assert done.stdout.decode() == f"{words} 1 '\" $2\n"
    assert split_exit(done.stderr) == ("warn\n", 5)


@pytest.mark.parametrize("reads", ["cat > /dev/null", "head -c 2 > /dev/null", "IFS= read -r answer"])
def test_a_login_that_reads_what_ringrun_sends_is_named(reads):
    login = f'{reads}; exec sh -c "$2"'
    answer = Remote(Ssh(["sh", "-c", login, "ssh"], 20.0), 21.0, own_name="here").run(["h1"], ["/bin/true"])["h1"]
    assert problem_of(answer) == (
        "its login scripts read standard input, and thus consume what ringrun sends; "
        "make ~/.bashrc, ~/.ssh/rc or the like on h1 read stdin only if it is a terminal: [ -t 0 ] && …"
    )


@given(st.binary(max_size=200))
def test_any_stderr_is_split(data):
    assert split_exit(data + b"ringrun: exit 7\n") == (data.decode(errors="replace"), 7)
    text, code = split_exit(data)
    assert isinstance(text, str)
    assert code is None or 0 <= code <= 999


def test_a_program_on_hosts_over_ssh(server, tmp_path):
    folder = tmp_path / 'it\'s a "folder" $HOME'
    python = executable(folder / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program = """
import os, sys
assert os.read(0, 9) == b""
print(os.environ["SSH_CONNECTION"].split()[3], sys.argv[1:], os.environ["MINE"])
sys.stderr.write("no newline")
sys.exit(9)
"""
    words = ["a b", "'", '"', "$(id)", ";", ""]
    remote = over_ssh(server)
    before_s = time.time()
    answers = remote.run(["h1", "h2", "h3"], [str(python), "-c", program, *words], {"MINE": "x ' y"})
    assert list(answers) == ["h1", "h2", "h3"]
    for name, answer in answers.items():
        assert (answer.host, answer.problem, answer.code) == (name, None, 9), answer
        assert answer.stdout.decode() == f"{server.port} {words} x ' y\n"
        assert answer.stderr == "no newline"
        assert before_s < answer.arrived_s <= time.time()


@pytest.mark.parametrize("code", [0, 1, 255])
def test_the_program_s_own_exit_code_over_ssh(code, server):
    answer = over_ssh(server).run(["h1"], ["/bin/sh", "-c", f"echo Permission denied >&2; exit {code}"])["h1"]
    assert (answer.code, answer.problem, answer.stderr) == (code, None, "Permission denied\n")


def test_a_missing_interpreter_there(server):
    answer = over_ssh(server).run(["h1"], ["/no/such/python", "-c", "pass"])["h1"]
    assert problem_of(answer).startswith("/no/such/python is not there (")
    assert "give every host the same Python at the same path" in problem_of(answer)


@pytest.mark.parametrize(
    ("options", "what", "cure"),
    [
        ({"user_key": "stranger"}, "ssh is refused there (Permission denied (publickey).)", "ssh-copy-id h1"),
        ({"user_key": "none"}, "ssh is refused there (Permission denied (publickey).)", "-i FILE"),
        ({"user_key": "loose"}, "the private key cannot be used (", "chmod 600"),
        ({"known": "unknown"}, "its host key is not known to this host", "accept it once by hand"),
        ({"known": "changed"}, "its host key has changed since this host saw it last", '-R "[h1]:'),
    ],
)
def test_a_host_that_refuses(options, what, cure, server):
    shutil.copy(server.folder / "user", server.folder / "loose")
    (server.folder / "loose").chmod(0o644)  # others may read it
    answer = over_ssh(server, **options).run(["h1"], ["/bin/true"])["h1"]
    assert problem_of(answer).startswith(what)
    assert cure in problem_of(answer)


def test_hosts_fail_each_in_its_own_way_beside_one_that_answers(server):
    closed = socket.create_server((HERE, 0))
    threading.Thread(target=lambda: closed.accept()[0].close(), daemon=True).start()
    lines = f"""Host refusing
 HostName 127.0.0.1
 Port 1
Host closing
 HostName 127.0.0.1
 Port {closed.getsockname()[1]}
{server.aliases()}"""
    remote = Remote(Ssh(server.config(lines, name="config_mixed"), 20), 21)
    answers = remote.run(["h1", "refusing", "closing", "no-such-host.invalid"], ["/bin/echo", "fine"])
    closed.close()
    assert answers["h1"].stdout == b"fine\n"
    assert "no ssh server listens on that port; start sshd there, or name its port with -p" in problem_of(
        answers["refusing"]
    )
    assert "(port 1: Connection refused)" in problem_of(answers["refusing"])
    assert problem_of(answers["closing"]).startswith(
        "it took the connection and closed it (kex_exchange_identification:"
    )
    assert problem_of(answers["no-such-host.invalid"]).startswith(
        "its name is not known here (Could not resolve hostname: Name or service not known); correct the name"
    )


def assert_given_up(remote_within, host, folder):
    """Within a second; where it had not started by half of that, on a loaded machine, within some more."""
    for limit_s in (1, 5, 25):
        started, begin_s = folder / f"started{limit_s}", time.time()
        command = f"echo started >&2; touch {started}; exec sleep 60"
        problem = problem_of(remote_within(float(limit_s)).run([host], ["/bin/sh", "-c", command])[host])
        assert problem.startswith(f"no answer within {limit_s} s; ")
        if started.exists() and started.stat().st_mtime - begin_s < limit_s / 2:
            break
    assert problem.startswith(f"no answer within {limit_s} s; its last line: started")


def test_a_host_that_hangs_is_given_up(server, tmp_path):
    assert_given_up(lambda limit_s: over_ssh(server, timeout_s=limit_s), "h1", tmp_path)


def test_so_is_this_host(tmp_path):
    assert_given_up(lambda limit_s: Remote(Ssh(["/no/such/ssh"], 20), limit_s), HERE, tmp_path)


def test_a_wrong_configuration_of_ssh(server):
    prefix = server.config("Nonsense yes", name="config_nonsense")
    answer = Remote(Ssh(prefix, 20), 20).run(["h1"], ["/bin/true"])["h1"]
    assert problem_of(answer).startswith("ssh ended with exit code 255 and wrote: ")


@in_a_loop(
    ("text", "what"),
    [
        ("ssh: Could not resolve hostname h1: Temporary failure in name resolution", "its name is not known here"),
        ("ssh: connect to host h1 port 22: No route to host", "it cannot be reached (port 22: No route to host)"),
        ("ssh: connect to host 10.1.2.3 port 22: Connection timed out", "it did not answer in time (port 22: Conn"),
        ("Connection timed out during banner exchange", "it did not answer in time (Connection timed out during"),
        ("ssh: connect to host h1 port 22: Network is unreachable", "it cannot be reached (port 22: Network is"),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures", "ssh is refused there ("),
        ("ec2@h1: Permission denied (publickey,password).", "ssh is refused there (Permission denied (publickey,pas"),
        ("This account is currently not available.", "ssh ended with exit code 255 and wrote: This account is"),
        ("", "ssh ended with exit code 255 and wrote: nothing"),
    ],
)
def test_what_ssh_writes(text, what):
    problem = ssh_problem("h1", 255, f"{text}\n")
    assert problem.what.startswith(what)
    assert problem.cure


any_text = st.lists(
    st.one_of(
        st.text(max_size=20), st.sampled_from(["timed out", "{", "\\1", "\x1b[2J", "TEXT", "HOST", "@h: ", "\n"])
    ),
    max_size=10,
).map("".join)


@given(any_text, st.integers(-64, 255))
def test_any_text_is_one_problem_of_one_line(text, code):
    found = [ssh_problem("h1", code, text), srun_problem(code, text, "", 1.0), program_problem("/p", 127, text)]
    for problem in found:
        assert problem.what.isprintable()
        assert problem.cure.isprintable()


# through srun


@pytest.fixture
def srun(tmp_path):
    return str(executable(tmp_path / "srun", f"#!{sys.executable}\n{(PROGRAMS / 'srun.py').read_text()}"))


def test_each_node_s_answer_out_of_one_srun(srun):
    program = """
import os, sys
print("on", os.environ["SLURMD_NODENAME"], os.environ["MINE"], sys.argv[1])
sys.stderr.write("no newline")
sys.exit(6)
"""
    remote = Remote(Slurm(srun, 30), 30)
    answers = remote.run(["n2", "dead", "n1"], [sys.executable, "-c", program, "a 'b"], {"MINE": "x y"})
    for name in ("n1", "n2"):
        answer = answers[name]
        assert (answer.code, answer.problem, answer.stderr) == (6, None, "no newline")
        assert answer.stdout.decode() == f"on {name} x y a 'b\n"
        assert answer.arrived_s > 0
    assert (
        "Slurm did not run a program there; srun ended with exit code 1 and wrote: srun: error: Task launch"
        in problem_of(answers["dead"])
    )


def test_an_answer_is_that_of_the_node_it_names_whichever_task_it_is():
    outcome = Outcome(
        1,
        stdout=b"0: of n2\n1: of n1\n",
        stderr=b"1: warn\n0: ringrun: exit 0 on n2\nsrun: lost n3\nsrun: error: Node failure on n3\nsrun: ended\n"
        b"1: ringrun: exit 3 on n1\n",
    )
    n1, n2, n3 = Slurm("srun", 30).answers(["n1", "n2", "n3"], "/bin/x", [outcome])
    assert (n1.host, n1.stdout, n1.stderr, n1.code) == ("n1", b"of n1\n", "warn\n", 3)
    assert (n2.host, n2.stdout, n2.stderr, n2.code) == ("n2", b"of n2\n", "", 0)
    assert n3.code is None
    assert n3.problem.what.endswith("wrote: srun: error: Node failure on n3"), "not what came after it"


def test_a_step_has_nothing_of_the_step_that_ringrun_runs_in(monkeypatch):
    for name in ("SLURM_CPU_BIND", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_EXACT", "SLURM_EXCLUSIVE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    (task,) = Slurm("srun", 30).tasks(["n1", "n2"], ["/bin/true"], {"MINE": "1"})
    told = {name: value for name, value in task.environment.items() if name.startswith(("SLURM_", "MINE"))}
    assert told == {"SLURM_JOB_ID": "77", "MINE": "1"}


@pytest.mark.parametrize(
    ("code", "what"), [(126, "/p cannot be executed there (sh: x)"), (127, "/p is not there (sh: x)")]
)
def test_what_a_shell_says_of_a_program_that_it_cannot_start(code, what):
    assert program_problem("/p", code, "sh: x\n").what == what
    assert [program_problem("/p", other, "sh: x\n") for other in (0, 1, 125, 128, 255)] == [None] * 5


def test_a_program_that_is_missing_on_a_node(srun):
    answer = Remote(Slurm(srun, 30), 30).run(["n1"], ["/no/such/python"])["n1"]
    assert problem_of(answer).startswith("/no/such/python is not there (")
