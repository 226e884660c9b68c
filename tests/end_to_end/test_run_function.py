"""ringreduce.run(): a function on ranks, from a script, IPython and a notebook. Over hosts: cluster/."""

import io
import json
import linecache
import os
import pickle
import re
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest

import ringreduce as rr
from ringreduce.transport import pickling
from ringrun import cli, run_function
from ringrun.config import resolve
from ringrun.connection.link import Gone
from ringrun.connection.wire import Address, Hello
from ringrun.errors import LauncherError
from ringrun.run_function import _Rank, _Results
from tests.end_to_end.conftest import PROGRAMS
from tests.support import environments, jobs
from tests.support.patience import patient, wait_until
from tests.support.tiers import extended

pytestmark = pytest.mark.timeout(300)

# nothing of a test travels by name, as what stands in a script or a notebook does not


def train(step, fails=None):
    """What a script's own function might be."""

    def function(lr, name="none"):
        rr.init()
        print("learning at", lr, name)
        if rr.rank() == fails:
            raise ValueError(f"bad data on rank {fails}")
        return rr.rank(), float(rr.allreduce(float(rr.rank()), op=rr.Sum)), lambda: step * lr

    return function


class Odd(Exception):
    """As an exception is whose class takes other arguments than its `args`."""

    def __init__(self, rank, index):
        super().__init__(f"{rank} {index}")


@pytest.mark.adapters
def test_results_come_by_rank_and_lines_as_ringrun_prints_them(capsys):
    results = rr.run(train(3), (0.5,), {"name": "fast"}, np=2, ranks="1")
    assert [(rank, total, closure()) for rank, total, closure in results] == [(0, 1.0, 1.5), (1, 1.0, 1.5)]
    assert capsys.readouterr() == ("[1] learning at 0.5 fast\n", "")


@pytest.mark.adapters
def test_a_rank_that_fails_is_told_by_ringruns_report(capsys, monkeypatch):
    cell = ["def function(lr):\n", "    return train(lr)  # in a notebook\n"]
    monkeypatch.setitem(linecache.cache, "<cell 1>", (2, None, cell, "<cell 1>"))
    names = {"__name__": "__main__", "train": train(3, fails=1)}
    exec(compile("".join(cell), "<cell 1>", "exec"), names)
    with pytest.raises(rr.JobFailedError) as raised:
        rr.run(names["function"], args=[0.5], np=2)
    lines = str(raised.value).splitlines()
    assert lines[0] == "run():"
    assert lines[1].startswith("-- ringrun: rank 1 of 2 failed first ---")
    assert lines[-2] == "ValueError: bad data on rank 1"
    assert cell[1].rstrip() in lines
    assert "[0] learning at 0.5 none\n" in capsys.readouterr().out


LEAVES = {
    "return 1": ["-- ringrun: rank 1 of 2 left first: its script ended -", "so failed   rank 0: exit code 1"],
    "os._exit(0)": ["ringrun: rank 1 of 2 ended with exit code 0 ", "rank 0: allreduce of an unnamed tensor "],
}


@pytest.mark.parametrize("leaves", LEAVES)
def test_a_rank_that_leaves_is_told_by_ringruns_report(capsys, leaves):
    def function():
        import os

        rr.init()
        if rr.rank() == 1:
            if leaves == "return 1":
                return 1
            os._exit(0)
        return rr.allreduce(1.0)

    with pytest.raises(rr.JobFailedError) as raised:
        rr.run(function, np=2)
    lines = str(raised.value).splitlines()
    assert lines[0] == "run():"
    assert lines[1].startswith(LEAVES[leaves][0])
    assert [line for line in lines if line.startswith(LEAVES[leaves][1])], lines
    assert capsys.readouterr().err == ""


