"""What ringrun and its agents say to each other; link.py is what they say it over.

A message is one tag byte and a payload: `o` and `e` carry raw bytes of a rank's stdout and stderr, `i` of its stdin,
and `j` carries JSON. Nothing is ever unpickled.

    agent   → ringrun   Hello, Note …, Started, Output …, Died, then Ended; or NotStarted instead of Started and the
                        rest; an Answer for each Ask, and what else is a Report, at any time between
    ringrun → agent     Setup once all agents are there, Taken …, Signal …, Ask …, Record …, Membership …, Hosts …, then
                        End; the end of the connection means the same
    node    → head      Node, on its first connection; on one more for each Run: Running, Output …, Ended
    head    → node      Run …, then Release, on the first one; Input … on the others: of `ringrun join`, see join/

ringrun reads all that agents say at once, however slow the reader of its own output is. So that this fills no memory,
an agent sends no more than MOST_AHEAD_BYTES of Output ahead of what ringrun says is Taken, until the rank ends: then
what is left in its pipes.

The stdin that one rank gets: where it is on ringrun's host, the descriptor follows Setup; elsewhere the agent sends
InputWanted for each Input.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

from ..network import LOST_AFTER_S

StreamName = Literal["stdout", "stderr"]

MOST_AHEAD_BYTES = 1 << 18
TAKEN_BYTES = MOST_AHEAD_BYTES // 4
"""ringrun says what is Taken when it is so much."""

AUTHKEY_VARIABLE = "RINGRUN_AUTHKEY"
"""The key both sides must know, in hexadecimal digits."""

CONNECT_S = 15.0


class Address(NamedTuple):
    """Where ringrun listens: at a socket's `path` on its own `host`, and at a TCP port of `addresses`, if any.

    connect_s:     how long an agent goes on trying to connect
    lost_after_s:  how long either end may be silent
    """

    host: str
    path: str
    port: int = 0
    addresses: tuple[str, ...] = ()
    connect_s: float = CONNECT_S
    lost_after_s: float = LOST_AFTER_S

    def __str__(self) -> str:
        return json.dumps(self)

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address that `str` gave; ValueError for anything else."""
        host, path, port, addresses, connect_s, lost_after_s = json.loads(text)
        return cls(host, path, port, tuple(addresses), connect_s, lost_after_s)


def portable(text: str) -> str:
    """Return a word, a path or a variable of this host as text that stands for the same bytes in every locale."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def native(text: str) -> str:
    """Return what `portable` has made, as this host's Python has it."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


class Hello(NamedTuple):
    """An agent is there and waits for Setup: of which rank, as the MPI's launcher says it, and on which host.

    `host` is what the host calls itself. `port` is rank 0's alone: a TCP port of its host that is kept for it, 0 if the
    MASTER_PORT that the user has set cannot be. `boot` is which boot of a kernel it runs on, empty where nobody knows.
    `cpus` are those that it may run on, as in 0-3,7.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    boot: str = ""
    cpus: str = ""


class Setup(NamedTuple):
    """Start `command`, its program an absolute path: in `folder`, with `variables` in addition to the agent's own.

    It travels here, and on no command line: each program that starts another would read it in its own way.
    `master` is where rank 0 may listen, address and port; `gives_stdin`: this rank reads ringrun's standard input;
    `open_files`: how many files it may have open by default, 0 for as many as its agent; `commits`: the folder in which
    this host keeps commits of an elastic job for its next attempt, empty for none.
    """

    command: tuple[str, ...]
    master_address: str
    master_port: int
    folder: str
    variables: dict[str, str]
    gives_stdin: bool
    open_files: int = 0
    commits: str = ""

    def mapped(self, change: Callable[[str], str]) -> "Setup":
        """Return it with `change` made to all that consists of bytes on a host: words, paths and variables."""
        command, folder, commits = tuple(map(change, self.command)), change(self.folder), change(self.commits)
        variables = {change(name): change(value) for name, value in self.variables.items()}
        return self._replace(command=command, folder=folder, commits=commits, variables=variables)


class Note(NamedTuple):
    """A line of the agent's own, to be shown on ringrun's stderr."""

    text: str


class Started(NamedTuple):
    """The rank's command runs as process `pid`, the leader of a process group of that number; `device` is its GPU."""

    pid: int
    device: str = ""


class NotStarted(NamedTuple):
    """The rank's command could not be executed."""

    reason: str


class Output(NamedTuple):
    """Bytes that the rank wrote, cut anywhere."""

    stream: StreamName
    data: bytes


class Taken(NamedTuple):
    """So many more bytes of Output are printed, and kept."""

    nbytes: int


class InputWanted(NamedTuple):
    """The rank can take more of its stdin."""


class Input(NamedTuple):
    """A piece of the rank's stdin; empty at its end."""

    data: bytes


