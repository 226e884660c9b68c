"""Reads the YAML file that --config-file names, into entries: which flag, what value, in which line.

Keys are the flags' names, with underscores or dashes. Those that Horovod groups may stand in its groups:

    params:                       # the same as cycle_time_ms: 5 without a group
      cycle_time_ms: 5
    timeline:
      filename: timeline.json     # the same as timeline_filename: timeline.json

What a flag means, and whether there is one of that name, resolve.py knows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

GROUPS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}
"""What stands before a key of the group in the flag's name; `enabled` is the group's own name."""

_LISTS = {"env": "[SEED=1, HF_TOKEN]", "hosts": "[h1:4, h2:4]"}
"""How to write what other files have as maps: `env: {SEED: 1}`, `hosts: [h1: 4]`."""


@dataclass(frozen=True)
class Entry:
    """What the file gives for one flag."""

    flag: str
    """Without the dashes before it."""

    key: str
    """As it stands in the file, behind its group's."""

    texts: Sequence[str]
    """One, or those of a list."""

    kind: str
    """What YAML takes it for: bool, int, float, str, …, or list"""

    place: str
    """`file:line`."""

    @property
    def text(self) -> str:
        """Of one that is no list."""
        return self.texts[0]


def read(path: str) -> list[Entry]:
    """Return the entries of the file; UsageError if it cannot be read or is not such a file."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise UsageError(f"--config-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config-file {path}: not text in UTF-8 ({error.reason}, byte {error.start})") from error
    except ValueError as error:  # a null character in the path
        raise UsageError(f"--config-file {path!r}: {error}") from error
    return parse(text, path)


def parse(text: str, name: str) -> list[Entry]:
    """Return the entries of `text`, the content of the file called `name`; UsageError if it is no map of values."""
    root = _compose(text, name)
    if root is None:
        return []
    if root.id != "mapping":
        raise UsageError(f"{_place(name, root)}: expected lines of `key: value`, as in: cycle_time_ms: 5")
    return list(_entries(root, name))


def _compose(text: str, name: str) -> Any:
    """Return YAML's tree of nodes, which know their lines; None for an empty file."""
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"--config-file {name}: reading YAML needs PyYAML; pip install pyyaml") from error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        what = " ".join((error.problem or error.context or "?").split())
        raise UsageError(f"{name}:{line}: not YAML: {what}") from error
    except RecursionError:
        raise UsageError(f"{name}: nested too deeply; expected groups of values at most") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter two: an escape beyond Unicode
        raise UsageError(f"{name}: not YAML: {' '.join(str(error).split())}") from error


def _entries(root: Any, name: str) -> Iterator[Entry]:
    """Yield what stands in the map `root` and in its groups."""
    for key, place, node in _items(root, name):
        group = key.replace("_", "-")
        is_group = group in GROUPS
        if node.id == "mapping" and is_group:
            for inner, inner_place, value in _items(node, name):
                dashed = inner.replace("_", "-")
                flag = group if dashed == "enabled" else GROUPS[group] + dashed
                yield _entry(flag, f"{key}: {inner}", value, inner_place)
        elif not (is_group and _is_null(node)):  # a group whose lines are all commented out
            yield _entry(group, key, node, place)


def _items(mapping: Any, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each key, its line and its value."""
    for key, value in mapping.value:
        if key.id != "scalar" or not key.value.isprintable():
            raise UsageError(f"{_place(name, key)}: a key must be a name, as in: cycle_time_ms: 5")
        yield key.value, _place(name, key), value


def _entry(flag: str, key: str, node: Any, place: str) -> Entry:
    if node.id == "sequence":
        return Entry(flag, key, [_text(key, each, place) for each in node.value], "list", place)
    return Entry(flag, key, [_text(key, node, place)], node.tag.rpartition(":")[2], place)


def _text(key: str, node: Any, place: str) -> str:
    if node.id == "mapping":
        groups = ", ".join(group.replace("-", "_") for group in GROUPS)
        cure = f"write {key}: {_LISTS[key]}" if key in _LISTS else f"groups are {groups}"
        raise UsageError(f"{place}: {key}: expected one value, but it is a map; {cure}")
    if node.id == "sequence":
        raise UsageError(f"{place}: {key}: expected one value, but it is a list")
    if _is_null(node):
        raise UsageError(f"{place}: {key} has no value; give one, or remove the line")
    if "\0" in node.value or any("\ud800" <= character <= "\udfff" for character in node.value):
        raise UsageError(f"{place}: {key}: {node.value!r} holds a character that a variable cannot hold")
    return str(node.value)


def _is_null(node: Any) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _place(name: str, node: Any) -> str:
    return f"{name}:{node.start_mark.line + 1}"