@pytest.mark.adapters
def test_the_ranks_get_variables_that_stand_on_no_command_line():
    def function():
        import contextlib
        import os
        import sys
        from pathlib import Path

        variables = {name: value for name, value in os.environ.items() if name in ("MINE", "_RINGREDUCE_RUN_KEY")}
        seen = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # that process has ended
                seen += [line for line in [os.fsdecode(path.read_bytes())] if variables["MINE"] in line]
        return variables, seen, sys.argv

    mine = {"MINE": f"x={secrets.token_hex(8)} y"}
    assert rr.run(lambda: function(), np=1, env=mine) == [(mine, [], ["-c"])]


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_without_a_stdout_or_stderr_text_is_dropped(tmp_path, closed):
    program = tmp_path / "one.py"
    program.write_text("""
import sys
import ringreduce as rr

def function():
    print("out")
    print("error", file=sys.stderr)
    return 7

found = rr.run(function, hosts=["localhost:1", "localhost:1"], ranks=[0, 1], np=2)
print(found, file=sys.stdout or sys.stderr)
""")
    done = jobs.run(["/bin/sh", "-c", f'exec "$0" "$1" {closed}', sys.executable, program], cwd=tmp_path, returncode=0)
    assert sorted((done.stdout + done.stderr).splitlines())[-1] == "[7, 7]"


def test_what_is_not_returned():
    def function():
        import os
        import sys

        if os.environ["RANK"] == "1":
            sys.exit(0)

    message = "rank 1 ended with exit code 0 before the function returned; it must not call sys.exit()"
    with pytest.raises(rr.JobFailedError, match=re.escape(message)):
        rr.run(function, np=2)


def test_an_elastic_job_returns_what_is_left_and_prints_who_is_lost(capsys):
    def function():
        import os
        import signal

        rr.init()
        started_as = rr.rank()

        @rr.elastic.run
        def train(state):
            if started_as == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return started_as, float(rr.allreduce(float(started_as), op=rr.Sum, name="x")), rr.size()

        return train(rr.elastic.ObjectState(step=0))

    assert rr.run(function, num_proc=3, min_num_proc=2) == [(0, 2.0, 2), (2, 2.0, 2)]
    printed = capsys.readouterr().err
    assert "-- ringrun: rank 1 of 3 failed ---" in printed
    assert "ringrun: ranks 0,2 resumed after " in printed


@pytest.mark.quick
def test_flags_are_ringruns_and_horovods():
    arguments = sys.modules["ringrun.run_function"]._arguments
    flags = {"hosts": "h1:2", "timeout": 1.5, "fold": True, "cuda_ipc": False, "ranks": None, "restarts": 0}
    ours = ["-np", "4", "--hosts", "h1:2", "--timeout", "1.5", "--fold", "--no-cuda-ipc", "--restarts", "0"]
    assert list(arguments({"np": 4, **flags})) == ours
    horovods = {"num_proc": 2, "use_gloo": True, "use_mpi": False, "disable_cache": 1, "verbose": 2, "min_np": None}
    assert list(arguments({"np": 3, "min_num_proc": 2})) == ["-np", "3", "--elastic", "--min-np", "2"]
    assert list(arguments({"np": None, **horovods})) == ["-np", "2", "--gloo", "--disable-cache", "--verbose"]
    plain = sys.modules["ringrun.run_function"]._plain
    nics = {"nics": plain("nics", {"eth0"}), "extra_mpi_args": "-v"}
    found = list(arguments(nics))
    assert found == ["--network-interfaces", "eth0", "--mpi-args=-v"]
    cli.parse([*found, "train"])


@pytest.mark.quick
def test_a_job_on_an_engine_may_grow():
    """It has a head, which takes slots that come later."""
    module = sys.modules["ringrun.run_function"]
    head = module.Head((), {}, (), str)
    growing = {
        "elastic": True,
        "max_np": 4,
        "reset_limit": 3,
        "cooldown_range": module._plain("cooldown_range", [1, 20]),
    }
    found = list(module._arguments(growing, head))
    assert found == ["--elastic", "--max-np", "4", "--reset-limit", "3", "--blacklist-cooldown-range", "1", "20"]
    cli.parse([*found, "train"])
    with pytest.raises(rr.InputError, match="reset_limit=3 is for jobs that grow"):
        list(module._arguments({"reset_limit": 3}, head))


