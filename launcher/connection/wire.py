"""What ringrun and its agents say to each other; link.py is what they say it over.

A frame is one tag byte and a payload: `o` and `e` carry raw bytes of a rank's stdout and stderr, `i` of its stdin, and
`j` carries JSON. Nothing is ever unpickled.

    agent   → ringrun   Hello, Note …, Started, Output …, then Ended; or NotStarted instead of Started and the rest;
                        a State for each Ask, Stalled, InInit and Initialized at any time between
    ringrun → agent     Setup once all agents are there, Signal …, Ask …, then End; the end of the connection means
                        the same

The stdin that one rank gets: where it is on ringrun's host, the descriptor follows Setup; elsewhere the agent sends
InputWanted for each Input.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

ADDRESS_VARIABLE = "RINGRUN_ADDRESS"
"""Where ringrun listens: the text of a link.Address."""

AUTHKEY_VARIABLE = "RINGRUN_AUTHKEY"
"""The key both sides must know, in hexadecimal digits."""


@dataclass(frozen=True)
class Message:
    """What one side says to the other."""


@dataclass(frozen=True)
class Hello(Message):
    """An agent is there and waits for Setup.

    `port` is a free TCP port of its host: rank 0's the MASTER_PORT that the user has set, and 0 if that is in use.
    """

    rank: int
    size: int
    host: str
    port: int


@dataclass(frozen=True)
class Setup(Message):
    """Start the command: in `folder`, with `variables` in addition to the agent's own.

    `master` is where rank 0 may listen, address and port; `gives_stdin`: this rank reads ringrun's standard input;
    `open_files`: how many files it may have open by default, 0 for as many as its agent.
    """

    master_address: str
    master_port: int
    folder: str
    variables: dict[str, str]
    gives_stdin: bool
    open_files: int = 0


@dataclass(frozen=True)
class Note(Message):
    """A line of the agent's own, to be shown on ringrun's stderr."""

    text: str


@dataclass(frozen=True)
class Started(Message):
    """The rank's command runs as process `pid`, the leader of a process group of that number; `device` is its GPU."""

    pid: int
    device: str = ""


@dataclass(frozen=True)
class NotStarted(Message):
    """The rank's command could not be executed."""

    reason: str


@dataclass(frozen=True)
class Output(Message):
    """Bytes that the rank wrote, cut anywhere."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True)
class InputWanted(Message):
    """The rank can take more of its stdin."""


@dataclass(frozen=True)
class Input(Message):
    """A piece of the rank's stdin; empty at its end."""

    data: bytes


@dataclass(frozen=True)
class RankError:
    """The uncaught exception that a rank wrote to its error file; `lost_ranks` are those it blames."""

    exception: str
    message: str
    traceback: str
    lost_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended(Message):
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


@dataclass(frozen=True)
class State(Message):
    """The answer to Ask `number`.

    `doing` is what the rank waits for, or the user's line that it is at; `stacks` its Python stacks, in text that is
    equal for ranks which are at the same place; `silent` says why there are none. Each may be empty.
    """

    number: int
    doing: str
    stacks: str
    silent: str


@dataclass(frozen=True)
class Stalled(Message):
    """ringreduce in the rank reports that the job, or a part of it, has not moved for long."""

    report: str


@dataclass(frozen=True)
class InInit(Message):
    """The rank waits in ringreduce.init(); worth a report after `report_after_s`."""

    report_after_s: float


@dataclass(frozen=True)
class Initialized(Message):
    """ringreduce.init() has returned in the rank."""


@dataclass(frozen=True)
class Ask(Message):
    """Report what the rank does."""

    number: int


@dataclass(frozen=True)
class Signal(Message):
    """Send signal `number` to the rank's process group."""

    number: int


@dataclass(frozen=True)
class End(Message):
    """Kill what is left of the rank's process group and exit."""


_STREAM_TAGS: dict[str, bytes] = {"stdout": b"o", "stderr": b"e"}
_INPUT_TAG = b"i"
_JSON_TAG = b"j"
_JSON_KINDS: dict[str, Callable[..., Message]] = {
    kind.__name__: kind for kind in Message.__subclasses__() if kind not in (Output, Input)
}


def encode(message: Message) -> bytes:
    """Return the frame of `message`."""
    if isinstance(message, Output):
        return _STREAM_TAGS[message.stream] + message.data
    if isinstance(message, Input):
        return _INPUT_TAG + message.data
    return _JSON_TAG + json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(frame: bytes) -> Message:
    """Return the message of `frame`; ValueError for a frame that `encode` cannot have made."""
    tag, payload = frame[:1], frame[1:]
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
    raise ValueError(f"a message that ringrun does not understand: {frame[:40]!r} ({reason})")


def _from_json(payload: bytes) -> Message:
    given = json.loads(payload)
    kind = _JSON_KINDS[given.pop("kind")]
    if kind is Ended:
        given["sent"] = tuple(given["sent"])
        given["error"] = rank_error(given["error"])
    message = kind(**given)
    for field in fields(message):
        if field.type in (int, str, bool) and type(given.get(field.name, field.default)) is not field.type:
            raise TypeError(field.name)
    return message


def rank_error(fields: Mapping[str, object] | None) -> RankError | None:
    """Return the RankError that the JSON object `fields` describes; what is missing counts as empty."""
    if not fields:
        return None
    lost = fields.get("lost_ranks") or ()
    return RankError(
        exception=str(fields.get("exception", "")),
        message=str(fields.get("message", "")),
        traceback=str(fields.get("traceback", "")),
        lost_ranks=tuple(int(rank) for rank in lost) if isinstance(lost, (list, tuple)) else (),
    )
