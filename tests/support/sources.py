"""Where the project's files are, as the packages may be installed elsewhere (as from a wheel), and what they say."""

import ast
import gc
from pathlib import Path

import ringreduce
import ringrun
from tests.support.jobs import ROOT

_INSTALLED = {"ringreduce": ringreduce, "launcher": ringrun}


def found(file):
    """The path of a file or folder that is named as in a clone."""
    folder, _, rest = file.partition("/")
    return Path(_INSTALLED[folder].__file__).parent / rest if folder in _INSTALLED else ROOT / file


def parsed(path):
    """The syntax tree of a file.

    No garbage is collected meanwhile: in CPython 3.11.7 and older, a finalizer that formats a traceback, which parses
    lines itself, makes the parsing that it interrupts fail with `SystemError: AST constructor recursion depth mismatch`
    (python/cpython#106905).
    """
    gc.disable()
    try:
        return ast.parse(path.read_text())  # noqa: TID251
    finally:
        gc.enable()
