"""The file in which knobs are kept that were found by tuning: written by rank 0, read by rank 0 of a later run.

They count for the layout for which they were found: this version, this MPI, as many ranks on as many hosts. JSON, for
people too:

    {"layout": {"ringreduce": "0.1.0", "mpi": "Open MPI 5.0.11", "ranks_per_host": [4], "shared_memory": true},
     "knobs": {"shared_slot_bytes": 524288, "fusion_slot_bytes": 2097152, "algorithm": "auto", "slots_in_flight": 2},
     "step_mb": 102.2, "steps": 212,
     "tried": [{"knobs": ..., "gbs": 9.31, "samples": 21}, ...]}
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from ringreduce._version import __version__
from ringreduce.collectives.choose import ALGORITHMS
from ringreduce.engine.knobs import AUTO, MOST_IN_FLIGHT, Knobs
from ringreduce.log import LOGGER
from ringreduce.mpi import mpi_library
from ringreduce.settings import Settings
from ringreduce.world import World

VARIABLE = "RINGREDUCE_AUTOTUNE_FILE"


def layout(world: World, shared_memory: bool) -> dict[str, Any]:
    """What tuned knobs depend on."""
    hosts = list(world.hosts)
    return {
        "ringreduce": __version__,
        "mpi": "threads of one process" if world.comm is None else mpi_library()[0],
        "ranks_per_host": [hosts.count(host) for host in dict.fromkeys(hosts)],
        "shared_memory": shared_memory,
    }


def read_by_rank_0(world: World, shared_memory: bool, settings: Settings) -> Knobs:
    """The knobs to begin with, on all ranks; every rank must call it."""
    if settings.autotune or not settings.autotune_file:
        return Knobs.of(settings)
    own = starting_knobs(settings, layout(world, shared_memory)) if world.rank == 0 else None
    knobs: Knobs = world.gather(own)[0]
    return knobs


def starting_knobs(settings: Settings, expected: dict[str, Any]) -> Knobs:
    """Those of the file, or the defaults and a line that says why the file is ignored.

    expected: the layout of this run.
    """
    if settings.autotune or not settings.autotune_file:
        return Knobs.of(settings)
    try:
        return read(settings, expected)
    except _Ignored as why:
        _say(f"{VARIABLE}={settings.autotune_file} is ignored: {why}")
        return Knobs.of(settings)


class _Ignored(Exception):  # noqa: N818 - it never leaves this file
    """Why a file cannot be used."""


def read(settings: Settings, expected: dict[str, Any]) -> Knobs:
    """The knobs of the file."""
    try:
        with open(settings.autotune_file, encoding="utf-8") as file:
            content = json.load(file)
        found, knobs = content["layout"], Knobs(**content["knobs"], origin="loaded")
    except FileNotFoundError:
        raise _Ignored("there is no such file; a run with RINGREDUCE_AUTOTUNE=1 makes it") from None
    except OSError as exc:
        raise _Ignored(exc.strerror) from None
    except (ValueError, KeyError, TypeError) as exc:
        what = f"not what autotune writes ({type(exc).__name__}: {exc})"
        raise _Ignored(f"{what}; delete it, and make it again with RINGREDUCE_AUTOTUNE=1") from None
    for name, value in expected.items():
        if not isinstance(found, dict) or found.get(name) != value:
            theirs = found.get(name) if isinstance(found, dict) else found
            raise _Ignored(f"it was made for {name} {theirs}, and here it is {value}")
    _check(knobs, settings)
    return knobs


def _check(knobs: Knobs, settings: Settings) -> None:
    """Are these knobs possible with these settings?"""
    for name, least, most in (
        ("shared_slot_bytes", 64, settings.shared_slot_bytes),
        ("fusion_slot_bytes", 1, settings.fusion_slot_bytes),
        ("slots_in_flight", 1, MOST_IN_FLIGHT),
    ):
        value = getattr(knobs, name)
        if type(value) is not int or not least <= value <= most:
            raise _Ignored(f"{name}: expected a whole number from {least} to {most}, and it has {value!r}")
    if knobs.algorithm not in (AUTO, *ALGORITHMS):
        raise _Ignored(f"algorithm {knobs.algorithm!r}: expected auto or one of {', '.join(ALGORITHMS)}")
    if knobs.algorithm != AUTO and (settings.deterministic or settings.algorithm != AUTO):
        what = "RINGREDUCE_DETERMINISTIC=1" if settings.deterministic else f"RINGREDUCE_ALGORITHM={settings.algorithm}"
        raise _Ignored(f"it asks for the algorithm {knobs.algorithm}, and {what} is set")


def write(path: str, content: dict[str, Any]) -> str:
    """Write the file, whole or not at all; returns what went wrong, in a few words."""
    partial = f"{path}.{os.getpid()}.part"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(partial, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        return exc.strerror or str(exc)
    return ""


def plain(knobs: Knobs) -> dict[str, Any]:
    """As they stand in the file."""
    values = knobs._asdict()
    del values["origin"]
    return values


def report(text: str) -> None:
    """A line about tuning, on rank 0."""
    _say(f"autotune: {text}")


def _say(text: str) -> None:
    LOGGER.warning(text)