class RankError(NamedTuple):
    """The uncaught exception that a rank wrote to its error file.

    `lost_ranks` are those it blames; `culprit` is the one that has what all ranks raise it for, -1 for none.
    """

    exception: str
    message: str
    traceback: str
    lost_ranks: tuple[int, ...] = ()
    culprit: int = -1


class Ended(NamedTuple):
    """The rank's command has ended, and all it wrote has been sent.

    `code` is its exit code, or minus the signal that ended it; `sent` are the signals that ringrun had sent it
    until then; `at_s` is when it ended, in seconds since the epoch; `ran_s` how long it ran; `oom` what is known of the
    kernel's OOM killer, in words.
    """

    code: int
    at_s: float
    sent: tuple[int, ...] = ()
    error: RankError | None = None
    ran_s: float | None = None
    oom: str = ""


class Died(NamedTuple):
    """The rank's command dies, or has ended: what Ended will say of `code` and `at_s`, before what it wrote is sent."""

    code: int
    at_s: float


class Answer(NamedTuple):
    """The answer to Ask `number`.

    `doing` is what the rank `waits` for, or the user's line that it is at; `stacks` its Python stacks, in text that is
    equal for ranks which are at the same place; `silent` says why there are none. Each may be empty.
    """

    number: int
    doing: str
    stacks: str
    silent: str
    waits: bool = False


class Stalled(NamedTuple):
    """ringreduce in the rank reports that the job, or a part of it, has not moved for long."""

    report: str


class InInit(NamedTuple):
    """The rank waits in ringreduce.init(); worth a report after `report_after_s`."""

    report_after_s: float


class Initialized(NamedTuple):
    """ringreduce.init() has returned in the rank."""


class Grouped(NamedTuple):
    """A process of the rank is `member` of a process group of torch's with `size` members."""

    member: int
    size: int


class Alone(NamedTuple):
    """The rank's Python has joined no other rank, as far as it knows, and `ends`, or has run for a minute.

    `imported` is what it computes with: a front end's name, where there is one. `in_vain`: it may be in a group, which
    its front end does not use.
    """

    imported: str
    ends: bool
    in_vain: bool


class Suspects(NamedTuple):
    """Of an elastic job: `ranks` have kept this one waiting for too long; `why` is its report."""

    ranks: tuple[int, ...]
    why: str


class Reformed(NamedTuple):
    """Of an elastic job: the world of Membership `number` works in this rank."""

    number: int


class Meeting(NamedTuple):
    """Of an elastic job: this rank waits for the others of Membership `number`; said every second."""

    number: int


class Left(NamedTuple):
    """The rank leaves its world in order."""

    why: str


class Committed(NamedTuple):
    """Of an elastic job: the rank has committed since `hosts` came, and awaits the restart with them."""

    hosts: str


class Hosts(NamedTuple):
    """Of an elastic job: these `hosts` have come. When the ranks have committed the job is started again with them."""

    hosts: str


class Membership(NamedTuple):
    """Of an elastic job: the world is to have these `ranks`, numbered as in the first world.

    `number` is higher than that of any list before; the first world is number 0. `dead` says how the ranks that are
    gone for good have ended: in words, by rank.
    """

    number: int
    ranks: tuple[int, ...]
    dead: dict[str, str]


class Ask(NamedTuple):
    """Report what the rank does."""

    number: int


class Record(NamedTuple):
    """The rank is to record its steps for `record_s` more seconds, and to say what it has Measured; 0: count only."""

    record_s: float


class Signal(NamedTuple):
    """Send signal `number` to the rank's process group; one that is `forwarded` for the user, to its first process."""

    number: int
    forwarded: bool = False


class WakeUp(NamedTuple):
    """Of an elastic job: others wait for the rank's end; if it is stopped, let it go on, and say so."""


class End(NamedTuple):
    """Kill what is left of the rank's process group and exit.

    `keeps_commits`: leave the commits of an elastic job in this host's memory, for its next attempt.
    """

    keeps_commits: bool = False


class Node(NamedTuple):
    """A node lends itself to a job: its `number`, -1 if none is known, and how many ranks it can take.

    `machine`, where only a part of a host is lent: what other parts of it say, too. `gpus`: those of this part, as
    CUDA_VISIBLE_DEVICES lists them; empty where nothing is known of them.
    """

    number: int
    host: str
    slots: int
    machine: str = ""
    gpus: str = ""


class Run(NamedTuple):
    """Give `command` to a shell; `gpus`: what is to be visible to it, if not what is now."""

    number: int
    command: str
    gpus: str = ""


class Running(NamedTuple):
    """This connection is for the command of Run `number`."""

    number: int


class Release(NamedTuple):
    """The job needs the node no more: it has ended with `code`, or there is a reason `why`."""

    code: int
    why: str


