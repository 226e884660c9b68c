"""The options of a DistributedOptimizer in a saved model.

A file in Keras' format, of Keras 2 too, may have files of each object beside it, "assets". An optimizer's options are
one, which Keras ignores where this package is not imported. Older formats, HDF5 and SavedModel, have no place for them.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Sequence
from typing import Any

from ringreduce.api.process_sets import ProcessSet, get_process_set_ids_and_ranks, global_process_set, host_process_set
from ringreduce.collectives.ops import Adasum, Average, Sum
from ringreduce.compression import Compression
from ringreduce.errors import InputError

FILE = "ringreduce.json"
OPS = {repr(op): op for op in (Average, Sum, Adasum)}
_INT4 = "int4", "int4.everywhere", "int4.stochastic", "int4.everywhere.stochastic"
COMPRESSIONS = "none", "fp16", "bf16", "int8", "int8.everywhere", *_INT4
SETS = {repr(each): each for each in (global_process_set, host_process_set)}


def kept(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of DistributedOptimizer as a file has them: of classes and process sets, their names or ranks."""
    compression, members = options["compression"], options["process_set"]
    names = (each for each in COMPRESSIONS if operator.attrgetter(each)(Compression) == compression)
    own = {
        "op": repr(options["op"]),
        "compression": next(names, repr(compression)),
        "process_set": list(members.ranks or ()) if type(members) is ProcessSet else repr(members),
    }
    return options | own


def write(kept: dict[str, Any], folder: str, own: Sequence[int] = ()) -> None:
    """Keep them there.  own: which variables are a rank's own, by their places."""
    with open(os.path.join(folder, FILE), "w") as file:
        json.dump(kept | ({"local_variables": own} if own else {}), file)


def read(folder: str | None) -> dict[str, Any] | None:
    """What was kept there; None: nothing."""
    try:
        with open(os.path.join(folder or "", FILE)) as file:
            found: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return found


def arguments(kept: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of DistributedOptimizer: those that were kept, or `given` in their place.

    Raises: InputError for a class or a process set that is not known here, and is not given.
    """
    named = {
        "op": OPS,
        "compression": {each: operator.attrgetter(each)(Compression) for each in COMPRESSIONS},
        "process_set": SETS | {str(ranks): _set(number, ranks) for number, ranks in _sets().items()},
    }
    found = dict(kept)
    for name, known in named.items():
        if name in kept and name not in given:
            if str(kept[name]) not in known:
                raise InputError(
                    f"load_model: the model was saved with {name}={kept[name]}, which is not known here; "
                    f"pass {name}= yourself"
                )
            found[name] = known[str(kept[name])]
    return found | given


def _sets() -> dict[int, list[int]]:
    return {number: ranks for number, ranks in get_process_set_ids_and_ranks().items() if number}


def _set(number: int, ranks: list[int]) -> ProcessSet:
    process_set = ProcessSet(ranks)
    process_set.process_set_id = number
    return process_set
