"""Signatures and first sentences in reference.md, which is read in the repository, too: `python docs/reference.py`.

Each line that begins with a name, as in - `ringreduce.init`: …, is written anew from the code. On the site hooks.py
puts the whole docstring in its place.
"""

import importlib.util
import re
from pathlib import Path

import griffe

FOLDER = Path(__file__).parent
PAGE = FOLDER / "reference.md"
LINE = re.compile(r"^- `(ringreduce\.[\w.]+)[^`]*`: .*$", re.MULTILINE)
STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def signature(called):
    """The parameters of a function or class, with their defaults."""
    shown, is_keyword_only = [], False
    for each in called.parameters:
        if each.name == "self":
            continue
        if each.kind is griffe.ParameterKind.keyword_only and not is_keyword_only:
            shown += [] if any(text.startswith("*") for text in shown) else ["*"]
            is_keyword_only = True
        has_default = each.default is not None and each.kind not in STARS
        shown.append(STARS.get(each.kind, "") + each.name + (f"={each.default}" if has_default else ""))
    return f"({', '.join(shown)})"


def summary(found):
    """The first sentence of a docstring; of a name for something else, what that is."""
    if found.docstring is None:
        return f"another name for `{found.value}`."
    text = " ".join(found.docstring.value.partition("\n\n")[0].split())
    first = re.split(r"(?<=[.:]) (?=[A-Z`>-])", re.sub(r"^- \*\*(\w+):\*\* ", r"\1: ", text))[0]
    return re.sub(r":$", ".", first)


def line(package, name):
    """What the page has of one name."""
    found = package[name.partition(".")[2]]
    found = found.final_target if found.is_alias else found
    is_record = (
        found.is_class and "dataclass" in found.labels and all(each.default is None for each in found.parameters)
    )
    is_called = found.is_function or (found.is_class and found.parameters and not is_record)
    return f"- `{name}{signature(found) if is_called else ''}`: {summary(found)}"


def written(text):
    """The text of the page, its lines as the code has them now."""
    extensions = griffe.load_extensions(FOLDER / "docstrings.py")
    installed = Path(importlib.util.find_spec("ringreduce").origin).parents[1]
    package = griffe.load("ringreduce", search_paths=[installed], extensions=extensions, resolve_aliases=True)
    return LINE.sub(lambda found: line(package, found[1]), text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