@pytest.mark.quick
def test_every_switch_may_be_off():
    arguments = sys.modules["ringrun.run_function"]._arguments
    parser = cli._parser()
    resolve._add_setting_flags(parser, resolve.public_settings())
    switches = [each for each in parser.flags if each.nargs == 0 and each.dest not in resolve._NOT_IN_FILE]
    for name in [name for each in switches for name in each.option_strings if name.startswith("--")]:
        off = arguments({name.removeprefix("--").replace("-", "_"): False})
        cli.parse([*off, "train"])  # which would say that there is no such flag
    assert list(arguments({"elastic": False, "no_bind": False, "bind": False})) == ["--no-bind"]


REFUSED = [
    ({"max_np": 4}, "max_np=4 is for jobs that grow: `ringrun --elastic --restarts N` starts them, run() does not"),
    ({"args": 5}, "args=5: expected a tuple of the function's arguments, such as (5,)"),
    ({"colour": 1}, "there is no flag --colour; see ringrun --help"),
    ({"colour": False}, "there is no flag --no-colour; see ringrun --help"),
    ({"np": 0}, "-np: expected auto or a whole number from 1"),
    ({"hosts": "h1:x"}, "-H, item 1, 'h1:x': slots: expected"),
    ({"env": {"RINGREDUCE_SPARES": 1}}, "--env RINGREDUCE_SPARES: ringrun sets this variable"),
    ({"kwargs": ["lr"]}, "kwargs=['lr']: expected a dict of the function's arguments by name"),
    ({"np": True}, "-np: expected auto or a whole number from 1"),
    ({"np": [2]}, "np=[2]: expected text without NUL, a number or a path"),
    ({"hosts": [None]}, "hosts=[None]: expected text without NUL, a number or a path, or a list of them"),
    ({"hosts": "h1\0"}, r"hosts='h1\x00': expected text without NUL, a number or a path, or a list of them"),
    ({"hostfile": 3}, "hostfile 3: no such file"),
    ({"host_discovery_script": ["a"]}, "host_discovery_script=['a']: expected text without NUL, a number or a path"),
    ({"host_discovery_script": "'a"}, "--host-discovery-script"),
    ({"network_interfaces": ["none"], "hosts": ["h1:1"]}, "--network-interfaces none: there is no interface 'none'"),
    ({"nics": ["none"], "hosts": ["h1:1"]}, "--network-interfaces none: there is no interface 'none'"),
    ({"stdout": "out.txt"}, "stdout=: ranks write to sys.stdout here; use contextlib.redirect_stdout(…)"),
    ({"executable": ["python"]}, "executable=['python']: expected text without NUL, a number or a path"),
    ({"env": ["A"]}, "env: expected a dict, such as {'NAME': 'value'}, got <class 'list'>"),
    ({"env": {1: 2}}, "env: expected names without '=' and NUL, got 1"),
    ({"env": {"A=B": 2}}, "env: expected names without '=' and NUL, got 'A=B'"),
    ({"env": {"A": None}}, "env: A: expected text without NUL, or a number, got None; leave the variable out"),
    ({"env": {"A": "x\0y"}}, "env: A: expected text without NUL, or a number, got text with NUL"),
    (
        {"dry_run": True},
        "dry_run=True: ringrun would print something, and call no function; in a shell: ringrun --dry-run",
    ),
    ({"version": 1}, "version=1: ringrun would print something, and call no function; in a shell: ringrun --version"),
    ({"executable": "/bin/no-python"}, "command not found: '/bin/no-python'"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_no_job_can_be_made_of_is_refused(options, message):
    with pytest.raises(rr.InputError, match=rf"run\(\): .*{re.escape(message)}"):
        rr.run(print, **{"np": 1} | options)


@pytest.mark.quick
@pytest.mark.parametrize(
    "flags", [{}, {"hosts": "localhost:1"}, {"hosts": "h1:1", "network_interfaces": "lo"}], ids=str
)
def test_it_listens_only_where_ranks_of_other_hosts_are_to_connect(monkeypatch, tmp_path, flags):
    def listen(folder, addresses, backlog):
        raise LauncherError(f"it listens at {addresses}")

    monkeypatch.setattr("ringrun.run_function.own_addresses", lambda hosts, interfaces: (*hosts, *interfaces))
    monkeypatch.setattr("ringrun.run_function.Listener", listen)
    with pytest.raises(rr.InputError) as refused:
        rr.run(print, **flags)
    assert str(refused.value) == f"run(): it listens at {('h1', 'lo') if 'network_interfaces' in flags else ()}"
    if flags:
        path = tmp_path / "flags.yaml"
        path.write_text("".join(f"{name}: {value}\n" for name, value in flags.items()))
        with pytest.raises(rr.InputError, match=re.escape(str(refused.value))):
            rr.run(print, config_file=path)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "addresses"),
    [({"hosts": ["h1:1", "h2"], "network_interfaces": ("lo",)}, ("h1", "h2", "lo")), ({"hosts": 2}, ("2",))],
    ids=str,
)
def test_flags_may_be_lists_and_numbers(monkeypatch, tmp_path, flags, addresses):
    def listen(folder, found, backlog):
        raise LauncherError(f"it listens at {found}")

    monkeypatch.setattr("ringrun.run_function.own_addresses", lambda hosts, interfaces: (*hosts, *interfaces))
    monkeypatch.setattr("ringrun.run_function.Listener", listen)
    with pytest.raises(rr.InputError, match=re.escape(f"it listens at {addresses}")):
        rr.run(print, **flags)
    (tmp_path / "flags.yaml").write_text("hosts: [localhost:1, h2:1]\nnetwork_interfaces: [lo, eth0]\n")
    with pytest.raises(rr.InputError, match=re.escape(f"it listens at {('h2', 'lo', 'eth0')}")):
        rr.run(print, config_file=tmp_path / "flags.yaml")


