"""Are the bits of two runs the same? `ringrun --twice N` runs a job twice, and in both a rank keeps what it reduces.

Of each array that is reduced: a fingerprint of what this rank gave and of what it got, by name and by how often the
name was reduced before, which is the step. When a name comes for step N a run ends, by SystemExit, on all ranks alike:
the first one writes a file for each rank, the second one compares.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.objects import allgather_object
from ringreduce.arrays.buffer import Buffer
from ringreduce.errors import SettingsError
from ringreduce.execution.signature import names_of, ranks_text
from ringreduce.execution.submission import Submission
from ringreduce.kernels.fingerprint import fingerprint
from ringreduce.monitor import launcher_link
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.settings.log import JOB

UNNAMED = "without a name"
Record = dict[str, list[Any]]  # by "STEP NAME": [step, name, before, after], in the order of submissions


class Twice:
    """One run, on one rank."""

    def __init__(self, setting: str, rank: int) -> None:
        """Raises: SettingsError in the second run where the first one has left nothing."""
        run, steps, folder = setting.split(":", 2)
        self._steps, self._is_first = int(steps), run == "1"
        self._file = Path(folder, f"rank.{rank}.json")
        self._counts: Counter[str] = Counter()
        self._record: Record = {}
        if not self._is_first:
            if not self._file.exists():
                raise SettingsError(
                    f"--twice {steps}: no array was reduced that often in the first run; ask for fewer steps"
                )
            self._before: Record = json.loads(self._file.read_text())
            self._file.unlink()

    def look(
        self,
        process_set: int,
        name: str | None,
        names: Sequence[str] | None,
        details: Sequence[tuple[str, Any]],
        inputs: Sequence[Buffer],
    ) -> list[str] | None:
        """See `engine.submitting.Inspector`; raises SystemExit after the last step."""
        if "op" not in dict(details) or any(each.on_gpu for each in inputs):
            return None
        found, is_named = list(names_of(name or UNNAMED, names, len(inputs))), bool(name or names)
        if process_set > GLOBAL:  # where ranks use a name in several
            found = [f"{each} in process set {process_set}" for each in found]
        if is_named and any(self._counts[each] >= self._steps for each in found):
            self._end()
        return found

    def begin(self, made: Submission, names: list[str], _: bool) -> None:
        """See `engine.submitting.Inspector`."""
        rows = []
        for name, each in zip(names, made.inputs, strict=True):
            row = [self._counts[name], name, fingerprint(each.flat.view(np.uint8)), 0]
            self._record[f"{row[0]} {name}"] = row
            self._counts[name] += 1
            rows.append(row)
        made.add_then(functools.partial(_arrived, made, rows))

    def _end(self) -> None:
        if self._is_first:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._record))
            raise SystemExit(0)
        verdicts = allgather_object(first_difference(self._before, self._record))
        text = verdict(verdicts, self._steps, len(self._counts))
        current, differs = runtime.current("check"), any(verdicts)
        if current.world.rank != 0:
            raise SystemExit(0)
        JOB.warning(f"--twice: {text}")
        if differs:
            launcher_link.report(current.settings.error_file, finding=f"--twice: {text}")
        raise SystemExit(int(differs))


of_rank = functools.cache(Twice)  # one: it counts on after check(), and after shutdown() and init()


def _arrived(made: Submission, rows: list[list[Any]], _: BaseException | None) -> None:
    """See `Submission.then`."""
    for row, each in zip(rows, made.outputs, strict=False):  # a reduce_scatter has one output of several inputs
        row[3] = fingerprint(each.flat.view(np.uint8))


def first_difference(first: Record, second: Record) -> list[Any] | None:
    """Step, place in it, name, and whether what was given differs too; of what both runs have reduced."""
    for place, (key, (step, name, *values)) in enumerate(first.items()):
        if key in second and second[key][2:] != values:
            return [step, place, name, second[key][2] != values[0]]
    return None


def verdict(differences: Sequence[list[Any] | None], steps: int, tensors: int) -> str:
    """What to say of all ranks' first differences."""
    found = {rank: each for rank, each in enumerate(differences) if each is not None}
    if not found:
        return f"the same bits in {steps} steps, in all arrays ({tensors}), on {ranks_text(range(len(differences)))}"
    step, _, name, _ = min(found.values())
    who = [rank for rank, each in found.items() if (each[0], each[2], each[3]) == (step, name, True)]
    if who:
        return (
            f"{name!r} differs in step {step}, on {ranks_text(who)} before it is reduced: look there for what differs "
            "from run to run, such as seeds, the order of data, or kernels that add in an arbitrary order "
            "(torch.use_deterministic_algorithms)"
        )
    return (
        f"{name!r} differs in step {step}, though the ranks passed the same values: the order of the sum differs; "
        "RINGREDUCE_DETERMINISTIC=1 fixes it"
    )
