"""Command lines: a parser whose errors are UsageErrors with a cure, flags of several commands, and their values."""

import argparse
import math
import re
import shlex
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from .errors import UsageError
from .network import LOST_AFTER_S
from .text import EMPTY, close_matches, quoted, shortened

_COLUMNS = 100  # of a manual
_ALIKE = 0.75
_HIGHEST_PORT = 65535
_MOST_RANKS = 999_999  # as hosts have slots
_RANKS = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+))?")
_SHOWN = 20
_NOT_IN_MANUAL = (
    *("-n", "--num-proc", "-hostfile", "--network-interface", "--min-num-proc", "--max-num-proc", "-cb", "-v"),
    *("-prefix-timestamp", "--prefix-output-with-timestamp"),
)
"""horovodrun's and mpirun's other names of our flags."""

_WITH_VALUE_BEHIND = re.compile(r"-(?:[Hi]|p(?=\d))")  # -Hh1:4, -i~/.ssh/key, -p2222

_VALUE_OF_SWITCH = re.compile(r"argument (\S+): ignored explicit argument (.+)")  # in argparse's words

_BY_ITSELF = "leave it out: ringrun does that itself"
_OF_OTHERS = {
    **dict.fromkeys(("-x", "-env", "-genv", "--genv"), "did you mean --env NAME[=VALUE]?"),
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node", "--num_processes"), "did you mean -np N?"),
    **dict.fromkeys(("-host", "-hosts"), "did you mean -H LIST?"),
    **dict.fromkeys(("-f", "-machinefile", "--machinefile"), "did you mean --hostfile FILE?"),
    **dict.fromkeys(("-ppn", "--ppn", "-npernode", "--npernode"), "did you mean --slots-per-host N?"),
    "-wd": "did you mean --wdir DIR?",
    **dict.fromkeys(("--oversubscribe", "-oversubscribe", "--allow-run-as-root", "--tag-output", "-l"), _BY_ITSELF),
    "--standalone": _BY_ITSELF,
    **dict.fromkeys(("-mca", "--mca", "--map-by", "--bind-to", "--rank-by"), 'for mpirun: --mpi-args="{flag} …"'),
}
"""Flags of mpirun's, mpiexec's, torchrun's and accelerate's that ringrun lacks, and what to write instead."""

LIST = "LIST"
"""The metavar of flags whose value is a list with commas between its members."""

Add = Callable[..., None]
"""Adds a flag to a group, as argparse's add_argument does."""


class _Manual(argparse.RawDescriptionHelpFormatter):
    """As wide as the manual's text, with `-p, --ssh-port PORT` for `-p PORT, --ssh-port PORT`, as since Python 3.13."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=_COLUMNS)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(name for name in action.option_strings if name not in _NOT_IN_MANUAL)
        values = action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
        return names if action.nargs == 0 else f"{names} {' '.join(map(str, values))}"


class _Joined(argparse.Action):
    """Joins the lists of several flags, as horovodrun does."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def may_be_empty(action: argparse.Action) -> bool:
    """Return whether a flag takes an empty value: of ringrun's own none but --mpi-args, to which it adds nothing."""
    return " " in action.dest or action.dest == "mpi_args"  # a setting's: see config/resolve.py


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that knows its flags and raises UsageError, with the flag that was probably meant."""

    def __init__(self, prog: str, usage: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(prog, usage, description, epilog, formatter_class=_Manual, allow_abbrev=False, add_help=False)
        self.flags: list[argparse.Action] = []

    def group(self, title: str, text: str | None = None) -> Add:
        """Begin a group of flags; returns what adds one to it."""
        group = self.add_argument_group(title, text)

        def add(*names: str, **options: Any) -> None:
            self.flags.append(group.add_argument(*names, **options))

        return add

    def add_command(self) -> None:
        """Take all that follows the flags as the user's command."""
        self.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def _get_values(self, action: argparse.Action, values: list[str]) -> Any:
        """Return a flag's value, `--` of `--timeout=--`, too, of which Python 3.12 and earlier make a list."""
        if action.option_strings and "" in values and not may_be_empty(action):
            raise UsageError(f"{action.option_strings[0]}: expected a value, but {EMPTY}")
        return "--" if action.option_strings and values == ["--"] else super()._get_values(action, values)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Return what a word may be that is no flag: one with its value. `allow_abbrev` is not about single dashes."""
        found: list[Any] = super()._get_option_tuples(option_string) if _WITH_VALUE_BEHIND.match(option_string) else []
        return [each for each in found if each[1] == option_string[:2]]

    def parse_args(self, arguments: Any = None, namespace: Any = None) -> Any:
        """Return the flags' values; UsageError for what is no flag."""
        found, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            raise UsageError(self._unknown(unknown[0].partition("=")[0]))
        if getattr(found, "command", None) and found.command[0] == "--":
            del found.command[0]
        return found

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        if given := _VALUE_OF_SWITCH.fullmatch(message):
            message = f"{given[1].replace('/', ' or ')}: it takes no value, got {given[2]}"
        raise UsageError(f"{message}; see {self.prog} --help")

    def _unknown(self, flag: str) -> str:
        if not flag.startswith("-"):
            return f"unexpected argument {quoted(flag)}; see {self.prog} --help"
        names = [name for action in self.flags for name in action.option_strings]
        if number := re.fullmatch("--?np?([0-9]+)", flag):
            hint = f"did you mean -np {number[1]}?"
        elif flag in _OF_OTHERS:
            hint = _OF_OTHERS[flag].format(flag=flag)
        elif flag == "-m":
            hint = f"to run a module: {self.prog} … python -m MODULE"
        elif alike := close_matches(flag.lower(), names, _ALIKE):
            hint = f"did you mean {alike[0]}?"
        else:
            hint = f"see {self.prog} --help"
        return f"there is no flag {flag}; {hint}"


