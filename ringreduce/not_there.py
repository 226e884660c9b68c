"""Names that Horovod has and ringreduce does not have yet: the AttributeError says what to use instead."""

_RESTARTS = "`ringrun --restarts N` restarts a job after a failure"
_RINGRUN = "start your script with `ringrun -np N python train.py`"
_NOT_THERE = {
    "elastic": _RESTARTS,
    "run": _RINGRUN,
    "run_elastic": _RESTARTS,
    "spark": _RINGRUN,
    "ray": _RINGRUN,
    "callbacks": "they are for Keras, which has no adapter yet; call ringreduce's functions in your own training loop",
    "keras": "in your own training loop apply the result of ringreduce.grouped_allreduce(gradients)",
    "tensorflow": "pass arrays that support DLPack to ringreduce's functions",
}


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module lacks."""
    instead = f": it is not supported yet; {_NOT_THERE[name]}" if name in _NOT_THERE else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{instead}", name=name)
