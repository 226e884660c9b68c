"""A measure of work that no loaded machine changes."""

import gc
import sys
from collections.abc import Callable


def opcodes_of(work: Callable[[], object]) -> int:
    """How many of Python's instructions this takes; none are of a finalizer that the collector calls meanwhile."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
