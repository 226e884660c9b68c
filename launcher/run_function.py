"""ringreduce.run(): a function on ranks of a job of its own, from a script, IPython or a notebook.

This process starts ringrun and prints what it prints. Each rank connects to this process, gets the function, and sends
back its result; they travel pickled, over the sockets that ringrun and its agents use. This process joins no
world itself, and may call run() again.
"""

from __future__ import annotations

import codecs
import contextlib
import linecache
import numbers
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ringreduce.errors import InputError, JobFailedError, StartupError, described
from ringreduce.transport import pickling

from .connection.link import Gone, Link, connect
from .connection.listener import Listener
from .connection.queued import QueuedLink
from .connection.wire import Address, Hello, Input, Message, Output
from .errors import LauncherError
from .folders import private_folder
from .network import own_addresses, parse_interfaces
from .processes import how_ended, start_with_parent
from .text import numbered

KEY_VARIABLE = "_RINGREDUCE_RUN_KEY"
"""With which a rank proves that it belongs to this job; no rank's own program sees it."""
PIECE_BYTES = 64 << 20
CHUNK_BYTES = 1 << 16
RANK_PROGRAM = "from ringrun.run_function import serve; serve()"
REFUSES = "ringrun: error: "
FAILED = re.compile(
    r"-- ringrun: rank \d+ of \d+ (failed|left) first\b|ringrun: .*(so the job was ended|ranks did; it wrote):(\n|$)"
)
"""How the lines begin with which ringrun says why a job has failed: from there on they are the exception's text."""
AGAIN = re.compile(r"ringrun: restart \d+ of ")
"""How the line begins with which it starts the job again: what it has said of the failure is not the last word."""
HOROVODS_NAMES = {
    "num_proc": "np",
    "min_num_proc": "min_np",
    "use_gloo": "gloo",
    "use_mpi": "mpi",
    "cooldown_range": "blacklist_cooldown_range",
    "nics": "network_interfaces",
    "extra_mpi_args": "mpi_args",
}
SWITCHES = (
    *("gloo", "mpi", "jsrun", "tcp", "disable-cache", "verbose", "elastic", "mask-gpus", "fold", "timestamps"),
    *("prefix-output-with-timestamp", "log-with-timestamp", "log-without-timestamp"),
)
"""Flags without a --no-…: a number, as in Horovod's verbose=2, says yes, and no is no flag."""
LISTS = (
    *("hosts", "exclude", "network_interfaces", "nics", "ranks", "check", "forward_signals", "env_allow"),
    *("cooldown_range", "blacklist_cooldown_range"),
)
"""Flags whose value is one or several, with commas between them."""
ONLY_PRINT = ("check_build", "dry_run", "help", "show_config", "version")
"""Flags with which ringrun starts no rank."""
OF_ELASTIC_JOBS = ("elastic", "min_num_proc", "min_np", "host_discovery_script")
"""Flags each of which makes a job elastic; so do those of a growing job, which need one of these."""
OFF = {"", "0", "false", "no", "off"}
OF_GROWING_JOBS = ("max_num_proc", "max_np", "slots", "reset_limit", "cooldown_range")
PYTHON_VARIABLE, FOLDER_VARIABLE, PATH_VARIABLE = (f"_RINGREDUCE_{name}" for name in ("PYTHON", "FOLDER", "PATH"))
"""Of a rank on slots that an engine lends: its Python, and the folder and the import path of who lends them."""
OWN_PYTHON = f'exec "${PYTHON_VARIABLE}" -c "$0" "$1"'
LOOK_S = 0.25


class Head(NamedTuple):
    """What makes a ringrun the head of a job whose slots others lend, see lending.py."""

    flags: Sequence[str]
    environment: Mapping[str, str]
    addresses: Sequence[str]
    """This host's, for ranks elsewhere."""
    trouble: Callable[[], str]
    """Returns why there will be no ranks, if so; it is asked as long as the job runs."""


