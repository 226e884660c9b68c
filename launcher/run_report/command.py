"""ringrun report: builds report.html of a run report again.

ringrun report DIR      reads DIR/report.json, as `ringrun --report DIR` has written it
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from .document import VERSION, Json
from .write import DATA, PAGE, in_short, write_page


def run(arguments: Sequence[str]) -> int:
    """Do what `ringrun report` with `arguments` says and return the exit code; UsageError where there is no report."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__.strip() if __doc__ else "")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(f"ringrun report {shlex.join(arguments)}: expected one DIR, that of ringrun --report DIR")
    path = Path(arguments[0])
    folder = path.parent if path.name == DATA else path
    try:
        report = _read(folder / DATA)
        write_page(folder, report)
    except FileNotFoundError as error:
        raise UsageError(
            f"ringrun report {folder}: {folder / DATA} does not exist; it is written by a job that runs with --report"
        ) from error
    except OSError as error:
        raise UsageError(f"ringrun report {folder}: {error.filename or folder}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:  # of infinity, too
        raise UsageError(f"ringrun report {folder}: {folder / DATA} is not a run report: {error!r}") from error
    print(f"{folder / PAGE}: {in_short(report)}")
    return 0


def _read(path: Path) -> Json:
    """Return the report in `path`, of this version; ValueError if that is no report, UsageError for another version."""
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or "version" not in report:
        raise ValueError("expected a JSON object with a version")
    if report["version"] != VERSION:
        raise UsageError(
            f"ringrun report {path.parent}: {path} has version {report['version']!r}, but this ringrun reads version "
            f"{VERSION}: use the ringrun that wrote it"
        )
    return report
