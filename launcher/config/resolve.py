"""ringreduce's settings on ringrun's command line and in its file: each one's value, and where it came from.

A flag counts more than the file, the file more than a variable, a variable more than the default. What a flag or the
file says becomes a RINGREDUCE_… variable of all ranks; ringreduce's own parser checks it before any rank starts.

ringreduce is imported only where a flag that is not ringrun's own, or a file, asks for it: that takes 0.2 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import LIST, Add, Parser, may_be_empty, whole
from ..errors import UsageError
from ..forward import SET_BY_RINGRUN
from ..text import close_matches, columns
from . import horovod
from .file import Entry, read

_NOT_IN_FILE = ("help", "version", "config_file", "show_config", "check_build", "dry_run")
"""What ringrun itself is to do now; no setting of a job."""

_BY_OWN_FLAGS = ("report",)
"""Settings that flags of ringrun's own set, of the same name and with another value."""

_MB, _MOST_MB = "a whole number of MB (2^20 bytes)", 1 << 20

_Level = dict[str, tuple[Any, str]]
"""What the command line, or the file, gives: by argparse's destination the value, and `--flag` or `file:line`."""


@dataclasses.dataclass(frozen=True)
class Value:
    """What one setting was given, and where: `--flag`, `file:line`, the variable's name, or `default`."""

    text: str
    source: str
    is_explicit: bool = False
    """Given by a flag or the file, not inherited."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What the command line and its file say."""

    options: argparse.Namespace
    """ringrun's own flags, those of the file merged in, and the user's `command`."""

    sources: Mapping[str, str]
    """Of each of them, by its destination; `default` where it was not given."""

    settings: Mapping[str, Value]
    """ringreduce's; empty where nothing asked for them."""

    notices: Sequence[str]
    """What the user should know of flags that have no effect here."""

    @property
    def variables(self) -> dict[str, str]:
        """The variables that flags and the file set for all ranks."""
        return {variable(name): value.text for name, value in self.settings.items() if value.is_explicit}

    def place(self, destination: str) -> str:
        """Return `file:line: ` to begin a message about an own flag that the file has set, else nothing."""
        source = self.sources[destination]
        return "" if source == "default" or source.startswith("-") else f"{source}: "

    def flag(self, destination: str) -> str:
        """Return how a message about an own flag begins: with its line, if it stands in the file."""
        short = {"np": "-np", "hosts": "-H"}
        return self.place(destination) + short.get(destination, f"--{destination.replace('_', '-')}")

    def table(self) -> str:
        """Return one aligned line for each flag of ringrun's and each setting: name, value, where it came from."""
        shown = {name: source for name, source in self.sources.items() if name not in _NOT_IN_FILE}
        own = [(name, _shown(getattr(self.options, name)), source) for name, source in shown.items()]
        settings = [(name, _shown(value.text), value.source) for name, value in self.settings.items()]
        return "\n".join(columns(own + settings))


def variable(setting: str) -> str:
    """Return the variable of a setting."""
    return f"RINGREDUCE_{setting.upper()}"


def public_settings() -> dict[str, Any]:
    """Return the defaults of ringreduce's settings that are flags, by name."""
    from ringreduce.settings import Settings

    fields = dataclasses.fields(Settings)
    hidden = {*map(variable, _BY_OWN_FLAGS), *SET_BY_RINGRUN}
    return {field.name: field.default for field in fields if variable(field.name) not in hidden}


def add_own_flags(add: Add) -> None:
    """Add the flags that this file serves to ringrun's own."""
    add("--config-file", metavar="FILE", help="read flags from a YAML file, as in cycle_time_ms: 5")
    add("--show-config", action="store_true", help="print all settings, and where each comes from")
    add("--check-build", "-cb", action="store_true", help="print which frameworks and MPIs are found")