def on_ranks(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    flags: Mapping[str, Any],
    variables: Mapping[str, Any],
    python: str,
    head: Head | None = None,
) -> list[Any]:
    """Do what `ringreduce.run` says: a function, called with these arguments on each rank, which is `python`.

    Under a `head` it is the Python of who lends the slots.
    """
    from .job.plan import run_module  # no rank needs it

    if not callable(call[0]):
        raise InputError(f"run(): {call[0]!r} is no function; pass the function itself, as in run(train, args=(0.1,))")
    for name in ("stdout", "stderr"):
        if flags.get(name) is not None:
            raise InputError(f"run(): {name}=: ranks write to sys.{name} here; use contextlib.redirect_{name}(…)")
    for name in ONLY_PRINT:
        if flags.get(name):
            shell = f"in a shell: ringrun --{name.replace('_', '-')} …"
            raise InputError(
                f"run(): {name}={flags[name]!r}: ringrun would print something, and call no function; {shell}"
            )
    flags = {name: _plain(name, value) for name, value in flags.items() if value is not None and name not in ONLY_PRINT}
    variables, python = _texts(variables), str(_plain("executable", python))
    given = _given(flags)
    ringrun = [sys.executable, *run_module("ringrun"), *(head.flags if head else ()), *_arguments(flags, head)]
    results = _Results(_pickled(call, "the function, its arguments, or what it refers to,"))
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(private_folder("ringreduce-"))
            listener = Listener(folder, head.addresses if head else _addresses(given), 1024)
        except LauncherError as error:
            raise InputError(f"run(): {error}") from error
        opened.callback(listener.close)
        listener.start(lambda link: _Rank(link, results))
        program = ["/bin/sh", "-c", OWN_PYTHON] if head else [python, "-c"]
        rank = [*program, RANK_PROGRAM, str(listener.address)]
        # by name: every user of this host can read a command line
        asked = {**variables, KEY_VARIABLE: listener.authkey.hex()}
        ringrun += [f"--env={name}" for name in asked]
        environment = {**os.environ, **asked, **(head.environment if head else {})}
        code, report = _finish([*ringrun, *rank], environment, head and _before_ranks(head.trouble, results))
    if code == 0:
        return results.by_rank(some_are_lost=any(given.get(name, "").lower() not in OFF for name in OF_ELASTIC_JOBS))
    raise _failure(code, report)


def _before_ranks(trouble: Callable[[], str], results: _Results) -> Callable[[], str]:
    """Return what asks for trouble, which counts until there are ranks: then ringrun sees slots go, and says whose."""

    def ask() -> str:
        why = trouble()
        return "" if results.size else why

    return ask


def _failure(code: int, report: str) -> Exception:
    kinds = {2: InputError, 3: StartupError} if report.startswith(REFUSES) else {}
    why = report.removeprefix(REFUSES) or f"ringrun {how_ended(code)}"
    return kinds.get(code, JobFailedError)(f"run():\n{why}" if FAILED.match(why) else f"run(): {why}")


def _plain(name: str, value: object) -> str | numbers.Real:
    """Return a flag's value, a list as ringrun takes it; InputError for one that has no place on a command line."""
    several = value if name in LISTS and isinstance(value, list | tuple | set | frozenset) else None
    given: Iterable[Any] = [value] if several is None else several
    items = [os.fsdecode(each) if isinstance(each, os.PathLike) else each for each in given]
    if not all(isinstance(each, str | numbers.Real) and "\0" not in str(each) for each in items):
        or_list = ", or a list of them" if name in LISTS else ""
        raise InputError(f"run(): {name}={value!r}: expected text without NUL, a number or a path{or_list}")
    return items[0] if several is None else ",".join(map(str, items))


