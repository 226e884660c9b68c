"""ringreduce's settings on ringrun's command line and in its file: each one's value, and where it came from.

A flag counts more than the file, the file more than a variable, a variable more than the default. What a flag or the
file says becomes a RINGREDUCE_… variable of all ranks; ringreduce's own parser checks it before any rank starts.

ringreduce is imported only where a flag that is not ringrun's own, or a file, asks for it: that takes 0.2 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UsageError
from . import horovod
from .file import Entry, read

SET_BY_RINGRUN = ("error_file", "placed_gpu", "restart_count")
"""Settings that are no flags: ringrun sets them itself, for each rank."""

_NOT_IN_FILE = ("help", "version", "config_file", "show_config", "check_build", "dry_run")
"""What ringrun itself is to do now; no setting of a job."""


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
    """ringrun's own flags, those of the file merged in."""

    sources: Mapping[str, str]
    """Of each of them, by its destination; `default` where it was not given."""

    settings: Mapping[str, Value]
    """ringreduce's; empty where nothing asked for them."""

    notices: Sequence[str]
    """What the user should know of flags that have no meaning here."""

    @property
    def variables(self) -> dict[str, str]:
        """The variables that flags and the file set for all ranks."""
        return {variable(name): value.text for name, value in self.settings.items() if value.is_explicit}

    def place(self, destination: str) -> str:
        """Return `file:line: ` to begin a message about an own flag that the file has set, else nothing."""
        source = self.sources.get(destination, "default")
        return "" if source == "default" or source.startswith("-") else f"{source}: "

    def settle(self, one: str, other: str) -> None:
        """Of two own flags that exclude each other, forget the file's if the other is on the command line."""
        lower = [each for each in (one, other) if self.place(each)]
        if getattr(self.options, one) and getattr(self.options, other) and len(lower) == 1:
            setattr(self.options, lower[0], None)

    def table(self) -> str:
        """Return one aligned line for each flag of ringrun's and each setting: name, value, where it came from."""
        own = [(name, _shown(getattr(self.options, name)), source) for name, source in self.sources.items()]
        rows = own + [(name, _shown(value.text), value.source) for name, value in self.settings.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows)


def variable(setting: str) -> str:
    """Return the variable of a setting."""
    return f"RINGREDUCE_{setting.upper()}"


def public_settings() -> dict[str, Any]:
    """Return the defaults of ringreduce's settings that are flags, by name."""
    from ringreduce.settings import Settings

    return {field.name: field.default for field in dataclasses.fields(Settings) if field.name not in SET_BY_RINGRUN}


def add_own_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags that this file serves to ringrun's own."""
    group.add_argument("--config-file", metavar="FILE", help="read flags from a YAML file: cycle_time_ms: 5, …")
    group.add_argument("--show-config", action="store_true", help="print all settings and where each came from")
    group.add_argument("--check-build", action="store_true", help="print which frameworks and MPIs were found")


@dataclasses.dataclass(frozen=True)
class _Level:
    """What one of the command line and the file has given: values and sources by argparse's destination."""

    given: dict[str, Any]
    sources: dict[str, str]


