"""Every knob, parsed once by `init()`; what a knob is called, its unit and its default stand here and nowhere else.

A field `ring_segment_bytes` is set by the variable `RINGREDUCE_RING_SEGMENT_BYTES`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

from ringreduce.errors import SettingsError

PREFIX = "RINGREDUCE_"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one process; equal on all ranks but for `error_file`."""

    fusion_slot_bytes: int = 4 << 20
    """Tensors smaller than this are packed together into messages of at most this size; larger ones travel in place."""

    ring_segment_bytes: int = 512 << 10
    """A chunk travels in pieces of at most this size, so that summing one overlaps receiving the next."""

    error_file: str = ""
    """Where an uncaught exception is written as JSON for the launcher; set by ringrun for each rank."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the RINGREDUCE_… variables; raises SettingsError for an unknown name or a value that does not parse."""
        fields = {PREFIX + field.name.upper(): field for field in dataclasses.fields(cls)}
        values: dict[str, int | str] = {}
        for variable, text in environ.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in fields:
                raise SettingsError(_unknown(variable, list(fields)))
            field = fields[variable]
            values[field.name] = text if isinstance(field.default, str) else _positive(variable, text, field.default)
        return cls(**values)  # type: ignore[arg-type]


def _positive(variable: str, text: str, default: object) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise SettingsError(f"{variable}={text!r}: expected a whole number of bytes above 0, such as {default}")
    return value


def _unknown(variable: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(variable, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are: {', '.join(sorted(known))}"
    return f"{variable} is no setting of ringreduce; {hint}"
