"""Writes DIR/report.json and DIR/report.html: soon after the start, each minute, at the end. It never harms the job.

A file is replaced as a whole, so that whoever is killed in the middle leaves the one before it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LauncherError, UsageError
from ..output.files import refusal, try_to_write
from ..text import counted
from .collect import Collector

if TYPE_CHECKING:
    from .document import Json

DATA, PAGE = "report.json", "report.html"
_FIRST_S, _EACH_S = 10.0, 60.0
_PATIENCE_S = 30.0  # at the end, with a file system that hangs


class Writer:
    """A job's. Raises: UsageError where the folder cannot be made; MachineError if that is not because of its path."""

    def __init__(self, directory: str, collector: Collector, say: Callable[[str], None]) -> None:
        if not directory:
            raise UsageError("--report '': expected a folder for the report")
        self._folder, self._collector, self._say = Path(directory), collector, say
        self._said: set[str] = set()
        self._is_over = threading.Event()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = _part(self._folder / DATA)
            with FileIO(path, "wb") as file:
                try_to_write(file, directory)
            path.unlink()
        except OSError as error:
            raise refusal("--report", directory, error) from error
        from .page import MISSING, is_possible  # its template is not needed by other commands

        self._has_page = is_possible()
        if not self._has_page:
            say(f"ringrun: {MISSING}; this job will leave {self._folder / DATA}, for ringrun report {self._folder}")
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def finish(self, exit_code: int) -> None:
        """Write the last report, of a job that has ended so."""
        self._collector.exit_code = exit_code
        self._is_over.set()
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self._say(f"ringrun: writing to {self._folder} hangs; the report there may be up to a minute out of date")

    def _run(self) -> None:
        wait_s = _FIRST_S
        while not self._is_over.wait(wait_s):
            if not any(each.get("counted") for each in self._collector.latest()):  # else there is nothing new to write
                self._write()
            wait_s = _EACH_S
        if said := self._write():
            self._say(f"ringrun: {said}")

    def _write(self) -> str:
        """Return the file that shows the report, and what it says in short; what could not be written is said once."""
        said = ""
        try:
            from .document import document  # only a job that is asked for a report loads it

            report = document(self._collector)
            replace(self._folder / DATA, json.dumps(report))
            said = f"{self._folder / DATA}: {in_short(report)}"
            if self._has_page:
                write_page(self._folder, report)
                said = f"{self._folder / PAGE}: {in_short(report)}"
            return said
        except OSError as error:
            why = f"the report in {self._folder} cannot be written: {error.strerror or error}; the job continues"
        except LauncherError as error:
            why = f"{self._folder / DATA} is written, but {error}; then: ringrun report {self._folder}"
        except Exception as error:
            why = f"the report in {self._folder} is lost, but the job continues: {type(error).__name__}: {error}"
        if why not in self._said:
            self._said.add(why)
            self._say(f"ringrun: {why}")
        return said


def write_page(folder: Path, report: Json) -> None:
    """Write the page that shows `report`."""
    from .page import render

    replace(folder / PAGE, render(report))


def in_short(report: Json) -> str:
    """Return the report's sentence, after how many findings there are."""
    found = len(report["findings"])
    return f"{counted(found, 'finding')} of --check; {report['sentence']}" if found else str(report["sentence"])


def replace(path: Path, text: str) -> None:
    """Write a file as a whole."""
    part = _part(path)
    part.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(part, path)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")
