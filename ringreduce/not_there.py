"""What Horovod has and ringreduce has not yet: its name is an AttributeError that says what works instead."""

_RESTARTS = "`ringrun --restarts N` goes on after a failure"
_RINGRUN = "start a script of yours with `ringrun -np N python train.py`"
_NOT_THERE = {
    "elastic": _RESTARTS,
    "run": _RINGRUN,
    "run_elastic": _RESTARTS,
    "spark": _RINGRUN,
    "ray": _RINGRUN,
    "callbacks": "they are for Keras, which has no adapter yet; a loop of your own calls ringreduce's functions",
    "keras": "a loop of your own applies what ringreduce.grouped_allreduce(gradients) gives",
    "tensorflow": "arrays that speak DLPack go through ringreduce's functions",
}


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for an attribute that a module has not."""
    instead = f": it is not there yet; {_NOT_THERE[name]}" if name in _NOT_THERE else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{instead}", name=name)
