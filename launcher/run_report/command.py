"""ringrun report: builds report.html of a run report again.

ringrun report DIR      reads DIR/report.json, as `ringrun --report DIR` has written it
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from .write import DATA, PAGE, write_page


def run(arguments: Sequence[str]) -> int:
    """Do what `ringrun report` with `arguments` says and return the exit code; UsageError where there is no report."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__.strip() if __doc__ else "")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(f"ringrun report {shlex.join(arguments)}: expected one DIR, that of ringrun --report DIR")
    folder = Path(arguments[0])
    try:
        sentence = write_page(folder, json.loads((folder / DATA).read_text()))
    except OSError as error:
        raise UsageError(f"ringrun report {folder}: {error.filename or folder}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"ringrun report {folder}: {folder / DATA} is no report of ringrun's: {error!r}") from error
    print(f"{folder / PAGE}: {sentence}")
    return 0