@pytest.mark.quick
def test_without_room_for_its_socket_the_cure_is_told(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    with pytest.raises(rr.InputError, match=r"^run\(\): no folder .* can be made: .*; make room, or set TMPDIR$"):
        rr.run(print)


@pytest.mark.quick
@pytest.mark.parametrize(("coding", "shown"), [("ascii", "[0] caf\\xe9\n"), ("latin-1", "[0] café\n"), (None, "")])
def test_what_ranks_print_does_not_break_a_stdout_that_cannot_show_it(monkeypatch, coding, shown):
    """Of another coding, or closed: the job's results were lost with it."""
    own = io.TextIOWrapper(io.BytesIO(), coding or "utf-8", newline="\n")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", own)
        own = own if coding else own.close()
        run_function._Printer("stdout").print("[0] café\n".encode())
    assert (own.buffer.getvalue().decode(coding) if own else "") == shown


@pytest.mark.quick
def test_what_is_no_function_is_refused_before_ranks_start():
    """As where a function has been called by mistake: run(train(), np=2)."""
    with pytest.raises(rr.InputError, match=r"^run\(\): None is no function; pass the function itself"):
        rr.run(None)


@pytest.mark.quick
@pytest.mark.parametrize("where", ["refers", "argument"])
def test_a_function_that_cannot_travel_is_refused_with_one_sentence(where):
    lock = threading.Lock()
    why = r"run\(\): the function, its arguments, or what it refers to, cannot be pickled: TypeError: .*lock"
    with pytest.raises(rr.InputError, match=why):
        rr.run(*{"refers": (lambda: lock,), "argument": (print, (lock,))}[where])


@pytest.mark.quick
def test_a_connection_that_somebody_interferes_with_is_ended_with_a_line(capsys):
    assert not _Rank(None, None).handle(Gone(ValueError("message 3 was changed")))
    assert capsys.readouterr().err == "run(): a rank's connection is broken: message 3 was changed\n"


def test_what_cannot_be_pickled_and_results_of_many_pieces(monkeypatch):
    with pytest.raises(
        rr.JobFailedError, match=r"InputError: run\(\): what the function returned, .*cannot be pickled"
    ):
        rr.run(lambda: __import__("threading").Lock(), np=1)
    monkeypatch.setattr(sys.modules["ringrun.run_function"], "PIECE_BYTES", 1000)
    many = bytes(range(256)) * 1000
    assert rr.run(lambda data: data[::-1], (many,), np=2) == [many[::-1]] * 2


@pytest.mark.quick
@pytest.mark.parametrize(("returned", "of_elastic"), [({}, None), ({1: [1]}, [[1]])])
def test_an_elastic_job_returns_what_is_left_but_not_nothing(returned, of_elastic):
    results = _Results(b"")
    results.size, results.pickled = 2, {rank: pickle.dumps(value) for rank, value in returned.items()}
    for some_are_lost in (False, True):
        if some_are_lost and of_elastic:
            assert results.by_rank(some_are_lost=True) == of_elastic
            continue
        who = "the ranks that were left" if some_are_lost else "rank 0" if returned else "ranks 0-1"
        with pytest.raises(rr.JobFailedError, match=rf"^run\(\): {who} ended with exit code 0 before the function"):
            results.by_rank(some_are_lost=some_are_lost)


@pytest.mark.quick
@pytest.mark.parametrize(("size", "left"), [(3, [0, 2]), (2, [])])
def test_what_an_earlier_attempt_returned_does_not_count(size, left):
    results = _Results(b"")
    results.size, results.pickled = 3, {rank: pickle.dumps(rank) for rank in range(3)}
    link = SimpleNamespace(await_room=lambda: None, send=lambda message: None)
    assert _Rank(link, results).handle(Hello(1, size, 0, 0, "", 0))
    assert sorted(results.pickled) == left
    who = "rank 1" if left else "ranks 0-1"
    with pytest.raises(rr.JobFailedError, match=rf"^run\(\): {who} ended with exit code 0 before the function"):
        results.by_rank(some_are_lost=False)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "text", "is_elastic"),
    [
        ({"elastic": 1}, "", True),
        ({"min_np": 1}, "", True),
        ({"host_discovery_script": "hosts.sh"}, "", True),
        ({}, "elastic: true", True),
        ({}, "min-num-proc: 1", True),
        ({"elastic": False}, "", False),
        ({"timeout": 5}, "elastic: no", False),
    ],
)
def test_an_elastic_job_may_lose_ranks_whichever_flag_made_it_elastic(monkeypatch, tmp_path, flags, text, is_elastic):
    """One rank of two returns, and ringrun ends with 0."""
    asked = []
    monkeypatch.setattr("ringrun.run_function._finish", lambda *_: (0, ""))
    monkeypatch.setattr(_Results, "by_rank", lambda self, some_are_lost: asked.append(some_are_lost))
    monkeypatch.setattr("ringrun.run_function._addresses", lambda given: ())
    (tmp_path / "flags.yaml").write_text(text)
    rr.run(print, np=2, config_file=tmp_path / "flags.yaml", **flags)
    assert asked == [is_elastic]