class Measured(NamedTuple):
    """What the rank has measured of its steps: a JSON object, see run_report/collect.py."""

    text: str


class Finding(NamedTuple):
    """What --check has found in the rank."""

    text: str


class Notice(NamedTuple):
    """What ringreduce in the rank says of the job, to be shown once, though several ranks may say it."""

    text: str


Report: TypeAlias = (
    Answer | Stalled | InInit | Initialized | Grouped | Alone | Suspects | Reformed | Meeting | Left | Committed
) | (Measured | Finding | Notice)
"""What the agent passes on of its rank, at any time."""


class Joining(NamedTuple):
    """A process that something else has started is rank `rank` of `size`.

    boot: as in Hello.  pmix: the file of PMIx that its MPI has loaded, if that is Open MPI.
    """

    rank: int
    size: int
    host: str
    boot: str
    pid: int
    pmix: str = ""


class Awaited(NamedTuple):
    """These ranks have not come yet."""

    ranks: tuple[int, ...]


class Refused(NamedTuple):
    """A process is no rank."""

    why: str


class Joined(NamedTuple):
    """All ranks are there, in the world of this name. By `variables` a rank's MPI finds what answers it.

    port: where that listens, for MPICH.
    """

    name: str
    variables: dict[str, str]
    port: int = 0


class Begun(NamedTuple):
    """The MPI of all ranks has started."""


class Lost(NamedTuple):
    """A rank ended without a message."""

    rank: int
    how: str


class Leaving(NamedTuple):
    """A rank's MPI has ended, or is not used any more."""


Message: TypeAlias = (
    Report
    | (Hello | Note | Started | NotStarted | Output | InputWanted | Died | Ended)  # of an agent
    | (Setup | Taken | Input | Ask | Record | Signal | WakeUp | Membership | Hosts | End)  # of ringrun
    | (Node | Running | Run | Release)  # between the nodes of `ringrun join`
    | (Joining | Awaited | Refused | Joined | Begun | Lost | Leaving)  # of ranks, see pmi/
)

_STREAM_TAGS: dict[str, bytes] = {"stdout": b"o", "stderr": b"e"}
_INPUT_TAG = b"i"
_JSON_TAG = b"j"
_ITEMS: dict[object, type] = {tuple[int, ...]: int, tuple[str, ...]: str}
"""What the lists of JSON become, by the annotation of a field."""
_JSON_KINDS: dict[str, Callable[..., Message]] = {
    kind.__name__: kind for kind in get_args(Message) if kind not in (Output, Input)
}


def encode(message: Message) -> bytes:
    """Return `message` as bytes."""
    if isinstance(message, Output):
        return _STREAM_TAGS[message.stream] + message.data
    if isinstance(message, Input):
        return _INPUT_TAG + message.data
    fields = {"kind": type(message).__name__, **message._asdict()}
    if isinstance(message, Ended) and message.error:
        fields["error"] = message.error._asdict()
    return _JSON_TAG + json.dumps(fields).encode()


def decode(data: bytes) -> Message:
    """Return the message in `data`; ValueError for what `encode` cannot have made."""
    tag, payload = data[:1], data[1:]
    if tag == b"o":
        return Output("stdout", payload)
    if tag == b"e":
        return Output("stderr", payload)
    if tag == _INPUT_TAG:
        return Input(payload)
    try:
        if tag == _JSON_TAG:
            return _from_json(payload)
        reason = f"unknown tag {tag!r}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = repr(error)
    raise ValueError(f"a message that ringrun does not understand: {data[:40]!r} ({reason})")


def _from_json(payload: bytes) -> Message:
    given = json.loads(payload)
    kind = _JSON_KINDS[given.pop("kind")]
    if kind is Ended:
        given["error"] = rank_error(given["error"])
    fields = kind.__annotations__
    items = {name: _ITEMS[fields[name]] for name in given if fields.get(name) in _ITEMS}
    given |= {name: tuple(map(kind_of_item, given[name])) for name, kind_of_item in items.items()}
    message = kind(**given)
    for (name, kind_of_field), value in zip(fields.items(), message, strict=True):
        if kind_of_field in (int, str, bool) and type(value) is not kind_of_field:
            raise TypeError(name)
    return message


def rank_error(fields: Mapping[str, object] | None) -> RankError | None:
    """Return the RankError that the JSON object `fields` describes; what is missing counts as empty."""
    if not fields:
        return None
    lost, culprit = fields.get("lost_ranks") or (), fields.get("culprit")
    return RankError(
        exception=str(fields.get("exception", "")),
        message=str(fields.get("message", "")),
        traceback=str(fields.get("traceback", "")),
        lost_ranks=tuple(int(rank) for rank in lost) if isinstance(lost, (list, tuple)) else (),
        culprit=culprit if isinstance(culprit, int) else -1,
    )