def add_host_flags(add: Add) -> None:
    """Add the flags that say which hosts there are, and how they are reached."""
    add("-H", "--hosts", metavar=LIST, help="hosts and their slots, as in h1:4,h2:4")
    add("--hostfile", "-hostfile", metavar="FILE", help="a file of hosts, in the format of Open MPI, MPICH or Horovod")
    add("-p", "--ssh-port", metavar="PORT", help="the port of sshd on other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the private key for other hosts")
    interfaces = ("--network-interfaces", "--network-interface")
    add(*interfaces, metavar=LIST, action=_Joined, help="networks to use between hosts, as in eth0,ib0")
    add("--start-timeout", metavar="SECONDS", help="how long hosts and ranks may take to start (30, plus 0.2 per host)")
    add(
        "--lost-after",
        metavar="SECONDS",
        default=f"{LOST_AFTER_S:g}",
        help="give up a host that has been silent for this long (30)",
    )


def split_words(text: str | None, flag: str) -> list[str]:
    """Return the words in `text`, as a shell would split them; UsageError for a broken quote."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        reason = str(error).lower()
        raise UsageError(f"{flag} {text!r}: {reason}; close it, or write \\ before it") from None


def whole(text: str, flag: str, least: int, most: int, what: str = "a whole number") -> int:
    """Return the number in `text`, the value of `flag`; UsageError if it is none from `least` to `most`."""
    digits = text.lstrip("0") or text[:1]
    if not (text.isascii() and text.isdecimal() and len(digits) <= len(str(most)) and least <= int(digits) <= most):
        raise UsageError(f"{flag}: expected {what} from {least} to {most}, got {quoted(text)}")
    return int(digits)


def parse_port(text: str, flag: str, least: int = 1) -> int:
    """Return the port in `text`, the value of `flag`; 0, where that is allowed, means any."""
    return whole(text, flag, least, _HIGHEST_PORT, "a port")


def parse_times(text: str, flag: str) -> int:
    """Return how often something is to be done, 0 or more."""
    return whole(text, flag, 0, 999_999)


def parse_rank_count(text: str, flag: str) -> int | None:
    """Return how many ranks there are to be; None for auto."""
    return None if text == "auto" else whole(text, flag, 1, _MOST_RANKS, "auto or a whole number")


def parse_seconds(text: str, flag: str) -> float:
    """Return the seconds in `text`, the value of `flag`: more than none, and not for ever."""
    return parse_positive(text, flag, "seconds")


def parse_positive(text: str, flag: str, unit: str) -> float:
    """Return the number of `unit` in `text`, the value of `flag`: above 0, and finite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"{flag}: expected a number of {unit} above 0, got {quoted(text)}")
    return number


def parse_signals(text: str | None, flag: str) -> frozenset[int]:
    """Return the signals in `text`, the value of `flag`: USR1, USR2, or both with a comma between."""
    names = [name.strip().upper().removeprefix("SIG") for name in (text or "").split(",") if text is not None]
    if any(name not in ("USR1", "USR2") for name in names):
        raise UsageError(f"{flag}: expected USR1, USR2 or USR1,USR2, got {quoted(text or '')}")
    return frozenset(signal.Signals[f"SIG{name}"] for name in names)


def parse_start_timeout(text: str | None, flag: str, hosts: int) -> float:
    """Return the seconds in `text`, the value of `flag`; without it, enough for so many hosts."""
    return 30.0 + 0.2 * hosts if text is None else parse_seconds(text, flag)


def parse_ranks(text: str, size: int, flag: str) -> frozenset[int]:
    """Return the ranks that `text`, the value of `flag`, names; UsageError if they are not ranks of `size`.

    >>> sorted(parse_ranks("0,3-5", 8, "--ranks"))
    [0, 3, 4, 5]
    """
    ranks: set[int] = set()
    for item in text.split(","):
        match = _RANKS.fullmatch(item.strip())
        if match is None:
            raise UsageError(
                f"{flag} {quoted(text, _SHOWN)}: expected ranks and ranges with commas between them, as in 0,3-5, "
                f"got {quoted(item.strip(), _SHOWN)}"
            )
        first, last = (_rank(digits, size, flag) for digits in (match[1], match[2] or match[1]))
        if last < first:
            raise UsageError(
                f"{flag} {quoted(text, _SHOWN)}: the range {first}-{last} is reversed; write {last}-{first}"
            )
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def _rank(digits: str, size: int, flag: str) -> int:
    number = digits.lstrip("0") or "0"
    if len(number) > len(str(size)) or int(number) >= size:  # int() refuses thousands of digits
        known = f"ranks are 0 {'and' if size == 2 else 'to'} {size - 1}" if size > 1 else "only rank is 0"
        raise UsageError(f"{flag}: there is no rank {shortened(number, _SHOWN)}; with -np {size} the {known}")
    return int(number)