@pytest.mark.quick
def test_what_ringrun_said_last_is_the_reason_where_it_has_made_no_report(capfd):
    says = "echo 'ringrun: h1 is lost' >&2; echo a word of a rank >&2; exit 7"
    assert run_function._finish(["/bin/sh", "-c", says], os.environ) == (7, "ringrun: h1 is lost")
    assert capfd.readouterr().err == "ringrun: h1 is lost\na word of a rank\n"


@pytest.mark.quick
def test_on_an_engine_what_its_worker_can_import_comes_before_what_the_driver_can(monkeypatch, tmp_path):
    call = pickle.dumps((["/both", "/driver's"], {}, pickling.dumps((os.getcwd, (), {}))))
    received, sent = [b"", call], []
    monkeypatch.setattr(run_function, "connect", lambda address, key: SimpleNamespace(send=lambda hello: None))
    monkeypatch.setattr(run_function, "_receive", lambda link: received.pop())
    monkeypatch.setattr(run_function, "_send", lambda link, message, data: sent.append(pickle.loads(data)))
    monkeypatch.setattr(sys, "argv", ["-c", str(Address("head", "/socket"))])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    path, folder, python = run_function.PATH_VARIABLE, run_function.FOLDER_VARIABLE, run_function.PYTHON_VARIABLE
    variables = {path: "/worker's:/both", folder: "/", python: sys.executable, "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**variables, run_function.KEY_VARIABLE: "00"}.items():
        monkeypatch.setenv(name, value)
    run_function.serve()
    assert sent == ["/"]
    assert sys.path[:3] == ["/worker's", "/both", "/driver's"]
    assert not {path, folder, python} & os.environ.keys()


@pytest.mark.quick
def test_what_cannot_be_unpickled_is_told_with_its_rank():
    results = _Results(b"")
    results.size, results.pickled = 2, {1: b"cnowhere\nclass_of_rank_1\n.", 0: pickle.dumps({"rank": 0})}
    message = (
        "run(): what the function returned on rank 1 cannot be unpickled here: ModuleNotFoundError: No module named "
        "'nowhere'; the modules of its classes must be importable here"
    )
    with pytest.raises(rr.JobFailedError, match=f"^{re.escape(message)}"):
        results.by_rank(some_are_lost=False)


def test_arguments_that_cannot_be_unpickled_are_told_by_the_ranks():
    message = r"InputError: run\(\): the function, or one of its arguments, cannot be unpickled here: TypeError: "
    with pytest.raises(rr.JobFailedError, match=message):
        rr.run(print, (Odd(1, 7),), np=1)


def test_a_job_that_starts_again_returns_what_its_last_attempt_returned(tmp_path, capsys):
    def function():
        import os
        import sys

        attempt = int(os.environ["RINGREDUCE_RESTART_COUNT"])
        print("attempt", attempt, file=sys.stderr, flush=True)
        if attempt < 2 and os.environ["RANK"] == "1":
            sys.exit(7 + attempt)
        return attempt

    # the reports of the first attempts are printed: the job has not failed
    assert rr.run(function, np=2, restarts=2) == [2, 2]
    pattern = r"(?m)^\[1\] (attempt .)|^how +(.*)|^ringrun: (restart .*?) in"
    said = re.findall(pattern, capsys.readouterr().err)
    assert ["".join(each) for each in said] == [
        *("attempt 0", "exit code 7", "restart 1 of 2"),
        *("attempt 1", "exit code 8", "restart 2 of 2"),
        "attempt 2",
    ]
    with pytest.raises(rr.JobFailedError) as raised:
        rr.run(function, np=2, restarts=1)
    assert "exit code 8" in str(raised.value)
    assert "exit code 7" not in str(raised.value)


def pids_in(folder, is_alive):
    """The ranks' processes, once they all run."""
    paths = [folder / f"up{rank}" for rank in range(2)]
    wait_until(lambda: not is_alive() or all(path.exists() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def assert_gone(pids):
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), within_s=10)


@pytest.mark.adapters
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=extended)])
def test_a_script_that_is_interrupted_or_killed_leaves_no_rank(tmp_path, number):
    command = [sys.executable, PROGRAMS / "interrupted.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=jobs.environment(), stderr=subprocess.PIPE, text=True)
    pids = pids_in(tmp_path, lambda: process.poll() is None)
    process.send_signal(number)
    _, errors = process.communicate(timeout=patient(30))
    assert process.returncode == -number
    assert_gone(pids)
    if number == signal.SIGINT:
        assert "ringrun: interrupted; ending 2 ranks\n" in errors
        assert errors.endswith("KeyboardInterrupt\n")


# In IPython and in notebooks


@pytest.fixture(scope="module")
def interactive_python():
    """An interpreter with IPython and what runs notebooks."""
    return environments.interpreter("TEST_NOTEBOOK_PYTHON", ".venv-test-notebook", "ipython", "ipykernel", "nbclient")


WITH_MPI = f"executable={sys.executable!r}"  # the environment with IPython has none
CELLS = [
    "import os, pathlib, time\nimport ringreduce as rr",
    "def function(x):\n    print('x is', x)\n    return x + int(os.environ['RANK'])",
    f"rr.run(function, (40,), np=2, {WITH_MPI})",
    "def fail(x): assert x != 40, 'forty'",
    f"rr.run(fail, (40,), np=1, {WITH_MPI})",
    "def wait():\n    pathlib.Path('up' + os.environ['RANK']).write_text(str(os.getpid()))\n    time.sleep(99)",
    f"print('kernel', os.getpid(), flush=True)\nrr.run(wait, np=2, {WITH_MPI})",
    f"rr.run(function, (50,), np=1, {WITH_MPI})",
]


def test_ipython(interactive_python, tmp_path):
    child = pexpect.spawn(
        str(interactive_python),
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor", "--no-confirm-exit"],
        cwd=str(tmp_path),
        env=jobs.environment(TERM="dumb", IPYTHONDIR=str(tmp_path)),
        encoding="utf-8",
        timeout=patient(60),
    )
    told = []
    for number, cell in enumerate(CELLS, 1):
        child.expect_exact(f"In [{number}]: ")
        told.append(child.before)
        child.sendline(f"exec({cell!r}, globals())" if "\n" in cell else cell)
        if "rr.run(wait" in cell:
            pids = pids_in(tmp_path, child.isalive)
            child.sendintr()
    child.expect_exact(f"In [{len(CELLS) + 1}]: ")
    told.append(child.before)
    child.sendline("exit()")
    child.expect(pexpect.EOF)
    assert "[0] x is 40" in told[3]
    assert "Out[3]: [40, 41]" in told[3]
    assert "JobFailedError: run():\r\n-- ringrun: rank 0 of 1 failed first" in told[5]
    assert "AssertionError: forty" in told[5]
    assert "KeyboardInterrupt" in told[7]
    assert "Out[8]: [50]" in told[8]
    assert_gone(pids)


def test_a_notebook(interactive_python, tmp_path):
    done = subprocess.run(
        [interactive_python, PROGRAMS / "runs_cells.py"],
        input=json.dumps(CELLS),
        cwd=tmp_path,
        env=jobs.environment(JUPYTER_PLATFORM_DIRS="1", IPYTHONDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=patient(150),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    text = {number: "".join(each.get("text", "") for each in outputs) for number, outputs in enumerate(told)}
    assert sorted(text[2].splitlines()) == ["[0] x is 40", "[1] x is 40"], "in the cell that has called run()"
    assert told[2][-1]["data"]["text/plain"] == "[40, 41]"
    assert told[4][-1]["ename"] == "JobFailedError"
    assert "rank 0 of 1 failed first" in told[4][-1]["evalue"]
    assert told[6][-1]["ename"] == "KeyboardInterrupt"
    assert "ringrun: interrupted; ending 2 ranks" in text[6]
    assert told[7][-1]["data"]["text/plain"] == "[50]"
    assert_gone([int((tmp_path / f"up{rank}").read_text()) for rank in range(2)])


def test_the_notebook_of_the_examples(interactive_python, tmp_path):
    """What it shows is what it prints, but for times, process ids and the like."""
    path = jobs.ROOT / "examples" / "notebook.ipynb"
    command = [interactive_python, PROGRAMS / "runs_notebook.py", path, sys.executable]
    variables = jobs.environment(JUPYTER_PLATFORM_DIRS="1", IPYTHONDIR=str(tmp_path))
    done = jobs.run(command, cwd=tmp_path, env=variables, timeout_s=150, returncode=0)
    stored = [cell["outputs"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    now, then = ([printed(outputs) for outputs in cells] for cells in (json.loads(done.stdout), stored))
    assert now == then
    assert sum("<image/png>" in text for text in now) == 1
    assert "10 of 10: loss" in "".join(now)


def printed(outputs):
    """A cell's text and the kinds of its pictures, without what differs from run to run."""
    text = ""
    for output in outputs:
        assert output["output_type"] != "error", output
        if output.get("name") != "stderr":
            text += "".join(output.get("text", "")) + "".join(f"<{kind}>" for kind in sorted(output.get("data", {})))
    at_that_moment = r"(?<=the others  rank 0: ).+"  # it may not have come as far as its barrier
    return re.sub(rf"pid \d+, ran for \S+|host \S+,|{at_that_moment}|\d+\.py:|\de-\d\d", "…", text)
