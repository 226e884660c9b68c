"""The setting `check`: which checks run, and how often.

    nan               report the first NaN or infinity in a gradient; nan:raise, nan:zero do more; nan:report is nan
    divergence[:N]    every N steps (100): have all ranks equal parameters and buffers?
    sdc[:N]           every N steps (1000): does another algorithm give the same sums?

Commas between them; none of them twice; empty: no checks.
"""

from __future__ import annotations

import dataclasses

from ringreduce.errors import SettingsError

ACTIONS = ("report", "raise", "zero")
EVERY = {"divergence": 100, "sdc": 1000}  # steps, by default
EXPECTED = "nan, nan:raise, nan:zero, divergence[:N], sdc[:N], with commas between them, such as nan,divergence:100"


@dataclasses.dataclass(frozen=True)
class Checks:
    """What the setting says."""

    nan: str = ""  # one of ACTIONS; empty: not looked for
    divergence: int = 0  # every so many steps; 0: never
    sdc: int = 0  # as well

    @classmethod
    def parse(cls, text: str) -> Checks:
        """Raises SettingsError for anything else than the module's docstring names.

        >>> Checks.parse("nan:zero,divergence")
        Checks(nan='zero', divergence=100, sdc=0)
        """
        found: dict[str, str | int] = {}
        for item in filter(None, (each.strip() for each in text.split(","))):
            name, _, option = item.partition(":")
            if name in found:
                raise SettingsError(f"check={text!r}: {name} is named twice")
            if name == "nan" and (option or ACTIONS[0]) in ACTIONS:
                found[name] = option or ACTIONS[0]
            elif name in EVERY and option.isascii() and (option or "1").isdecimal() and int(option or 1) > 0:
                found[name] = int(option or EVERY[name])
            else:
                raise SettingsError(f"check={text!r}: {item!r}; expected {EXPECTED}")
        return cls(**found)  # type: ignore[arg-type]

    def require(self, deterministic: bool) -> None:
        """Raise SettingsError for what needs sums in the order of the ranks, where they are not."""
        if self.sdc and not deterministic:
            raise SettingsError(f"check='sdc:{self.sdc}' compares bits; it needs RINGREDUCE_DETERMINISTIC=1")

    def __str__(self) -> str:
        """The text that `parse` makes this of, with all options; equal for equal checks."""
        return ",".join(f"{name}:{option}" for name, option in vars(self).items() if option)