def resolve(parser: Parser, arguments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Return what `arguments` and their file say; `parser` knows ringrun's own flags. Raises UsageError."""
    own = list(parser.flags)
    first, unknown = parser.parse_known_args(arguments)
    seems_plain = not unknown and not (first.command and first.command[0].startswith("-"))
    defaults = {}
    if not seems_plain or first.config_file or first.show_config:
        defaults = public_settings()
        _add_setting_flags(parser, defaults)
    command, flags = _command_line(parser, arguments)
    path, _ = flags.get("config_file", (None, ""))
    file: _Level = {} if path is None else _file(parser, read(path))
    by_flag, by_file = (_settings(level, defaults) if defaults else {} for level in (flags, file))
    settings = {
        name: by_flag.get(name) or by_file.get(name) or _inherited(name, environ, default)
        for name, default in defaults.items()
    }
    if settings:
        _check(settings, environ)
    options, sources = argparse.Namespace(command=command), {}
    for action in own:
        value, source = flags.get(action.dest) or file.get(action.dest) or (action.default, "default")
        setattr(options, action.dest, value)
        sources[action.dest] = source
    return Config(options, sources, settings, [notice for level in (flags, file) for notice in _notices(level)])


def _add_setting_flags(parser: Parser, defaults: Mapping[str, Any]) -> None:
    """Add a flag for each setting, and horovodrun's; a setting that is on or off has --name and --no-name."""
    add = parser.group("", argparse.SUPPRESS)
    for name, default in defaults.items():
        action: Any = argparse.BooleanOptionalAction if isinstance(default, bool) else "store"
        metavar = LIST if name == "check" else None
        add(
            f"--{name.replace('_', '-')}",
            dest=f"setting {name}",
            action=action,
            metavar=metavar,
            help=argparse.SUPPRESS,
        )
    horovod.add_flags(add)


def _command_line(parser: Parser, arguments: Sequence[str]) -> tuple[list[str], _Level]:
    """Return the user's command, and the flags before it."""
    unset = argparse.Namespace(**{action.dest: None for action in parser.flags})  # defaults would hide what was given
    given = vars(parser.parse_args(arguments, unset))
    level: _Level = {}
    for action in parser.flags:
        if (value := given[action.dest]) is not None:
            is_off = isinstance(action, argparse.BooleanOptionalAction) and value is False
            level[action.dest] = (value, action.option_strings[-1 if is_off else 0])
    command = given["command"]
    switches = [names for names in (action.option_strings for action in parser.flags) if names[-1].startswith("--no-")]
    for on, off in (names for names in switches if len(names) == 2):
        before = arguments[len(arguments) - len(command) - 1] if command else ""
        if before in (on, off) and command[0].lower() in ("0", "1", "true", "false", "yes", "no"):
            raise UsageError(f"{before} {command[0]}: it takes no value; write {on} or {off}")
    return command, level


def _file(parser: Parser, entries: Sequence[Entry]) -> _Level:
    """Return what the entries of a file mean to `parser`; UsageError, with file and line, for what it does not know."""
    flags = {
        option.lstrip("-"): action
        for action in parser.flags
        for option in action.option_strings
        if action.dest not in _NOT_IN_FILE and len(option) > 2
    }
    level: _Level = {}
    for entry in entries:
        action = flags.get(entry.flag)
        if action is None:
            raise UsageError(f"{entry.place}: {_unknown(entry, list(flags))}")
        if action.dest in level:
            raise UsageError(f"{entry.place}: {entry.key} is given twice; the first is at {level[action.dest][1]}")
        level[action.dest] = (_value(entry, action), entry.place)
    return level


def _value(entry: Entry, action: argparse.Action) -> Any:
    """Return what argparse would: a list of a flag that may be given several times, or takes several words.

    A list is also what a flag takes that has commas between its values.
    """
    if entry.kind == "bool" and action.nargs != 0:
        raise UsageError(
            f"{entry.place}: {entry.key}: expected a value, got {entry.text}; remove the line, or quote it"
        )
    if entry.kind != "list" and not entry.text and action.nargs != 0 and not may_be_empty(action):
        raise UsageError(f"{entry.place}: {entry.key}: expected a value, but it is empty; remove the line")
    if isinstance(action, argparse._AppendAction) or (entry.kind == "list" and action.nargs):
        return list(entry.texts)
    if entry.kind == "list" and action.metavar == LIST and entry.texts:
        return ",".join(entry.texts)
    if entry.kind == "list":
        raise UsageError(f"{entry.place}: {entry.key}: expected one value, but it is a list")
    return _switched(entry, action) if action.nargs == 0 else entry.text


def _unknown(entry: Entry, flags: Sequence[str]) -> str:
    keys = [flag.replace("-", "_") for flag in flags]
    nearest = close_matches(entry.flag.replace("-", "_"), keys)
    hint = f"did you mean {nearest[0]}?" if nearest else "keys are flags without the dashes before them; see ringrun -h"
    return f"unknown key {entry.key!r}; {hint}"


def _switched(entry: Entry, action: argparse.Action) -> bool:
    if entry.kind != "bool":
        raise UsageError(f"{entry.place}: {entry.key}: expected true or false, got {entry.text!r}")
    is_on = entry.text.lower() in ("true", "yes", "on")
    is_negative = isinstance(action, argparse.BooleanOptionalAction) and f"--{entry.flag}" != action.option_strings[0]
    return is_on != is_negative


def _settings(level: _Level, defaults: Mapping[str, Any]) -> dict[str, Value]:
    """Return the settings that `level` gives, under whatever name."""
    from ringreduce.settings import LEAST_FUSION_BYTES

    found: dict[str, Value] = {}
    for destination, (value, source) in level.items():
        kind, _, name = destination.partition(" ")
        if kind == "setting":
            text = str(int(value)) if isinstance(value, bool) else value
        elif kind == "horovod" and name in horovod.ALIASES:
            text = value
            if name in horovod.IN_MB:
                text = str(max(LEAST_FUSION_BYTES, whole(value, _named(source, name), 0, _MOST_MB, _MB) << 20))
            name = horovod.ALIASES[name]
        elif kind == "horovod" and name in horovod.SWITCHES:
            name, turns_on = horovod.SWITCHES[name]
            text = str(int(turns_on == value))  # false in a file: the opposite
        else:
            continue
        if name in found:
            raise UsageError(f"{source} and {found[name].source} both set {name}; give one of them")
        found[name] = Value(text, source, is_explicit=True)
    is_on, source = level.get(horovod.destination(horovod.STALL_CHECK), (None, ""))
    if is_on is False or (is_on and "stall_check_s" not in found):
        found["stall_check_s"] = Value(str(defaults["stall_check_s"] if is_on else 0.0), source, is_explicit=True)
    return found


def _named(source: str, name: str) -> str:
    """Return where a message begins: `--flag`, or `file:line: key`."""
    return source if source.startswith("--") else f"{source}: {name.replace('-', '_')}"


def _inherited(name: str, environ: Mapping[str, str], default: Any) -> Value:
    from ringreduce.settings import HOROVOD

    theirs = [each for each, setting in HOROVOD.items() if setting == name]
    for each in (variable(name), *theirs):
        if each in environ:
            return Value(environ[each], each)
    return Value(str(int(default)) if isinstance(default, bool) else str(default), "default")


def _check(settings: Mapping[str, Value], environ: Mapping[str, str]) -> None:
    """Raise UsageError for what ringreduce would refuse in init(), and say who set it."""
    from ringreduce.collectives.cost_model import ALGORITHMS, Constants
    from ringreduce.errors import SettingsError
    from ringreduce.settings import Settings

    explicit = {variable(name): value.text for name, value in settings.items() if value.is_explicit}
    try:
        parsed = Settings.from_environment({**environ, **explicit})
        Constants.parse(parsed.costs)
        if parsed.algorithm not in ("auto", *ALGORITHMS):
            known = ", ".join(ALGORITHMS)
            raise SettingsError(f"RINGREDUCE_ALGORITHM={parsed.algorithm!r}: expected auto or one of {known}")
    except SettingsError as error:
        begins = str(error)
        guilty = [
            value.source
            for name, value in settings.items()
            if value.is_explicit
            and (begins.startswith((f"{variable(name)}=", f"{variable(name)}:")) or f"{name}=" in begins)
        ]
        raise UsageError(": ".join([*dict.fromkeys(guilty), begins])) from None


def _notices(level: _Level) -> list[str]:
    """Return a line for each flag that has no effect here; for autotune's, one line together."""
    ignored = {**horovod.IGNORED_SWITCHES, **horovod.IGNORED_VALUES}
    given = {name: level[at][1] for name in ignored if (at := horovod.destination(name)) in level and level[at][0]}
    tuning = [name for name in given if ignored[name] == horovod.TUNING]
    return [
        f"{_named(source, name)} has no effect here ({ignored[name]})"
        for name, source in given.items()
        if name not in tuning[1:]
    ]


def _shown(value: object) -> str:
    """Return a value in one line; nothing as ''."""
    text = "" if value is None else shlex.join(value) if isinstance(value, list) else str(value)
    return text if text.isprintable() and text else repr(text)
