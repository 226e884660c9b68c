"""Where the project's files are: the packages may be installed elsewhere, as from a wheel."""

from pathlib import Path

import ringreduce
import ringrun
from tests.support.jobs import ROOT

_INSTALLED = {"ringreduce": ringreduce, "launcher": ringrun}


def found(file):
    """The path of a file or folder that is named as in a clone."""
    folder, _, rest = file.partition("/")
    return Path(_INSTALLED[folder].__file__).parent / rest if folder in _INSTALLED else ROOT / file