def _texts(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return variables as they are in an environment; InputError for what cannot be there. They may be secrets."""
    if not isinstance(variables, Mapping):
        raise InputError(f"run(): env: expected a dict, such as {{'NAME': 'value'}}, got {type(variables)}")
    for name, value in variables.items():
        if not isinstance(name, str) or not name or {*name} & {*"=\0"}:
            raise InputError(f"run(): env: expected names without '=' and NUL, got {name!r}")
        if value is None or "\0" in str(value):
            came = "None; leave the variable out" if value is None else "text with NUL"
            raise InputError(f"run(): env: {name}: expected text without NUL, or a number, got {came}")
    return {name: str(value) for name, value in variables.items()}


def _arguments(flags: Mapping[str, object], head: Head | None = None) -> Iterator[str]:
    """Yield ringrun's command line for these flags."""
    for name, value in flags.items():
        if value is None:
            continue
        if name in OF_GROWING_JOBS and not (head and flags.get("elastic")):
            raise InputError(
                f"run(): {name}={value} is for jobs that grow: `ringrun --elastic --restarts N` starts them, run() "
                "does not; elastic=True, np=4, spares=1 starts five ranks, of which one waits to replace another"
            )
        if name == "min_num_proc" and not flags.get("elastic"):
            yield "--elastic"
        flag = HOROVODS_NAMES.get(name, name).replace("_", "-")
        if flag == "np":
            yield from ("-np", str(value))
        elif flag == "blacklist-cooldown-range":
            yield from (f"--{flag}", *str(value).split(","))
        elif flag in SWITCHES or flag.startswith("no-"):
            yield from [f"--{flag}"] if value else []
        elif isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif str(value).startswith("-"):  # or it looks like a flag
            yield f"--{flag}={value}"
        else:
            yield from (f"--{flag}", str(value))


def _given(flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags as text, with those of the config file that they name."""
    from .config.file import read

    given = {name: str(value) for name, value in flags.items()}
    try:
        entries = read(given["config_file"]) if "config_file" in given else []
    except LauncherError as error:
        raise InputError(f"run(): {error}") from error
    return {entry.flag.replace("-", "_"): ",".join(entry.texts) for entry in entries} | given


def _addresses(flags: Mapping[str, str]) -> Sequence[str]:
    """Return this host's addresses for ranks on other hosts, if there are any."""
    from .arguments import split_words
    from .hosts import is_here, named_hosts

    script = split_words(flags.get("host_discovery_script"), "--host-discovery-script")
    interfaces = flags.get("network_interfaces", flags.get("nics"))
    found = named_hosts(flags.get("hosts"), flags.get("hostfile"), script=script)
    others = [host.name for host in found.hosts if not is_here(host)] if found else []
    return own_addresses(others, parse_interfaces(interfaces)) if others else ()


# In the process that calls run()


class _Results:
    """What the ranks have returned; a job that was started again begins anew, maybe with fewer of them."""

    def __init__(self, function: bytes) -> None:
        self.function = pickle.dumps((sys.path, _cells(), function))
        self.pickled: dict[int, bytes] = {}
        self.size = 0

    def expect(self, rank: int, size: int) -> None:
        """A rank has started: what it has returned, or ranks of a job of another size, was of an earlier attempt."""
        if size != self.size:
            self.pickled.clear()
        self.pickled.pop(rank, None)
        self.size = size

    def by_rank(self, *, some_are_lost: bool) -> list[Any]:
        """Return the results; of an elastic job, where some ranks may be lost, of those that are left."""
        missing = set(range(self.size or 1)) - self.pickled.keys()
        if missing and not (some_are_lost and self.pickled):
            who = "the ranks that were left" if some_are_lost else numbered("rank", missing)
            raise JobFailedError(
                f"run(): {who} ended with exit code 0 before the function returned; it must not call sys.exit() or "
                "os._exit()"
            )
        return [
            pickling.loads(data, f"run(): what the function returned on rank {rank}", JobFailedError)
            for rank, data in sorted(self.pickled.items())
        ]


class _Rank:
    """A rank's connection: it gets the function, and sends its result. See `ringrun.connection.listener.Reader`."""

    def __init__(self, link: QueuedLink, results: _Results) -> None:
        self.link = link
        self._results = results
        self._rank = -1
        self._pieces: list[bytes] = []

    def handle(self, message: Message | Gone) -> bool:
        """Handle a message; when it is Gone, ringrun says how the rank has ended."""
        with contextlib.suppress(OSError):
            match message:
                case Hello(rank, size):
                    self._rank = rank
                    self._results.expect(rank, size)
                    # in a thread: the rank may be slow to take it
                    threading.Thread(target=self._give, daemon=True).start()
                    return True
                case Output(_, piece) if piece:
                    self._pieces.append(piece)
                    return True
                case Output():
                    self._results.pickled[self._rank] = b"".join(self._pieces)
                    _send(self.link, Input, b"")
                case Gone(ValueError() as error):
                    print(f"run(): a rank's connection is broken: {error}", file=sys.stderr)
        return False

    def _give(self) -> None:
        with contextlib.suppress(OSError):
            _send(self.link, Input, self._results.function)


def _cells() -> dict[str, tuple[Any, ...]]:
    """Return the source of a notebook's cells, for tracebacks on the ranks: entries of linecache that are no files."""
    found = [each for each in linecache.cache.items() if isinstance(each[0], str) and len(each[1]) == 4]
    return {name: entry for name, entry in found if not os.path.exists(name)}


def _finish(
    command: Sequence[str], environment: Mapping[str, str], trouble: Callable[[], str] | None = None
) -> tuple[int, str]:
    """Run ringrun to its end, printing what it prints; return its exit code, and why it failed.

    trouble: asked every LOOK_S; what it returns ends ringrun, and is raised as a StartupError.

    All in this thread: in a notebook that decides which cell shows it.
    """
    out, errors = _Printer("stdout"), _Report("stderr")
    is_interrupted, why = False, ""
    process = start_with_parent(
        command,
        signal.SIGTERM,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
    )
    with process, selectors.DefaultSelector() as selector:
        try:
            for pipe, printer in ((process.stdout, out), (process.stderr, errors)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, printer)
            while selector.get_map():
                try:
                    for key, _ in selector.select(LOOK_S if trouble else None):
                        data = os.read(key.fd, CHUNK_BYTES)
                        key.data.print(data)
                        if not data:
                            selector.unregister(key.fd)
                    if trouble and not why and (why := trouble()):
                        process.terminate()
                except KeyboardInterrupt:
                    is_interrupted = True
                    process.send_signal(signal.SIGINT)
        except BaseException:  # by the engine, or by what has replaced sys.stdout
            process.terminate()  # before `with process`, which waits for its end
            raise
    if is_interrupted or why or process.returncode == 0:
        errors.release()
    if is_interrupted:
        raise KeyboardInterrupt
    if why:
        raise StartupError(f"run(): {why}")
    return process.returncode, errors.text


class _Printer:
    """Prints bytes to this process's stdout or stderr, which a notebook has replaced."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def print(self, data: bytes) -> None:
        """Print a piece; empty at the end."""
        self._show(self._decoder.decode(data, final=not data))

    def _show(self, text: str) -> None:
        stream = getattr(sys, self._name)  # none where it was closed from the start, as by `>&-`
        if stream and not getattr(stream, "closed", False):
            coding = getattr(stream, "encoding", None) or "utf-8"  # which a notebook's may lack
            stream.write(text.encode(coding, "backslashreplace").decode(coding))
            stream.flush()


class _Report(_Printer):
    """Keeps for the exception why the job has failed, and prints everything before it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._line = self._last = self._kept = ""

    @property
    def text(self) -> str:
        """Why the job has failed: ringrun's report, or the last that it said itself."""
        return (self._kept or self._last).rstrip("\n")

    def release(self) -> None:
        """Print what is kept: no exception will say it."""
        kept, self._kept = self._kept, ""
        super()._show(kept)

    def _show(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if AGAIN.match(line):
                self.release()
            if self._kept or line.startswith(REFUSES) or FAILED.match(line):
                self._kept += f"{line}\n"
            else:
                self._last = line if line.startswith("ringrun: ") else self._last
                super()._show(f"{line}\n")


# On the ranks


def serve() -> None:
    """What a rank runs: get the function, call it, send what it returns."""
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    link = connect(Address.parse(sys.argv.pop()), key)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    link.send(Hello(rank, size, local_rank=0, local_size=0, host="", port=0))
    folders, cells, function = pickle.loads(_receive(link))  # noqa: S301 - from who started this job
    linecache.cache.update(cells)  # the source of a notebook's functions, for tracebacks
    if own := os.environ.pop(PATH_VARIABLE, ""):  # what the engine has there comes before what the driver has
        folders = [*own.split(os.pathsep), *folders]
        os.chdir(os.environ.pop(FOLDER_VARIABLE))
        del os.environ[PYTHON_VARIABLE]
    sys.path[:] = list(dict.fromkeys([*folders, *sys.path]))
    func, args, kwargs = pickling.loads(function, "run(): the function, or one of its arguments,")
    result = func(*args, **kwargs)
    pickled = _pickled(result, f"what the function returned, {type(result)},")
    _send(link, lambda piece: Output("stdout", piece), pickled)
    _receive(link)  # it has arrived


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickling.dumps(value)
    except Exception as exc:
        raise InputError(f"run(): {what} cannot be pickled: {described(exc)}") from exc


def _send(link: Link, message: Callable[[bytes], Any], data: bytes) -> None:
    """Send bytes in pieces, then an empty one."""
    for start in range(0, len(data), PIECE_BYTES):
        link.await_room()
        link.send(message(data[start : start + PIECE_BYTES]))
    link.send(message(b""))


def _receive(link: Link) -> bytes:
    """Receive what `_send` has sent."""
    pieces = []
    while isinstance(message := link.receive(), Input | Output) and message.data:
        pieces.append(message.data)
    return b"".join(pieces)