def resolve(parser: argparse.ArgumentParser, arguments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Return what `arguments` and their file say; `parser` knows ringrun's own flags. Raises UsageError."""
    own = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    first, unknown = parser.parse_known_args(arguments)
    seems_plain = not unknown and not (first.command and first.command[0].startswith("-"))
    if seems_plain and not first.config_file and not first.show_config:
        return _merged(own, first.command, _command_line(parser, arguments), _Level({}, {}), {})
    defaults = public_settings()
    _add_setting_flags(parser, defaults)
    flags = _command_line(parser, arguments)
    _refuse_value_of_switch(parser, arguments, flags.given["command"])
    path = flags.given.get("config_file")
    file = _Level({}, {}) if path is None else _file(parser, read(path), defaults)
    by_flag, by_file = _settings(flags), _settings(file)
    settings = {
        name: by_flag.get(name) or by_file.get(name) or _inherited(name, environ, default)
        for name, default in defaults.items()
    }
    _check(settings, environ)
    return _merged(own, flags.given["command"], flags, file, settings)


def split_mpi_args(text: str | None, place: str = "") -> list[str]:
    """Return the words of --mpi-args, as a shell would split them; UsageError for a broken quote."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        reason = str(error).lower()
        raise UsageError(f"{place}--mpi-args {text!r}: {reason}; close it, or write \\ before it") from None


def _command_line(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> _Level:
    flags = [action for action in parser._actions if action.option_strings]
    unset = argparse.Namespace(**{action.dest: None for action in flags})  # defaults would hide what was given
    given = {name: value for name, value in vars(parser.parse_args(arguments, unset)).items() if value is not None}
    sources = {}
    for action in flags:
        is_negative = isinstance(action, argparse.BooleanOptionalAction) and given.get(action.dest) is False
        sources[action.dest] = action.option_strings[-1 if is_negative else 0]
    return _Level(given, sources)


def _refuse_value_of_switch(parser: argparse.ArgumentParser, arguments: Sequence[str], command: Sequence[str]) -> None:
    """Raise UsageError for `--deterministic 1 python train.py`: 1 would be the command."""
    before = list(arguments[: len(arguments) - len(command)])[-1:]
    switches = [action for action in parser._actions if isinstance(action, argparse.BooleanOptionalAction)]
    for on, off in (action.option_strings for action in switches):
        if before in ([on], [off]) and command[:1] and command[0].lower() in ("0", "1", "true", "false", "yes", "no"):
            raise UsageError(f"{before[0]} {command[0]}: it takes no value; write {on} or {off}")


def _merged(
    own: Sequence[argparse.Action],
    command: list[str],
    flags: _Level,
    file: _Level,
    settings: Mapping[str, Value],
) -> Config:
    """Return the Config in which an own flag's value is the command line's, else the file's, else the default."""
    options, sources = argparse.Namespace(command=command), {}
    for action in own:
        level = next((level for level in (flags, file) if action.dest in level.given), None)
        setattr(options, action.dest, level.given[action.dest] if level else action.default)
        if action.dest not in _NOT_IN_FILE:
            sources[action.dest] = level.sources[action.dest] if level else "default"
    notices = [notice for level in (flags, file) for notice in _notices(level)]
    return Config(options, sources, settings, notices)


def _add_setting_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add a flag for each setting, and horovodrun's; a setting that is on or off has --name and --no-name."""
    for name, default in defaults.items():
        action: Any = argparse.BooleanOptionalAction if isinstance(default, bool) else "store"
        parser.add_argument(_flag(name), dest=_destination(name), action=action, help=argparse.SUPPRESS)
    horovod.add_flags(parser)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _destination(setting: str) -> str:
    return f"setting {setting}"


def _settings(level: _Level) -> dict[str, Value]:
    """Return the settings that `level` gives, under whatever name."""
    found: dict[str, Value] = {}

    def add(name: str, text: str, source: str) -> None:
        if name in found:
            raise UsageError(f"{source} and {found[name].source} both set {name}; give one of them")
        found[name] = Value(text, source, is_explicit=True)

    stall_check = level.given.get(horovod.destination(horovod.STALL_CHECK))
    for destination, value in level.given.items():
        kind, _, name = destination.partition(" ")
        source = level.sources.get(destination, "")
        if kind == "setting":
            add(name, str(int(value)) if isinstance(value, bool) else value, source)
        elif kind == "horovod" and name in horovod.ALIASES:
            alias = horovod.ALIASES[name]
            try:
                text = alias.value(value)
            except UsageError as error:
                raise UsageError(f"{_named(source, name)}: {error}") from None
            add(alias.setting, text, source)
        elif kind == "horovod" and name in horovod.SWITCHES:
            setting, turns_on = horovod.SWITCHES[name]
            add(setting, str(int(turns_on == value)), source)  # false in a file: the opposite
    if stall_check is not None and (stall_check is False or "stall_check_s" not in found):
        time_s = public_settings()["stall_check_s"] if stall_check else 0.0
        source = level.sources[horovod.destination(horovod.STALL_CHECK)]
        found["stall_check_s"] = Value(str(time_s), source, is_explicit=True)
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
    from ringreduce.collectives.choose import ALGORITHMS, Constants
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
    """Return a line for each flag that has no meaning here; for autotune's, one line together."""
    ignored = {**horovod.IGNORED_SWITCHES, **horovod.IGNORED_VALUES}
    given = [name for name in ignored if level.given.get(horovod.destination(name))]
    tuning = [name for name in given if ignored[name] == horovod.TUNING]
    return [
        f"{_named(level.sources[horovod.destination(name)], name)} has no meaning here ({ignored[name]})"
        for name in given
        if name not in tuning[1:]
    ]


def _file(parser: argparse.ArgumentParser, entries: Sequence[Entry], defaults: Mapping[str, Any]) -> _Level:
    """Return what the entries of a file mean to `parser`; UsageError, with file and line, for what it does not know."""
    actions = {
        option.lstrip("-"): action
        for action in parser._actions
        for option in action.option_strings
        if action.dest not in _NOT_IN_FILE and len(option) > 2
    }
    level = _Level({}, {})
    for entry in entries:
        action = actions.get(entry.flag)
        if action is None:
            raise UsageError(f"{entry.place}: {_unknown(entry, list(actions))}")
        if action.dest in level.given:
            raise UsageError(f"{entry.place}: {entry.key} says again what {level.sources[action.dest]} says")
        value = _switched(entry, action) if action.nargs == 0 else _parsed(parser, entry, action, defaults)
        level.given[action.dest], level.sources[action.dest] = value, entry.place
    return level


def _unknown(entry: Entry, flags: Sequence[str]) -> str:
    keys = [flag.replace("-", "_") for flag in flags]
    nearest = difflib.get_close_matches(entry.flag.replace("-", "_"), keys, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "keys are flags without the dashes before them; see ringrun -h"
    return f"unknown key {entry.key!r}; {hint}"


def _switched(entry: Entry, action: argparse.Action) -> bool:
    if entry.kind != "bool":
        raise UsageError(f"{entry.place}: {entry.key}: expected true or false, but it is {entry.text!r}")
    is_on = entry.text.lower() in ("true", "yes", "on")
    is_negative = isinstance(action, argparse.BooleanOptionalAction) and f"--{entry.flag}" != action.option_strings[0]
    return is_on != is_negative


def _parsed(parser: argparse.ArgumentParser, entry: Entry, action: argparse.Action, defaults: Mapping[str, Any]) -> Any:
    kind, _, name = action.dest.partition(" ")
    setting = name if kind == "setting" else horovod.ALIASES[name].setting if name in horovod.ALIASES else None
    expected = _expected(entry, defaults[setting]) if setting else "" if entry.kind != "bool" else "a value"
    if expected:
        raise UsageError(f"{entry.place}: {entry.key}: expected {expected}, but it is {entry.text!r} ({entry.kind})")
    try:
        given, _ = parser.parse_known_args([f"{action.option_strings[-1]}={entry.text}"])
    except UsageError as error:
        raise UsageError(f"{entry.place}: {entry.key}: {error}") from None
    return getattr(given, action.dest)


def _expected(entry: Entry, default: Any) -> str:
    """Return what the entry of a setting should be, by its default, if YAML takes it for something else."""
    if isinstance(default, str):
        return "" if entry.kind == "str" else "text; put it in quotes"
    return "a number without quotes" if entry.is_quoted or entry.kind == "bool" else ""


def _shown(value: object) -> str:
    """Return a value in one line; nothing as ''."""
    text = "" if value is None else shlex.join(value) if isinstance(value, list) else str(value)
    return text if text.isprintable() and text else repr(text)
