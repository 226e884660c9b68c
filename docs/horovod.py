"""The tables of horovod.md, which stand between its comments: `python docs/horovod.py` writes them.

They come from ringreduce/frameworks/horovod.py, all public names of Horovod, and from launcher/config/horovod.py.
"""

import re
from pathlib import Path

from ringreduce.frameworks.horovod import INSTEAD, MODULES, WITHOUT
from ringrun.config.horovod import IGNORED_SWITCHES, IGNORED_VALUES

PAGE = Path(__file__).with_suffix(".md")
TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def code(names):
    """The names as code, with commas between them."""
    return ", ".join(f"`{name}`" for name in names)


def by_value(pairs):
    """The keys that have the same value, by value, in the order in which they come."""
    found = {}
    for key, value in pairs:
        found.setdefault(value, []).append(key)
    return found


def modules():
    """Horovod's modules, by the modules here that have their names."""
    rows = by_value((name, module.here.split()[0]) for name, module in MODULES.items() if module.names)
    rows = {f"`{here}`": names for here, names in rows.items()} | by_value(WITHOUT.items())
    return ["| Horovod | here |", "|---|---|", *(f"| {code(names)} | {here} |" for here, names in rows.items())]


def names():
    """The public names that are not there."""
    public = {name for module in MODULES.values() for name in module.names.split()}
    public -= {name.rpartition(".")[2] for name in MODULES}
    single = [(name, text) for names, text in INSTEAD.items() for name in names.split() if name in public]
    rows = by_value(single)
    return ["| not here | instead |", "|---|---|", *(f"| {code(names)} | {text} |" for text, names in rows.items())]


def flags():
    """The flags that do nothing."""
    rows = by_value({**IGNORED_VALUES, **IGNORED_SWITCHES}.items())
    text = (f"| {code(f'--{name}' for name in names)} | {why} |" for why, names in rows.items())
    return ["| flag | why |", "|---|---|", *text]


def written(page):
    """The text of the page, with its tables as the code has them now."""
    made = {each.__name__: each for each in (modules, names, flags)}
    return TABLE.sub(lambda found: "\n".join([found[1], *made[found[2]](), "", found[4]]), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
