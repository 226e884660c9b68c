"""Other hosts over ssh. The remote command is a constant; what varies travels behind it, on standard input.

ssh joins its words with spaces and gives them to the remote user's shell, whichever that is: quoting for all of
them cannot be right. So that shell gets REMOTE_COMMAND alone, and xargs hands the words from standard input, with a
zero byte behind each, to a small sh script as its arguments:

    all NAME=VALUE … -- /path/of/python -c …

The script sets the variables, runs the program and writes its exit code behind its stderr: ssh's own 255 could be
the program's, and xargs says 123 for any failure. A login that reads standard input takes words away, the first of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import Answer, Problem, Runner
from .parallel import Outcome, Task
from .refusals import READ_BEFORE, program_problem, ssh_problem, took_too_long

_FIRST = "all"

# in single quotes, without `!`: the same to sh, bash, zsh, csh and fish
REMOTE_COMMAND = (
    "xargs -0 sh -c "
    f'\'[ "$1" = {_FIRST} ] || {{ echo "{READ_BEFORE}" >&2; exit 1; }}; shift; '
    'until [ "$1" = -- ]; do export "$1"; shift; done; shift; "$@"; echo "ringrun: exit $?" >&2\' ringrun'
)

MAX_BYTES = 60_000
"""Of argv and variables together; xargs cuts what is much longer into several commands."""

_EXIT = b"ringrun: exit "


class Ssh(Runner):
    """Runs programs on other hosts over ssh.

    prefix:     the argv that `host command` follows; see ssh.ssh_argv. ssh's own limit should come before
                `timeout_s`: it says what it waited for.
    """

    def __init__(self, prefix: Sequence[str], timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._prefix = list(prefix)

    def tasks(self, names: Sequence[str], argv: Sequence[str], variables: Mapping[str, str]) -> list[Task]:
        """See `Runner.tasks`; words and variables have at most MAX_BYTES together."""
        stdin = payload(argv, variables)
        return [Task([*self._prefix, name, REMOTE_COMMAND], stdin) for name in names]

    def _answer(self, name: str, program: str, outcome: Outcome) -> Answer:
        stderr, code = split_exit(outcome.stderr)
        if code is not None:
            arrived_s = outcome.arrived_by(len(outcome.stdout))
            return Answer(name, outcome.stdout, stderr, code, arrived_s, program_problem(program, code, stderr))
        if outcome.code is None:
            problem = took_too_long(self._timeout_s, stderr)
        else:
            said = stderr or outcome.stdout.decode(errors="replace")  # a login shell may say why it refuses on stdout
            problem = self._problem(name, outcome, said)
        return Answer(name, outcome.stdout, stderr, problem=problem)

    def _problem(self, name: str, outcome: Outcome, said: str) -> Problem:
        return ssh_problem(name, outcome.code or 0, said, outcome.not_run)


def payload(argv: Sequence[str], variables: Mapping[str, str]) -> bytes:
    """Return the words for xargs, a zero byte behind each."""
    words = [_FIRST, *(f"{name}={value}" for name, value in variables.items()), "--", *argv]
    data = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    if data.count(b"\0") != len(words) or len(data) > MAX_BYTES:
        raise ValueError(f"{len(words)} words of {len(data)} bytes: expected no zero byte, at most {MAX_BYTES} bytes")
    return data


def split_exit(stderr: bytes) -> tuple[str, int | None]:
    """Return what the program wrote to stderr, and its exit code; None where the remote script did not end.

    >>> split_exit(b"a warning\\nringrun: exit 3\\n")
    ('a warning\\n', 3)
    """
    before, mark, after = stderr.rpartition(_EXIT)
    digits = after.split(b"\n")[0]
    if not mark or not digits.isdigit() or len(digits) > 3:
        return stderr.decode(errors="replace"), None
    return before.decode(errors="replace"), int(digits)
